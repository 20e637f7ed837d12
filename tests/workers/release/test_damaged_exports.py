"""The eight ways in which an export may be damaged: none of its bytes ever reaches an engine, by whatever door."""

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

from alignment.artifacts import ADAPTER, seal
from alignment.config.trainer import TrainerConfig
from alignment.trainer.export import Export
from app.deployments import service
from app.models import Audit, Engine, Policy, Version, VersionState
from tests.faults.suite.learner import StandIn
from tests.support.deployment import Harness
from tests.support.engine_fixture import REPOSITORY, ListLedger, engine_spec, wait_until_told
from tests.support.scripted_engine import ScriptedEngine, serving
from workers.base_model import check_version
from workers.engine.supervisor import Supervisor
from workers.engine.version_files import AdapterRef, in_place
from workers.release.adapter_sync import sync_adapters
from workers.release.evaluate import evaluate

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def header_ends(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def flip(raw: bytes) -> bytes:
    """The highest bit of the exponent of the last value: a weight of 1e-2 becomes one of 1e36."""
    return raw[:-1] + bytes([raw[-1] ^ 0x40])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut in its header": lambda raw: raw[: header_ends(raw) // 2],
    "cut in its tensors": lambda raw: raw[:-1],
    "longer than it was": lambda raw: raw + bytes(512),
    "without its header's length": lambda raw: b"\xff" * 8 + raw[8:],
    "with a torn header": lambda raw: raw[:9] + b"\x00" + raw[10:],
    "zeros to its end": lambda raw: raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2),
    "with a flipped bit": flip,
}
SILENT = ("zeros to its end", "with a flipped bit")  # what safetensors reads without a word
SEALED = {  # what says no when the damage was there before the seal
    "empty": "is not a whole safetensors file",
    "cut in its header": "is not a whole safetensors file",
    "cut in its tensors": "does not fill the bytes",
    "longer than it was": "bytes that no tensor owns",
    "without its header's length": "is not a whole safetensors file",
    "with a torn header": "is not a whole safetensors file",
    "zeros to its end": "zeros",
    "with a flipped bit": "root mean square",
}


@dataclass
class Untouched(ScriptedEngine):
    """Notes whoever asks it for more than whether it is there."""

    asked: list[str] = field(default_factory=list)

    async def _load(self, request: Request) -> Response:
        self.asked.append((await request.json())["lora_name"])
        return await super()._load(request)

    async def _generate(self, request: Request) -> Response:
        self.asked.append("tokens")
        return await super()._generate(request)


@pytest.fixture
async def replica(harness: Harness) -> AsyncIterator[Untouched]:
    engine = Untouched()
    with serving(engine) as url:
        async with harness.db.write() as session:
            (await session.get_one(Engine, "engine-0")).url = url
        yield engine


def exported(folder: Path, model: str) -> Export:
    """As the trainer exports it."""
    return StandIn(Path(model), TrainerConfig()).export(folder, {"parent": None})


def harm(folder: Path, damage: str) -> None:
    (folder / ADAPTER).write_bytes(DAMAGES[damage]((folder / ADAPTER).read_bytes()))


async def trained(harness: Harness) -> tuple[Version, Path]:
    made = exported(harness.settings.versions_dir / "shop-v1", harness.settings.model)
    probe = {"ids": [[5, 6]], "logprobs": [[-1.0]]}
    path = str(made.path)
    return await harness.version(adapter_path=path, manifest_sha256=made.manifest_sha256, probe=probe), made.path


async def come_home(harness: Harness, version: Version) -> Version:
    await evaluate(harness.db, harness.settings, "test")
    home: Version = await harness.get(Version, version.id)
    return home


def safetensors_reads(folder: Path) -> bool:
    try:
        load_file(folder / ADAPTER)
    except SafetensorError:
        return False
    return True


async def test_a_whole_export_is_asked_for(harness: Harness, replica: Untouched) -> None:
    """What the others are held against: here the engine is asked."""
    version, _ = await trained(harness)
    await come_home(harness, version)
    assert replica.asked[0] == "shop-v1"


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_after_the_seal_is_rejected_before_the_engine_is_asked(
    harness: Harness, replica: Untouched, damage: str
) -> None:
    base = await harness.serving()
    version, path = await trained(harness)
    harm(path, damage)
    assert safetensors_reads(path) == (damage in SILENT)
    home = await come_home(harness, version)
    told = f"DamagedAdapter: {ADAPTER} in {path} is not what was sealed."
    assert (home.state, home.reason) == (VersionState.REJECTED, told)
    assert replica.asked == []
    assert (await harness.serving()).id == base.id == (await harness.policy()).head_version_id
    assert [row.reason for row in await harness.all(Audit) if row.action == "version rejected"] == [told]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_that_was_sealed_in_is_rejected_before_the_engine_is_asked(
    harness: Harness, replica: Untouched, damage: str
) -> None:
    version, path = await trained(harness)
    harm(path, damage)
    sha256 = seal(path, {"parent": None})
    async with harness.db.write() as session:
        (await session.get_one(Version, version.id)).manifest_sha256 = sha256
    home = await come_home(harness, version)
    assert home.state == VersionState.REJECTED and home.reason is not None
    assert home.reason.startswith("DamagedAdapter: ") and SEALED[damage] in home.reason
    assert replica.asked == []


@pytest.mark.parametrize("damage", DAMAGES)
async def test_what_was_damaged_since_it_went_live_is_not_brought_to_a_replica_that_lacks_it(
    harness: Harness, replica: Untouched, damage: str
) -> None:
    version, path = await trained(harness)
    async with harness.db.write() as session:
        policy, row = await session.get_one(Policy, version.policy_id), await session.get_one(Version, version.id)
        await service.point_to(session, policy, row, actor="test", reason=None)
    harm(path, damage)
    await sync_adapters(harness.db, harness.settings)
    assert replica.asked == []
    assert (await harness.all(Engine))[0].loaded == []


async def test_nor_to_an_engine_that_starts(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight are wanted, and one that is whole."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.workers.engine.fake_server "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    ledger, told = ListLedger(), list[str]()
    for number, damage in enumerate((None, *DAMAGES)):
        made = exported(tmp_path / "versions" / f"shop-v{number}", harness.settings.model)
        ledger.adapters.append(AdapterRef(f"shop-v{number}", made.path, made.manifest_sha256))
        if damage is not None:
            harm(made.path, damage)

    def check(path: Path, manifest_sha256: str) -> None:
        check_version(harness.settings.model, path, manifest_sha256)

    spec = replace(engine_spec(tmp_path, tmp_path), python=interpreter)
    supervisor = Supervisor(spec, ledger, in_place(check), tell=told.append)
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(60):
        while len(refused := {words for words in told if "is not what was sealed" in words}) < len(DAMAGES):
            await asyncio.sleep(0.02)
    ledger.adapters = ledger.adapters[:1]
    await wait_until_told(ledger, "ready 1", 60)
    supervisor.stop()
    await running
    assert {words.partition(" ")[0] for words in refused} == {f"shop-v{number}" for number in range(1, 9)}
    assert (tmp_path / "loads").read_text().split() == ["shop-v0"]
