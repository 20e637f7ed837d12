"""The engine's side of the matrix: the real SGLang on a CPU serves a family's model and its versions."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from alignment.artifacts.specs import AdapterSpec
from app.inference.engine import EngineClient
from app.inference.request import ChatCall, EngineTarget, Sampling
from app.inference.sglang.client import SGLangClient
from app.inference.transport import EngineRefused, EngineUnavailable
from tests.families.training import Scores, TrainedFamily, sequences
from tests.support.engine_fixture import PYTHON, START_SECONDS, free_port
from workers.engine.process import EngineProcess
from workers.engine.sglang_spec import SGLangSpec

ERROR_LINE = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception)\b.*|Exception: .*)$", re.MULTILINE)
EXIT_SECONDS = 10.0  # an engine that has failed writes its last lines


class EngineFailed(Exception):
    """The engine does not start, does not load an adapter, or ends when it is used. The text is its last error."""


@dataclass(frozen=True)
class ServedFamily:
    """Largest |engine - transformers| in nats for the base model and two versions, and the seconds of the start."""

    distances: tuple[float, ...]
    start_seconds: float


async def serve_family(checkpoint: Path, trained: TrainedFamily, folder: Path) -> ServedFamily:
    """Serve the base model, then both versions, the second one loaded while the first generates.

    Raises EngineFailed if the engine fails.
    """
    base, first, second = trained.versions
    assert first.folder and second.folder
    started = time.monotonic()
    async with running_engine(checkpoint, trained.spec, folder) as client:
        seconds = time.monotonic() - started
        distances = [max_difference(await client.score(None, sequences()), base.logprobs)]
        await client.load_adapter("shop-v1", first.folder)
        distances.append(max_difference(await client.score("shop-v1", sequences()), first.logprobs))
        sampling = Sampling(64, temperature=1.0)
        call = ChatCall(
            f"chatcmpl-{uuid4().hex}", [{"role": "user", "content": "Hello"}], sampling, EngineTarget(adapter="shop-v1")
        )
        reply, _ = await asyncio.gather(client.complete(call), client.load_adapter("shop-v2", second.folder))
        assert reply.capture.output_ids, "the reply that ran during the swap is empty"
        distances.append(max_difference(await client.score("shop-v2", sequences()), second.logprobs))
        again = max_difference(await client.score("shop-v1", sequences()), first.logprobs)
        assert again == distances[1], "the first version changed when the second was loaded"
    return ServedFamily(tuple(distances), seconds)


def max_difference(ours: list[list[float]], expected: Scores) -> float:
    return max(abs(a - b) for row, other in zip(ours, expected, strict=True) for a, b in zip(row, other, strict=True))


@asynccontextmanager
async def running_engine(checkpoint: Path, adapter: AdapterSpec, folder: Path) -> AsyncIterator[EngineClient]:
    """Start SGLang with the command of the service, and stop it at the end of the block.

    Raises EngineFailed if it does not start, or if the block fails because the engine does.
    """
    spec = SGLangSpec(
        python=PYTHON,
        model=str(checkpoint),
        api_key="test-key",
        admin_key="test-admin-key",
        log_path=folder / "engine.log",
        port=free_port(),
        device="cpu",
        context_length=1024,
        max_total_tokens=4096,
        tool_call_parser="qwen25",
        adapter=adapter,
    )
    process = await EngineProcess.start(spec)
    client = SGLangClient(spec.url, spec.api_key, spec.admin_key, read_timeout=60.0)
    exited = asyncio.create_task(process.wait_for_exit())
    try:
        async with asyncio.timeout(START_SECONDS):
            while not await client.is_ready():
                if exited.done() or process.find_lost_child() is not None:
                    raise EngineFailed(await _last_error(spec.log_path))
                await asyncio.sleep(0.2)
        yield client
    except (EngineRefused, EngineUnavailable) as error:
        raise EngineFailed(await _last_error(spec.log_path) or str(error)) from error
    finally:
        await client.aclose()
        process.kill()
        await exited


async def _last_error(log: Path) -> str:
    """Return the last error in the engine's log, once it has been written; without one an empty text."""
    deadline = time.monotonic() + EXIT_SECONDS
    while time.monotonic() < deadline:
        if found := ERROR_LINE.findall(log.read_text(errors="replace")):
            return " ".join(found[-1].split())
        await asyncio.sleep(0.5)
    return ""
