"""Where an engine that starts finds a version's files: on storage that it shares, or pulled from the API."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx2

from alignment.artifacts import ADAPTER, ADAPTER_CONFIG, MANIFEST, sealed, unlike
from alignment.errors import DamagedAdapter

SILENCE_SECONDS = 10.0
PIECE = 1 << 20
MOST_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A version to hold: an adapter beside others, or with `full` the engine's own weights."""

    name: str
    path: Path
    manifest_sha256: str
    full: bool = False


# Yields a folder on this machine that was checked, and is there as long as it is being read. Raises ValueError (of
# which DamagedAdapter is one) or OSError. Called in a thread.
Bring = Callable[[AdapterRef], AbstractContextManager[Path]]


def in_place(check: Callable[[Path, str], None]) -> Bring:
    """For engines that see the trainer's storage. `check` refuses what an engine must not see."""

    @contextmanager
    def bring(ref: AdapterRef) -> Iterator[Path]:
        check(ref.path, ref.manifest_sha256)
        yield ref.path

    return bring


def over_http(url: str, key: str, check: Callable[[Path], None], room: Path) -> Bring:
    """For those that do not: the two files that an engine reads, each with the sha256 that the manifest gives it, the
    manifest with the one on record.

    `url`: the API's address. `key`: the engines' admin key. `check`: as of an adapter's folder. `room`: a folder for
    this alone. What is read there is taken away, and what a kill left there, at once. It is on disk, and not in
    memory: SGLang keeps the file mapped, and pages of a disk's file can be let go.
    """
    shutil.rmtree(room, ignore_errors=True)

    @contextmanager
    def bring(ref: AdapterRef) -> Iterator[Path]:
        room.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=room) as name, _asking(url, key, ref) as client:
            folder = Path(name)
            try:
                _pull(client, MANIFEST, folder, MOST_MANIFEST_BYTES)
                files, _ = sealed(folder, ref.manifest_sha256)
                for file in (ADAPTER_CONFIG, ADAPTER):
                    _pull(client, file, folder, files.get(file, {}).get("size", 0))
                    if unlike(folder / file, files.get(file)):
                        raise DamagedAdapter(f"{file} of {ref.name}, as it was pulled, is not what was sealed.")
            except httpx2.HTTPError as error:
                raise OSError(f"it cannot be pulled from {url}: {error!r}") from error
            check(folder)
            yield folder

    return bring


def _asking(url: str, key: str, ref: AdapterRef) -> httpx2.Client:
    return httpx2.Client(
        base_url=f"{url.rstrip('/')}/v1/engines/versions/{quote(ref.name, safe='')}/files/",
        headers={"authorization": f"Bearer {key}", "accept-encoding": "identity"},
        timeout=SILENCE_SECONDS,
        trust_env=False,
    )


def _pull(client: httpx2.Client, file: str, folder: Path, most: int) -> None:
    with client.stream("GET", file) as answer, open(folder / file, "wb") as out:
        if answer.status_code != 200:
            raise OSError(f"{file} cannot be pulled: {answer.status_code} {_said(answer)}")
        for piece in answer.iter_bytes(PIECE):
            out.write(piece)
            if out.tell() > most:
                raise DamagedAdapter(f"{file}, as it is pulled, is longer than the {most:,} bytes that were sealed.")


def _said(answer: httpx2.Response) -> str:
    try:
        return str(json.loads(answer.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "without a word"
