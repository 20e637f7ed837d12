"""Versions for an engine without the trainer's storage: downloaded from the API, checked, and deleted after use."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from alignment.artifacts.manifest import MANIFEST, write_manifest
from alignment.artifacts.specs import ADAPTER, ADAPTER_CONFIG, check_adapter
from alignment.errors import DamagedAdapter
from app.core.settings import Settings
from app.inference.keys import load_engine_keys
from app.models import Version
from tests.support.adapters import make_adapter
from tests.support.deployment import Harness
from workers.base_model import adapter_spec
from workers.engine.__main__ import version_opener
from workers.engine.version_files import VersionOpener, VersionRef, downloaded_versions

STATE = "state.safetensors"


@pytest.fixture
async def version(harness: Harness) -> Version:
    """Create a version with an optimizer state next to the adapter, as the trainer writes it."""
    path = harness.settings.versions_dir / "shop-v1.abc.1"
    make_adapter(path, Path(harness.settings.model))
    (path / STATE).write_bytes(b"moments")
    return await harness.version(adapter_path=str(path), manifest_sha256=write_manifest(path, {"parent": None}))


@pytest.fixture
def key(harness: Harness) -> str:
    return load_engine_keys(harness.settings).admin


@pytest.fixture
def make_opener(harness: Harness, live_url: str, key: str, tmp_path: Path) -> Callable[..., VersionOpener]:
    (tmp_path / "downloads" / "interrupted-download").mkdir(parents=True)

    def make(key: str = key, url: str = live_url) -> VersionOpener:
        def check(path: Path) -> None:
            check_adapter(path, adapter_spec(harness.settings))

        return downloaded_versions(url, key, check, tmp_path / "downloads")

    return make


def ref(version: Version) -> VersionRef:
    assert version.adapter_name and version.manifest_sha256
    return VersionRef(version.adapter_name, Path("/not/on/this/machine"), version.manifest_sha256)


def leftover_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "downloads").iterdir())


async def test_download_equals_the_sealed_files(
    make_opener: Callable[..., VersionOpener], version: Version, tmp_path: Path
) -> None:
    with make_opener()(ref(version)) as folder:
        exported = Path(version.adapter_path or "")
        assert {path.name for path in folder.iterdir()} == {MANIFEST, ADAPTER, ADAPTER_CONFIG}
        assert all(path.read_bytes() == (exported / path.name).read_bytes() for path in folder.iterdir())
    assert leftover_files(tmp_path) == []


@pytest.mark.parametrize("file", [ADAPTER, ADAPTER_CONFIG, MANIFEST])
async def test_damaged_download_is_refused(
    make_opener: Callable[..., VersionOpener], version: Version, tmp_path: Path, file: str
) -> None:
    path = Path(version.adapter_path or "") / file
    path.write_bytes(path.read_bytes().replace(b'"', b"'", 1))
    with pytest.raises(DamagedAdapter, match=file), make_opener()(ref(version)):
        pass
    assert leftover_files(tmp_path) == []


async def test_adapter_damaged_before_sealing_is_refused(
    make_opener: Callable[..., VersionOpener], version: Version, harness: Harness
) -> None:
    path = Path(version.adapter_path or "")
    content = (path / ADAPTER_CONFIG).read_text()
    (path / ADAPTER_CONFIG).write_text(content.replace('"r": 8', '"r": 4'))
    version_ref = VersionRef("shop-v1", path, write_manifest(path, {"parent": None}))
    with pytest.raises(DamagedAdapter, match="says r is 4"), make_opener()(version_ref):
        pass


async def test_download_longer_than_sealed_is_refused(
    make_opener: Callable[..., VersionOpener], version: Version, tmp_path: Path
) -> None:
    with open(Path(version.adapter_path or "") / ADAPTER, "ab") as file:
        file.write(bytes(1 << 20))
    with pytest.raises(DamagedAdapter, match="longer than the"), make_opener()(ref(version)):
        pass
    assert leftover_files(tmp_path) == []


async def test_unreachable_or_refusing_api_is_not_reported_as_damage(
    make_opener: Callable[..., VersionOpener], version: Version, tmp_path: Path
) -> None:
    with (
        pytest.raises(OSError, match=r"cannot be pulled from http://127\.0\.0\.1:9"),
        make_opener(url="http://127.0.0.1:9")(ref(version)),
    ):
        pass
    with (
        pytest.raises(OSError, match="401 Send the engines' admin key"),
        make_opener("wrong")(ref(version)),
    ):
        pass
    unknown = VersionRef("shop-v7", Path("/nowhere"), "0" * 64)
    with pytest.raises(OSError, match=r"404 There is no file .* of a version 'shop-v7'"), make_opener()(unknown):
        pass
    assert leftover_files(tmp_path) == []


async def test_only_engines_can_download_and_only_adapter_files(
    harness: Harness, live_url: str, key: str, version: Version
) -> None:
    files_url = f"{live_url}/v1/engines/versions/shop-v1/files"
    async with httpx2.AsyncClient(trust_env=False) as client:

        async def status(file: str, **headers: Any) -> int:
            return (await client.get(f"{files_url}/{file}", headers=headers)).status_code

        headers = {"authorization": f"Bearer {key}"}
        assert await status(ADAPTER, **headers) == 200
        for file in (STATE, "..%2Fattune.db", "%2e%2e", "..%2f..%2fengine-keys.json", "shop-v1"):
            assert await status(file, **headers) == 404, file
        api = load_engine_keys(harness.settings).api
        for authorization in (
            "",
            f"Bearer {harness.key}",
            f"Bearer {api}",
            f"Basic {key}",
            "Bearer",
            "Bearer é".encode("latin-1"),
        ):
            assert await status(ADAPTER, **({"authorization": authorization} if authorization else {})) == 401, (
                authorization
            )


async def test_settings_choose_local_or_downloaded_versions(
    harness: Harness, live_url: str, version: Version, tmp_path: Path
) -> None:
    keys, version_ref = load_engine_keys(harness.settings), ref(version)
    elsewhere = Settings(home=tmp_path / "elsewhere", database={"url": harness.settings.database_url})
    with pytest.raises(ValueError, match=r"engine\.admin_key"):
        elsewhere.replace({"engine.versions_url": live_url})
    with pytest.raises(ValueError, match="versions_url"):
        Settings(engine={"versions_url": "api:8700"})
    downloads = {"engine.versions_url": live_url, "engine.api_key": keys.api, "engine.admin_key": keys.admin}
    with pytest.raises(ValueError, match="adapter_delivery = path"):
        elsewhere.replace({**downloads, "trainer.adaptation": "full"})
    with version_opener(elsewhere.replace(downloads))(version_ref) as folder:
        assert folder.is_relative_to(tmp_path / "elsewhere") and (folder / ADAPTER).exists()
    with version_opener(harness.settings)(replace(version_ref, path=Path(version.adapter_path or ""))) as folder:
        assert str(folder) == version.adapter_path
