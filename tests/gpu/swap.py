"""Measure version swaps on a GPU, on models of real size with random weights, while replies are streamed.

python -m tests.gpu.swap --size 1.5b --rank 16          on a GPU (3b and 8b, rank 64 as well)
python -m tests.gpu.swap --size tiny --device cpu        to check the script itself

A trainer, an engine and the streams of replies run in processes of their own on one GPU. Each version is exported by
the trainer, checked, loaded by path and verified by its log-probs; then the replies come from it. Some versions are
also loaded in memory. For comparison the same engine pauses, reloads its weights and resumes. At the end the trainer
scores replies under the version that they name and under its neighbours. Prints one Markdown table.
"""

import argparse
import asyncio
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import httpx2
import torch

from alignment.artifacts.manifest import verify
from alignment.artifacts.specs import TRAINER_STATE, AdapterSpec, check_adapter
from alignment.config.trainer import LoRAConfig, TrainerConfig
from app.core.settings import Settings
from app.models import Version
from tests.benchmarks.first_token import sglang
from tests.benchmarks.swap_report import spread
from tests.benchmarks.swap_versions import UnpublishedVersion
from tests.gpu.swap_streams import TOKENS, StreamedReply, StreamsProcess, streams_process
from tests.gpu.swap_trainer import ReplyIds, TrainerProcess, trainer_process
from tests.gpu.trainer import SIZES
from tests.support.adapters import adapter_spec
from tests.support.engine_fixture import PYTHON, RunningEngine
from workers.release.delivery.adapters import build_payload, load_and_verify
from workers.release.verify_delivery import Timings

LOADED_ADAPTERS = 4  # adapters that stay loaded
REPLIES_SCORED = 4  # of each version
WHOLE, MEMORY = "trained → served, by path", "the same adapter in memory"
PHASES = ("export", "check", "load", "verify")


@dataclass(frozen=True)
class Span:
    operation: str
    started: float
    ended: float


@dataclass
class Swaps:
    engine: RunningEngine
    admin: httpx2.AsyncClient
    trainer: TrainerProcess
    streams: StreamsProcess
    settings: Settings
    shapes: AdapterSpec
    arguments: argparse.Namespace
    milliseconds: dict[str, list[float]] = field(default_factory=dict)  # by operation or phase
    spans: list[Span] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)

    def record(self, name: str, seconds: float) -> None:
        self.milliseconds.setdefault(name, []).append(1000 * seconds)

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spans.append(Span(operation, started, time.perf_counter()))
        self.record(operation, self.spans[-1].ended - started)

    async def post(self, path: str, body: dict[str, object]) -> None:
        response = await self.admin.post(path, json=body)
        assert response.status_code == 200, f"{path}: {response.text[:500]}"

    async def release(self, number: int) -> None:
        """Export a version and serve it, as the trainer and the publisher do, without the database's commits."""
        name, client, timings = f"version-{number}", self.engine.connect(), Timings()
        exported = await self.trainer.export(number)
        folder, sealed = exported.version.folder, exported.version.manifest_sha256
        with timings.measure("check"):
            await asyncio.to_thread(partial(verify, folder, sealed, skip=TRAINER_STATE))
            await asyncio.to_thread(check_adapter, folder, self.shapes)
        version = Version(adapter_name=name, adapter_path=str(folder), probe=exported.version.probe)
        await load_and_verify(client, version, folder, self.settings, timings)
        self.streams.switch(name)
        self.spans.append(Span(WHOLE, exported.started, time.perf_counter()))
        self.record(WHOLE, self.spans[-1].ended - exported.started)
        self.record("export", exported.ended - exported.started)
        for phase in ("check", "load", "verify"):
            self.record(phase, timings.seconds[phase])
        self.distances.append(timings.seconds["probe_distance"])
        figures = ", ".join(f"{phase} {self.milliseconds[phase][-1]:.0f}" for phase in (WHOLE, *PHASES))
        print(f"{name}: {figures}", flush=True)  # at once: a run that is stopped may not print its table
        await asyncio.sleep(self.arguments.pause)
        if number < self.arguments.memory:
            await self.in_memory(f"memory-{number}", exported.version)
            await asyncio.sleep(self.arguments.pause)
        if number >= LOADED_ADAPTERS:
            old = f"version-{number - LOADED_ADAPTERS}"
            await client.unload_adapter(old)
            shutil.rmtree(folder.parent / old)
        await client.aclose()

    async def in_memory(self, name: str, unpublished: UnpublishedVersion) -> None:
        client = self.engine.connect()
        with self.timed(MEMORY):
            started = time.perf_counter()
            adapter = await asyncio.to_thread(build_payload, unpublished.folder, unpublished.manifest_sha256)
            self.record("packed", time.perf_counter() - started)
            await client.load_adapter(name, adapter)
            scores = await client.score(name, unpublished.probe["ids"])
        rows = zip(scores, unpublished.probe["logprobs"], strict=True)
        self.distances.append(max(abs(a - b) for row in rows for a, b in zip(*row, strict=True)))
        await client.unload_adapter(name)
        await client.aclose()

    async def reload(self, mode: str) -> None:
        """Swap weights by pause, reload and resume, as other systems do."""
        with self.timed(f"pause ({mode}), reload, resume"):
            await self.post("/pause_generation", {"mode": mode})
            weights = {"model_path": self.engine.spec.model, "flush_cache": True}
            await self.post("/update_weights_from_disk", weights)
            await self.post("/continue_generation", {"torch_empty_cache": False})

    async def all(self) -> None:
        await asyncio.sleep(3 * self.arguments.pause)
        for number in range(self.arguments.warm + self.arguments.versions):
            if number == self.arguments.warm:  # kernels are compiled at their first use
                print("\nThe versions before are not counted.", flush=True)
                self.milliseconds.clear()
                self.spans = [Span("warm-up", 0.0, time.perf_counter())]
            await self.release(number)
        for mode in ("retract", "abort"):
            for _ in range(self.arguments.peer):
                await self.reload(mode)
                await asyncio.sleep(self.arguments.pause)

    def table(self, replies: Sequence[StreamedReply]) -> Iterator[str]:
        yield "| milliseconds | n | p50 | p95 | p99 | worst | longest gap in a reply meanwhile | replies cut |"
        yield "|---|---|---|---|---|---|---|---|"
        gaps, cut = by_operation(replies, self.spans)
        for name, values in self.milliseconds.items():
            is_phase = name in PHASES or name == "packed"
            after = " | " if is_phase else f"{max(gaps.get(name, [0.0])):.0f} | {cut.get(name, 0)}"
            yield f"| {name} | {len(values)} | {spread(values, 0)} | {after} |"
        yield f"| nothing | | | | | | {max(gaps.get('', [0.0])):.0f} | {cut.get('', 0)} |"


def by_operation(
    replies: Sequence[StreamedReply], spans: Sequence[Span]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the gaps between chunks in milliseconds, and the number of cut replies, by operation; "" is nothing.

    A gap belongs to an operation that ran during a part of it, a cut reply to one that ran when its last chunk came.
    """

    def operation(started: float, ended: float) -> str:
        return next((span.operation for span in spans if span.started < ended and started < span.ended), "")

    gaps: dict[str, list[float]] = {}
    cut: dict[str, int] = {}
    for reply in replies:
        for before, after in pairwise(reply.times[1:]):
            gaps.setdefault(operation(before, after), []).append(1000 * (after - before))
        if reply.is_cut:
            name = operation(reply.times[-1], reply.times[-1] + 0.001)
            cut[name] = cut.get(name, 0) + 1
    return gaps, cut


async def count_mislabelled(trainer: TrainerProcess, replies: Sequence[StreamedReply]) -> str:
    """Score replies of every version under it and under the versions before and after it."""
    by_number: dict[int | None, list[StreamedReply]] = {}
    for reply in replies:
        number = None if reply.version is None else int(reply.version.rpartition("-")[2])
        if not reply.is_cut and len(by_number.setdefault(number, [])) < REPLIES_SCORED:
            by_number[number].append(reply)
    numbers = sorted(by_number, key=lambda number: -1 if number is None else number)
    own: dict[StreamedReply, float] = {}
    others: dict[StreamedReply, float] = {}
    for index, number in enumerate(numbers):
        for neighbour in numbers[max(0, index - 1) : index + 2]:
            scored = by_number[neighbour]
            scores = await trainer.score(number, [ReplyIds(reply.prompt, reply.ids) for reply in scored])
            for reply, row in zip(scored, scores, strict=True):
                distance = fmean(abs(a - b) for a, b in zip(row, reply.logprobs, strict=True))
                if neighbour == number:
                    own[reply] = distance
                else:
                    others[reply] = min(distance, others.get(reply, distance))
    mislabelled = sum(own[reply] >= others.get(reply, float("inf")) for reply in own)
    return (
        f"{len(replies)} replies; {len(own)} scored by the trainer, {mislabelled} nearer to another version than to "
        f"the one they name (mean |log-prob difference| to it at most {max(own.values()):.2g}, to its neighbours at "
        f"least {min(others.values(), default=float('nan')):.2g})"
    )


async def measure(engine: RunningEngine, trainer: TrainerProcess, arguments: argparse.Namespace) -> None:
    key = {"authorization": f"Bearer {engine.spec.admin_key}"}
    lora = LoRAConfig(r=arguments.rank, alpha=2 * arguments.rank)
    shapes, settings = adapter_spec(Path(engine.spec.model), lora), Settings(dtype=arguments.dtype)
    vocabulary = SIZES[arguments.size][-1]
    with streams_process(engine.spec.url, engine.spec.api_key, vocabulary, arguments.people) as streams:
        async with httpx2.AsyncClient(base_url=engine.spec.url, headers=key, timeout=300, trust_env=False) as admin:
            swaps = Swaps(engine, admin, trainer, streams, settings, shapes, arguments)
            try:
                await swaps.all()
            finally:  # what was measured until an error is printed as well
                replies = await streams.stop()
                print("\n".join(swaps.table(replies)), flush=True)
                print(f"\nLargest probe distance: {max(swaps.distances, default=float('nan')):.2g}", flush=True)
    print(await count_mislabelled(trainer, replies), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.swap", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--warm", type=int, default=2, help="versions before these, which are not counted")
    parser.add_argument("--memory", type=int, default=10, help="number of versions also loaded in memory")
    parser.add_argument("--peer", type=int, default=10, help="number of pauses in each mode of the comparison")
    parser.add_argument("--people", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two swaps")
    parser.add_argument("--python", default=str(PYTHON), help="the interpreter that has SGLang")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of SGLang, as --flag=--page-size=16")
    parser.add_argument("--start", type=float, default=600.0, help="seconds that the engine may take to start")
    parser.add_argument("--folder", type=Path, help="where to put the model and the versions, best in memory")
    parser.add_argument("--log", type=Path, help="where to put the engine's log")
    arguments = parser.parse_args()
    lora = LoRAConfig(r=arguments.rank, alpha=2 * arguments.rank)
    config = TrainerConfig(lora=lora, dtype=arguments.dtype, device=arguments.device)
    with (
        TemporaryDirectory(dir=arguments.folder) as folder,
        trainer_process(Path(folder), arguments.size, config) as trainer,
    ):
        spec = {
            "python": Path(arguments.python),
            "device": arguments.device,
            "dtype": arguments.dtype,
            "adapter": adapter_spec(trainer.model, lora),
            "max_loras_per_batch": LOADED_ADAPTERS + 4,
            "extra_flags": tuple(arguments.flag),
        }
        if arguments.log:
            spec["log_path"] = arguments.log
        with sglang(trainer.model, arguments.start, **spec) as engine:
            name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "CPU"
            print(
                f"{name}, torch {torch.__version__}, {arguments.size}, rank {arguments.rank}, {arguments.dtype}, "
                f"{arguments.people} streams of {TOKENS} tokens\n",
                flush=True,
            )
            asyncio.run(measure(engine, trainer, arguments))


if __name__ == "__main__":
    main()
