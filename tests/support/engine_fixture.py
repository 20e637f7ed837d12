"""Fixtures of one real SGLang for a whole test run: `engine`, `engine_client`, `make_call`, and `weights`."""

import asyncio
import itertools
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import torch
from anyio.from_thread import start_blocking_portal

from app.inference.engine import EngineClient
from app.inference.pool import connect
from app.inference.request import ChatCall, EngineTarget, Sampling
from tests.support.adapters import adapter_spec
from tests.support.engine_model import make_tiny_model
from workers.engine.process import EngineSpec
from workers.engine.sglang_spec import SGLangSpec
from workers.engine.supervisor import Supervisor
from workers.engine.version_files import VersionRef, local_versions

if TYPE_CHECKING:
    from tests.support.engine_adapters import ReferenceWeights

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = REPOSITORY / ".venv-engine" / "bin" / "python"
DEMO_MODEL = REPOSITORY / "demo" / "model"
START_SECONDS = 540.0  # on a busy machine; less than the limit of a test


@dataclass
class InMemoryEngineRecord:
    """An engine record in memory: the versions to load, and the events that the supervisor reported."""

    wanted_versions: list[VersionRef] = field(default_factory=list)
    incarnation: int = 0
    events: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    num_heartbeats: int = 0

    async def record_start(self) -> int:
        self.incarnation += 1
        self.events.append(f"starting {self.incarnation}")
        return self.incarnation

    async def read_wanted_versions(self) -> list[VersionRef]:
        return list(self.wanted_versions)

    async def try_mark_ready(self, incarnation: int, loaded: list[str], errors: Mapping[str, str]) -> bool:
        if not {adapter.name for adapter in self.wanted_versions} <= {*loaded, *errors}:
            return False
        self.loaded, self.errors = loaded, dict(errors)
        self.events.append(f"ready {incarnation}")
        return True

    async def is_swapping_weights(self, incarnation: int) -> bool:
        return False

    async def record_heartbeat(self, incarnation: int) -> None:
        self.num_heartbeats += 1

    async def record_load_crash(self, incarnation: int, ref: VersionRef) -> None:
        self.events.append(f"crash {incarnation}: {ref.name}")

    async def mark_down(self, incarnation: int, reason: str) -> None:
        self.events.append(f"down {incarnation}: {reason}")


UNCHECKED = local_versions(lambda path, sha256: None)


@dataclass(frozen=True)
class RunningEngine:
    spec: EngineSpec

    def connect(self) -> EngineClient:
        """Return a new client. A client belongs to one event loop, so each test creates its own."""
        return connect(self.spec, self.spec.keys)


def require_engine_environment() -> None:
    if PYTHON.exists():
        return
    if os.environ.get("ATTUNE_REQUIRE_ENGINE") == "1":
        pytest.fail(f"{PYTHON} is missing and ATTUNE_REQUIRE_ENGINE=1")
    pytest.skip(f"SGLang's environment is not installed: {PYTHON} is missing")


def count_ports() -> Iterator[int]:
    """Yield ports below the kernel's range of ephemeral ones, of which each process of a test run has its own.

    A run begins at a random place, because another may run beside it.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 5
    first, count = 10_000 + 4_000 * worker, 4_000
    start = secrets.randbelow(count)
    return (first + (start + number) % count for number in itertools.count())


PORTS = count_ports()


def free_port() -> int:
    """Return a free port that this process has not returned before: a server binds it only seconds later."""
    for port in PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports do not end")


def engine_spec(folder: Path, model: Path) -> EngineSpec:
    return SGLangSpec(
        python=PYTHON,
        model=str(model),
        api_key="test-key",
        admin_key="-test-admin-key",  # a generated key may begin with a dash
        log_path=folder / "engine.log",
        port=free_port(),
        device="cpu",
        context_length=2048,
        tool_call_parser="qwen25",
        adapter=adapter_spec(model),
    )


@pytest.fixture(autouse=True)
def patient_probes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shared real engine take longer to answer probes than in service: a busy machine is no failure."""
    if not {"engine", "vllm_engine"}.isdisjoint(request.fixturenames):
        for kind in ("sglang", "vllm"):
            monkeypatch.setattr(f"app.inference.{kind}.client.PROBE_SECONDS", 60.0)


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the demo model if it is built, else of a tiny random one."""
    if (DEMO_MODEL / "model.safetensors").exists():
        return DEMO_MODEL
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def run_engine(spec: EngineSpec) -> Iterator[RunningEngine]:
    """Run an engine until the block ends."""
    supervisor = Supervisor(spec, record := InMemoryEngineRecord(), UNCHECKED)
    # The thread must live as long as the run: the kernel treats the end of the starting thread as the parent's end.
    with start_blocking_portal() as portal:
        running = portal.start_task_soon(supervisor.run)
        portal.call(wait_for_event, record, "ready 1")
        yield RunningEngine(spec)
        portal.call(supervisor.stop)
        running.result()


@pytest.fixture(scope="session")
def engine(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    require_engine_environment()
    with run_engine(engine_spec(tmp_path_factory.mktemp("engine"), engine_model)) as running:
        yield running


async def wait_for_event(record: InMemoryEngineRecord, entry: str, seconds: float = START_SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while entry not in record.events:
            await asyncio.sleep(0.05)


@pytest.fixture(scope="session")
def weights(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> "ReferenceWeights":
    """Return the same weights in transformers, as a reference."""
    from tests.support.engine_adapters import ReferenceWeights  # peft takes seconds to import

    torch.set_num_threads(1)
    return ReferenceWeights(engine_model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture
async def engine_client(engine: RunningEngine) -> AsyncIterator[EngineClient]:
    client = engine.connect()
    yield client
    await client.aclose()


@pytest.fixture
def make_call() -> Callable[..., ChatCall]:
    """Return a factory of calls for 64 tokens; it accepts fields of ChatCall, Sampling and EngineTarget."""

    def create_call(text: str = "When do you open?", **fields: Any) -> ChatCall:
        sampling = {"max_tokens": 64} | {
            name: fields.pop(name) for name in Sampling.__dataclass_fields__ if name in fields
        }
        target = {name: fields.pop(name) for name in EngineTarget.__dataclass_fields__ if name in fields}
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        return ChatCall(f"chatcmpl-{uuid4().hex}", messages, Sampling(**sampling), EngineTarget(**target), **fields)

    return create_call
