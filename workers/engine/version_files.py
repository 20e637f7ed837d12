"""Open a version's files for an engine that starts: from storage it shares with the trainer, or from the API."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import httpx2

from alignment.artifacts.manifest import MANIFEST, is_modified, read_manifest
from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG
from alignment.errors import DamagedAdapter
from app.inference.engine import EngineClient

READ_TIMEOUT_SECONDS = 10.0
CHUNK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class VersionRef:
    """A version to load: an adapter. `crashes`: how often in a row this engine has ended while it loaded it."""

    is_optional: ClassVar[bool] = True  # whether the engine may take traffic without it

    name: str
    path: Path
    manifest_sha256: str
    crashes: int = 0

    async def load(self, client: EngineClient, directory: Path) -> None:
        """Load it from a checked directory. Raises EngineUnavailable, EngineRefused."""
        await client.load_adapter(self.name, directory)
        await client.warm_up_adapter(self.name)

    def loaded_after(self, loaded: list[str]) -> list[str]:
        """Return what the engine has loaded once it has loaded this, too."""
        return [*loaded, self.name]


@dataclass(frozen=True, slots=True)
class WeightsRef(VersionRef):
    """A version to load in the place of the engine's own weights."""

    is_optional: ClassVar[bool] = False

    async def load(self, client: EngineClient, directory: Path) -> None:
        async with client.paused():
            await client.load_weights(directory, self.name)

    def loaded_after(self, loaded: list[str]) -> list[str]:
        return [self.name]


# Yields a checked directory on this machine that exists until the context ends. Raises ValueError (DamagedAdapter is
# one) or OSError. Called in a thread.
VersionOpener = Callable[[VersionRef], AbstractContextManager[Path]]


def local_versions(check: Callable[[Path, str], None]) -> VersionOpener:
    """Return the opener for engines that share the trainer's storage. `check` raises for a damaged version."""

    @contextmanager
    def open_version(ref: VersionRef) -> Iterator[Path]:
        check(ref.path, ref.manifest_sha256)
        yield ref.path

    return open_version


def downloaded_versions(url: str, key: str, check: Callable[[Path], None], directory: Path) -> VersionOpener:
    """Return the opener for engines that do not share the trainer's storage.

    It downloads the two files that an engine reads, and checks their sha256 against the manifest and the manifest's
    against the database. The download is deleted after use; what a killed process left is deleted now. Files are on
    disk, not in memory: SGLang keeps them mapped, and the kernel can evict pages of a file on disk.

    Args:
        url: the address of the API.
        key: the engines' admin key.
        check: raises for an adapter directory that does not match the base model.
        directory: used by this opener only.
    """
    shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def open_version(ref: VersionRef) -> Iterator[Path]:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as name, _connect(url, key, ref) as client:
            target = Path(name)
            try:
                _download(client, MANIFEST, target, MAX_MANIFEST_BYTES)
                files, _ = read_manifest(target, ref.manifest_sha256)
                for file in (ADAPTER_CONFIG, ADAPTER):
                    _download(client, file, target, files[file]["size"] if file in files else 0)
                    if is_modified(target / file, files.get(file)):
                        raise DamagedAdapter(f"{file} of {ref.name}, as it was pulled, is not what was sealed.")
            except httpx2.HTTPError as error:
                raise OSError(f"it cannot be pulled from {url}: {error!r}") from error
            check(target)
            yield target

    return open_version


def _connect(url: str, key: str, ref: VersionRef) -> httpx2.Client:
    return httpx2.Client(
        base_url=f"{url.rstrip('/')}/v1/engines/versions/{quote(ref.name, safe='')}/files/",
        headers={"authorization": f"Bearer {key}", "accept-encoding": "identity"},
        timeout=READ_TIMEOUT_SECONDS,
        trust_env=False,
    )


def _download(client: httpx2.Client, file: str, target: Path, max_bytes: int) -> None:
    with client.stream("GET", file) as response, open(target / file, "wb") as out:
        if response.status_code != 200:
            raise OSError(f"{file} cannot be pulled: {response.status_code} {_error_message(response)}")
        for chunk in response.iter_bytes(CHUNK_BYTES):
            out.write(chunk)
            if out.tell() > max_bytes:
                raise DamagedAdapter(
                    f"{file}, as it is pulled, is longer than the {max_bytes:,} bytes that were sealed."
                )


def _error_message(response: httpx2.Response) -> str:
    try:
        return str(json.loads(response.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "(the response has no error message)"
