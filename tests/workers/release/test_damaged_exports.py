"""Eight kinds of damaged exports, none of which is sent to an engine."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import Response

from alignment.artifacts.manifest import write_manifest
from alignment.artifacts.specs import ADAPTER
from alignment.config.trainer import TrainerConfig
from alignment.trainer.checkpoint import Export, optimizer_file
from app.deployments import service
from app.models import Audit, Engine, Version, VersionState
from app.policies.locks import lock_policy
from app.policies.service import Attribution
from tests.faults.suite.fake_trainer import FakeTrainer
from tests.support.deployment import Harness
from tests.support.engine_fixture import DEMO_MODEL, REPOSITORY, InMemoryEngineRecord, engine_spec, wait_for_event
from tests.support.scripted_engine import ScriptedEngine, serve
from workers.base_model import check_adapter_files
from workers.engine.supervisor import Supervisor
from workers.engine.version_files import VersionRef, local_versions
from workers.release.adapter_sync import sync_adapters
from workers.release.evaluate import evaluate

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def header_ends(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def flip(raw: bytes) -> bytes:
    """Flip the highest exponent bit of the last value: a weight of 1e-2 becomes 1e36."""
    return raw[:-1] + bytes([raw[-1] ^ 0x40])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "truncated in the header": lambda raw: raw[: header_ends(raw) // 2],
    "truncated in the tensors": lambda raw: raw[:-1],
    "with additional bytes": lambda raw: raw + bytes(512),
    "with a wrong header length": lambda raw: b"\xff" * 8 + raw[8:],
    "with a corrupted header": lambda raw: raw[:9] + b"\x00" + raw[10:],
    "with a zeroed second half": lambda raw: raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2),
    "with a flipped bit": flip,
}
SILENT = ("with a zeroed second half", "with a flipped bit")  # safetensors reads these without an error
SEALED_ERRORS = {  # the error if the file is damaged before the manifest is written
    "empty": "is not a complete safetensors file",
    "truncated in the header": "is not a complete safetensors file",
    "truncated in the tensors": "file not fully covered",
    "with additional bytes": "file not fully covered",
    "with a wrong header length": "is not a complete safetensors file",
    "with a corrupted header": "is not a complete safetensors file",
    "with a zeroed second half": "zeros",
    "with a flipped bit": "root mean square",
}


@dataclass
class RecordingEngine(ScriptedEngine):
    """Records the requests that load an adapter or generate tokens."""

    received: list[str] = field(default_factory=list)

    async def _load(self, request: Request) -> Response:
        self.received.append((await request.json())["lora_name"])
        return await super()._load(request)

    async def _generate(self, request: Request) -> Response:
        self.received.append("tokens")
        return await super()._generate(request)


@pytest.fixture
async def replica(harness: Harness) -> AsyncIterator[RecordingEngine]:
    engine = RecordingEngine()
    with serve(engine) as url:
        async with harness.db.write() as session:
            (await session.get_one(Engine, "engine-0")).url = url
        yield engine


def export_adapter(folder: Path, model: str) -> Export:
    """Export an adapter as the trainer does."""
    return FakeTrainer(Path(model), TrainerConfig()).export(folder, {"parent": None})


def damage_file(folder: Path, damage: str) -> None:
    (folder / ADAPTER).write_bytes(DAMAGES[damage]((folder / ADAPTER).read_bytes()))


async def create_trained_version(harness: Harness) -> tuple[Version, Path]:
    export = export_adapter(harness.settings.versions_dir / "shop-v1", harness.settings.model)
    probe = {"ids": [[5, 6]], "logprobs": [[-1.0]]}
    path = str(export.path)
    return await harness.version(adapter_path=path, manifest_sha256=export.manifest_sha256, probe=probe), export.path


async def evaluate_version(harness: Harness, version: Version) -> Version:
    await evaluate(harness.db, harness.settings, "test")
    released: Version = await harness.get(Version, version.id)
    return released


def safetensors_reads(folder: Path) -> bool:
    try:
        load_file(folder / ADAPTER)
    except SafetensorError:
        return False
    return True


async def test_undamaged_export_reaches_the_engine(harness: Harness, replica: RecordingEngine) -> None:
    """The control case for the tests below."""
    version, _ = await create_trained_version(harness)
    await evaluate_version(harness, version)
    assert replica.received[0] == "shop-v1"


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_after_sealing_is_rejected_before_the_engine_is_used(
    harness: Harness, replica: RecordingEngine, damage: str
) -> None:
    base = await harness.serving()
    version, path = await create_trained_version(harness)
    damage_file(path, damage)
    assert safetensors_reads(path) == (damage in SILENT)
    released = await evaluate_version(harness, version)
    reason = f"DamagedAdapter: {ADAPTER} in {path} differs from the hash or size in its manifest.json."
    assert (released.state, released.reason) == (VersionState.REJECTED, reason)
    assert replica.received == []
    assert (await harness.serving()).id == base.id == (await harness.policy()).head_version_id
    assert [row.reason for row in await harness.all(Audit) if row.action == "version.rejected"] == [reason]


async def test_damaged_state_of_the_trainer_delays_no_release(harness: Harness, replica: RecordingEngine) -> None:
    """No engine reads it, and the trainer checks it when it restores it: `test_damaged_parent_halts_training…`."""
    version, path = await create_trained_version(harness)
    (path / optimizer_file("exp_avg")).write_bytes(b"")
    await evaluate_version(harness, version)
    assert replica.received[0] == "shop-v1"


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_before_sealing_is_rejected_before_the_engine_is_used(
    harness: Harness, replica: RecordingEngine, damage: str
) -> None:
    version, path = await create_trained_version(harness)
    damage_file(path, damage)
    sha256 = write_manifest(path, {"parent": None})
    async with harness.db.write() as session:
        (await session.get_one(Version, version.id)).manifest_sha256 = sha256
    released = await evaluate_version(harness, version)
    assert released.state == VersionState.REJECTED and released.reason is not None
    assert released.reason.startswith("DamagedAdapter: ") and SEALED_ERRORS[damage] in released.reason
    assert replica.received == []


@pytest.mark.parametrize("damage", DAMAGES)
async def test_version_damaged_since_it_went_live_is_not_loaded_on_another_engine(
    harness: Harness, replica: RecordingEngine, damage: str
) -> None:
    version, path = await create_trained_version(harness)
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        row = await session.get_one(Version, version.id)
        await service.set_live(locked, row, Attribution("test", None))
    damage_file(path, damage)
    await sync_adapters(harness.db, harness.settings)
    assert replica.received == []
    assert (await harness.all(Engine))[0].loaded == []


async def test_damaged_versions_are_not_loaded_on_an_engine_that_starts(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wanted versions are the eight damaged ones and an undamaged one."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.workers.engine.fake_server "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("SGLANG_FAKE_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    record, lines = InMemoryEngineRecord(), list[str]()
    for number, damage in enumerate((None, *DAMAGES)):
        export = export_adapter(tmp_path / "versions" / f"shop-v{number}", harness.settings.model)
        record.wanted_versions.append(VersionRef(f"shop-v{number}", export.path, export.manifest_sha256))
        if damage is not None:
            damage_file(export.path, damage)

    def check(path: Path, manifest_sha256: str) -> None:
        check_adapter_files(harness.settings, path, manifest_sha256)

    spec = replace(engine_spec(tmp_path, DEMO_MODEL), python=interpreter)
    supervisor = Supervisor(spec, record, local_versions(check), report=lines.append)
    running = asyncio.create_task(supervisor.run())
    await wait_for_event(record, "ready 1", 60)
    refused = {line for line in lines if "differs from the hash or size" in line}
    assert len(refused) == len(record.errors) == len(DAMAGES)
    supervisor.stop()
    await running
    assert {line.partition(" ")[0] for line in refused} == {f"shop-v{number}" for number in range(1, 9)}
    assert (tmp_path / "loads").read_text().split() == ["shop-v0"]
