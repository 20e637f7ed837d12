"""Swaps on a GPU, on models of real size with random weights: what each phase takes while replies are streamed.

python -m tests.gpu.swap --size 1.5b --rank 16          on a GPU (3b and 8b, rank 64 as well)
python -m tests.gpu.swap --size tiny --device cpu        to see that the script itself works

Adapters come by path and in memory; beside them, on the same engine, what others do: pause, reload the weights,
go on. Every adapter is proven by its log-probs before it is spoken to. Prints one Markdown table and downloads nothing.
"""

import argparse
import asyncio
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import torch

from alignment.artifacts import AdapterSpec, check_adapter, verify
from alignment.config.trainer import LoRAConfig, TrainerConfig
from app.core.settings import Settings
from app.models import Version
from tests.benchmarks.first_token import sglang
from tests.benchmarks.swap import spread
from tests.benchmarks.swap_versions import Made, make
from tests.gpu.trainer import SIZES, base_model
from tests.support.engine_fixture import PYTHON, RunningEngine
from workers.engine.adapter_payload import payload
from workers.release.verify_delivery import Timings, prove

START_SECONDS = 600.0
TOKENS = 96
KEPT = 4  # adapters that stay loaded
PATH, MEMORY = "adapter by path: checked → spoken to", "adapter in memory: packed and loaded"


@dataclass
class Streams:
    """Replies without a break. `version`: what the next one is asked of. By what went on meanwhile: milliseconds
    between two pieces, and replies that ended before their time."""

    engine: RunningEngine
    vocabulary: int
    version: str | None = None
    doing: str = "nothing"
    over: bool = False
    replies: int = 0
    gaps: dict[str, list[float]] = field(default_factory=dict)
    broken: Counter[str] = field(default_factory=Counter)

    async def talk(self, number: int) -> None:
        order = torch.Generator().manual_seed(number)
        key = {"authorization": f"Bearer {self.engine.spec.api_key}"}
        async with httpx2.AsyncClient(base_url=self.engine.spec.url, headers=key, timeout=120, trust_env=False) as api:
            while not self.over:
                ids = torch.randint(1, self.vocabulary, (64,), generator=order).tolist()
                sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
                body = {"input_ids": ids, "sampling_params": sampling, "stream": True, "lora_path": self.version}
                said, last = 0, None
                async with api.stream("POST", "/generate", json=body) as reply:
                    async for line in reply.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now, told = time.perf_counter(), json.loads(line.removeprefix("data: "))
                        if last is not None:
                            self.gaps.setdefault(self.doing, []).append(1000 * (now - last))
                        said, last = told.get("meta_info", {}).get("completion_tokens", said), now
                self.replies += 1
                self.broken[self.doing] += said != TOKENS


@dataclass
class Swaps:
    engine: RunningEngine
    admin: httpx2.AsyncClient
    streams: Streams
    settings: Settings
    shapes: AdapterSpec
    pause: float
    took: dict[str, list[float]] = field(default_factory=dict)  # milliseconds, by what was done

    async def post(self, path: str, body: dict[str, object]) -> None:
        answer = await self.admin.post(path, json=body)
        assert answer.status_code == 200, f"{path}: {answer.text[:500]}"

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        self.streams.doing, began = what, time.perf_counter()
        yield
        self.took.setdefault(what, []).append(1000 * (time.perf_counter() - began))
        self.streams.doing = "nothing"

    async def by_path(self, name: str, one: Made) -> None:
        client, timings = self.engine.connect(), Timings()
        with self.timed(PATH):
            mark = time.perf_counter()
            verify(one.folder, one.manifest_sha256)
            check_adapter(one.folder, self.shapes)
            timings.since(mark, "check")
            version = Version(adapter_name=name, adapter_path=str(one.folder), probe=one.probe)
            await prove(client, version, one.folder, self.settings, timings)
            self.streams.version = name
        for phase in ("check", "load", "verify"):
            self.took.setdefault(phase, []).append(1000 * timings.seconds[phase])
        self.took.setdefault("distance", []).append(timings.seconds["probe_distance"])
        await client.aclose()

    async def in_memory(self, name: str, one: Made) -> None:
        client = self.engine.connect()
        with self.timed(MEMORY):
            mark = time.perf_counter()
            adapter = payload(one.folder, one.manifest_sha256)
            self.took.setdefault("transfer", []).append(1000 * (time.perf_counter() - mark))
            await client.load_adapter(name, adapter)
        [heard, *_] = await client.score(name, one.probe["ids"])
        distance = max(abs(a - b) for a, b in zip(heard, one.probe["logprobs"][0], strict=True))
        self.took.setdefault("distance", []).append(distance)
        await client.unload_adapter(name)
        await client.aclose()

    async def reload(self, mode: str) -> None:
        """What a peer does with each version."""
        with self.timed(f"pause ({mode}), reload, resume"):
            await self.post("/pause_generation", {"mode": mode})
            weights = {"model_path": self.engine.spec.model, "flush_cache": True}
            await self.post("/update_weights_from_disk", weights)
            await self.post("/continue_generation", {"torch_empty_cache": False})

    async def all(self, made: Sequence[Made], peer: int) -> None:
        client = self.engine.connect()
        await asyncio.sleep(3 * self.pause)
        for number, one in enumerate(made):
            await self.by_path(f"version-{number}", one)
            await asyncio.sleep(self.pause)
            await self.in_memory(f"aside-{number}", one)
            await asyncio.sleep(self.pause)
            if number >= KEPT:
                await client.unload_adapter(f"version-{number - KEPT}")
        for mode in ("retract", "abort"):
            for _ in range(peer):
                await self.reload(mode)
                await asyncio.sleep(self.pause)
        await client.aclose()

    def table(self) -> Iterator[str]:
        yield "| milliseconds | p50 | p95 | p99 | worst | widest gap in a reply meanwhile | replies cut |"
        yield "|---|---|---|---|---|---|---|"
        for what, values in self.took.items():
            if what != "distance":
                told = f"{max(self.streams.gaps.get(what, [0.0])):.0f}" if " " in what else ""
                yield f"| {what} | {spread(values, 1)} | {told} | {self.streams.broken[what] if told else ''} |"
        yield f"| nothing | | | | | {max(self.streams.gaps['nothing']):.0f} | {self.streams.broken['nothing']} |"


async def measure(there: RunningEngine, made: Sequence[Made], given: argparse.Namespace) -> None:
    streams = Streams(there, SIZES[given.size][-1])
    key, lora = {"authorization": f"Bearer {there.spec.admin_key}"}, LoRAConfig(rank=given.rank, alpha=2 * given.rank)
    shapes, settings = AdapterSpec.of(Path(there.spec.model), lora), Settings(dtype=given.dtype)
    async with httpx2.AsyncClient(base_url=there.spec.url, headers=key, timeout=300, trust_env=False) as admin:
        swaps = Swaps(there, admin, streams, settings, shapes, given.pause)
        talking = [asyncio.create_task(streams.talk(number)) for number in range(given.people)]
        await swaps.all(made, given.peer)
        streams.over = True
        await asyncio.gather(*talking)
    print("\n".join(swaps.table()))
    print(f"\n{streams.replies} replies; largest distance of a probe's log-prob: {max(swaps.took['distance']):.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.swap", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--peer", type=int, default=10, help="pauses of the comparison, in each mode")
    parser.add_argument("--people", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two swaps")
    parser.add_argument("--python", default=str(PYTHON), help="the interpreter that has SGLang")
    parser.add_argument("--flags", default="", help="more flags for SGLang, e.g. '--mem-fraction-static=0.6'")
    given = parser.parse_args()
    name = torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or "CPU"
    lora = LoRAConfig(rank=given.rank, alpha=2 * given.rank)
    config = TrainerConfig(lora=lora, dtype=given.dtype, device=given.device)
    with TemporaryDirectory() as folder:
        model = base_model(Path(folder) / "model", given.size, getattr(torch, given.dtype))
        made = make(Path(folder) / "versions", model, given.versions, config)
        if given.device == "cuda":
            torch.cuda.empty_cache()
        spec = {
            "python": Path(given.python),
            "device": given.device,
            "dtype": given.dtype,
            "lora_rank": given.rank,
            "lora_slots": KEPT + 4,
            "extra": tuple(given.flags.split()),
        }
        with sglang(model, START_SECONDS, **spec) as there:
            print(
                f"{name}, torch {torch.__version__}, {given.size}, rank {given.rank}, {given.dtype}, "
                f"{given.people} streams of {TOKENS} tokens\n",
                file=sys.stdout,
            )
            asyncio.run(measure(there, made, given))


if __name__ == "__main__":
    main()
