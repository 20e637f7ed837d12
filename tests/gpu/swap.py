"""Measure version swaps on a GPU, on models of real size with random weights, while replies are streamed.

python -m tests.gpu.swap --size 1.5b --rank 16          on a GPU (3b and 8b, rank 64 as well)
python -m tests.gpu.swap --size tiny --device cpu        to check the script itself

Adapters are loaded by path and in memory. For comparison the same engine also pauses, reloads its weights and resumes.
Every adapter is verified by its log-probs before it is used. Prints one Markdown table and downloads nothing.
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

from alignment.artifacts.manifest import verify
from alignment.artifacts.specs import AdapterSpec, check_adapter
from alignment.config.trainer import LoRAConfig, TrainerConfig
from app.core.settings import Settings
from app.models import Version
from tests.benchmarks.first_token import sglang
from tests.benchmarks.swap import spread
from tests.benchmarks.swap_versions import UnpublishedVersion, make_versions
from tests.gpu.trainer import SIZES, base_model
from tests.support.adapters import adapter_spec
from tests.support.engine_fixture import PYTHON, RunningEngine
from workers.release.delivery.adapters import build_payload, load_and_verify
from workers.release.verify_delivery import Timings

START_SECONDS = 600.0
TOKENS = 96
LOADED_ADAPTERS = 4  # adapters that stay loaded
PATH, MEMORY = "adapter by path: checked, loaded, verified", "adapter in memory: packed and loaded"


@dataclass
class Streams:
    """Continuous streams of replies from the current `version`.

    `gaps` are the milliseconds between two chunks and `broken` the replies that ended early, by the operation that ran
    meanwhile.
    """

    engine: RunningEngine
    vocabulary: int
    version: str | None = None
    operation: str = "nothing"
    stopped: bool = False
    replies: int = 0
    gaps: dict[str, list[float]] = field(default_factory=dict)
    broken: Counter[str] = field(default_factory=Counter)

    async def stream(self, number: int) -> None:
        order = torch.Generator().manual_seed(number)
        key = {"authorization": f"Bearer {self.engine.spec.api_key}"}
        async with httpx2.AsyncClient(base_url=self.engine.spec.url, headers=key, timeout=120, trust_env=False) as api:
            while not self.stopped:
                ids = torch.randint(1, self.vocabulary, (64,), generator=order).tolist()
                sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
                body = {"input_ids": ids, "sampling_params": sampling, "stream": True, "lora_path": self.version}
                num_tokens, last = 0, None
                async with api.stream("POST", "/generate", json=body) as reply:
                    async for line in reply.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now, event = time.perf_counter(), json.loads(line.removeprefix("data: "))
                        if last is not None:
                            self.gaps.setdefault(self.operation, []).append(1000 * (now - last))
                        num_tokens, last = event.get("meta_info", {}).get("completion_tokens", num_tokens), now
                self.replies += 1
                self.broken[self.operation] += num_tokens != TOKENS


@dataclass
class Swaps:
    engine: RunningEngine
    admin: httpx2.AsyncClient
    streams: Streams
    settings: Settings
    shapes: AdapterSpec
    pause: float
    milliseconds: dict[str, list[float]] = field(default_factory=dict)  # by operation

    async def post(self, path: str, body: dict[str, object]) -> None:
        response = await self.admin.post(path, json=body)
        assert response.status_code == 200, f"{path}: {response.text[:500]}"

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        self.streams.operation, started = operation, time.perf_counter()
        yield
        self.milliseconds.setdefault(operation, []).append(1000 * (time.perf_counter() - started))
        self.streams.operation = "nothing"

    async def by_path(self, name: str, unpublished: UnpublishedVersion) -> None:
        client, timings = self.engine.connect(), Timings()
        with self.timed(PATH):
            with timings.measure("check"):
                verify(unpublished.folder, unpublished.manifest_sha256)
                check_adapter(unpublished.folder, self.shapes)
            version = Version(adapter_name=name, adapter_path=str(unpublished.folder), probe=unpublished.probe)
            await load_and_verify(client, version, unpublished.folder, self.settings, timings)
            self.streams.version = name
        for phase in ("check", "load", "verify"):
            self.milliseconds.setdefault(phase, []).append(1000 * timings.seconds[phase])
        self.milliseconds.setdefault("distance", []).append(timings.seconds["probe_distance"])
        await client.aclose()

    async def in_memory(self, name: str, unpublished: UnpublishedVersion) -> None:
        client = self.engine.connect()
        with self.timed(MEMORY):
            start = time.perf_counter()
            adapter = build_payload(unpublished.folder, unpublished.manifest_sha256)
            self.milliseconds.setdefault("transfer", []).append(1000 * (time.perf_counter() - start))
            await client.load_adapter(name, adapter)
        [logprobs, *_] = await client.score(name, unpublished.probe["ids"])
        distance = max(
            abs(actual - expected) for actual, expected in zip(logprobs, unpublished.probe["logprobs"][0], strict=True)
        )
        self.milliseconds.setdefault("distance", []).append(distance)
        await client.unload_adapter(name)
        await client.aclose()

    async def reload(self, mode: str) -> None:
        """Swap weights by pause, reload and resume, as other systems do."""
        with self.timed(f"pause ({mode}), reload, resume"):
            await self.post("/pause_generation", {"mode": mode})
            weights = {"model_path": self.engine.spec.model, "flush_cache": True}
            await self.post("/update_weights_from_disk", weights)
            await self.post("/continue_generation", {"torch_empty_cache": False})

    async def all(self, versions: Sequence[UnpublishedVersion], peer: int) -> None:
        client = self.engine.connect()
        await asyncio.sleep(3 * self.pause)
        for number, unpublished in enumerate(versions):
            await self.by_path(f"version-{number}", unpublished)
            await asyncio.sleep(self.pause)
            await self.in_memory(f"memory-{number}", unpublished)
            await asyncio.sleep(self.pause)
            if number >= LOADED_ADAPTERS:
                await client.unload_adapter(f"version-{number - LOADED_ADAPTERS}")
        for mode in ("retract", "abort"):
            for _ in range(peer):
                await self.reload(mode)
                await asyncio.sleep(self.pause)
        await client.aclose()

    def table(self) -> Iterator[str]:
        yield "| milliseconds | p50 | p95 | p99 | worst | longest gap in a reply meanwhile | replies cut |"
        yield "|---|---|---|---|---|---|---|"
        for operation, values in self.milliseconds.items():
            if operation != "distance":
                gap = f"{max(self.streams.gaps.get(operation, [0.0])):.0f}" if " " in operation else ""
                yield f"| {operation} | {spread(values, 1)} | {gap} | {self.streams.broken[operation] if gap else ''} |"
        yield f"| nothing | | | | | {max(self.streams.gaps['nothing']):.0f} | {self.streams.broken['nothing']} |"


async def measure(engine: RunningEngine, versions: Sequence[UnpublishedVersion], arguments: argparse.Namespace) -> None:
    streams = Streams(engine, SIZES[arguments.size][-1])
    key, lora = (
        {"authorization": f"Bearer {engine.spec.admin_key}"},
        LoRAConfig(r=arguments.rank, alpha=2 * arguments.rank),
    )
    shapes, settings = adapter_spec(Path(engine.spec.model), lora), Settings(dtype=arguments.dtype)
    async with httpx2.AsyncClient(base_url=engine.spec.url, headers=key, timeout=300, trust_env=False) as admin:
        swaps = Swaps(engine, admin, streams, settings, shapes, arguments.pause)
        tasks = [asyncio.create_task(streams.stream(number)) for number in range(arguments.people)]
        await swaps.all(versions, arguments.peer)
        streams.stopped = True
        await asyncio.gather(*tasks)
    print("\n".join(swaps.table()))
    print(f"\n{streams.replies} replies; largest probe distance: {max(swaps.milliseconds['distance']):.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.swap", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--peer", type=int, default=10, help="number of pauses in each mode of the comparison")
    parser.add_argument("--people", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two swaps")
    parser.add_argument("--python", default=str(PYTHON), help="the interpreter that has SGLang")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of SGLang, as --flag=--page-size=16")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "CPU"
    lora = LoRAConfig(r=arguments.rank, alpha=2 * arguments.rank)
    config = TrainerConfig(lora=lora, dtype=arguments.dtype, device=arguments.device)
    with TemporaryDirectory() as folder:
        model = base_model(Path(folder) / "model", arguments.size, getattr(torch, arguments.dtype))
        versions = make_versions(Path(folder) / "versions", model, arguments.versions, config)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        spec = {
            "python": Path(arguments.python),
            "device": arguments.device,
            "dtype": arguments.dtype,
            "adapter": adapter_spec(model, lora),
            "max_loras_per_batch": LOADED_ADAPTERS + 4,
            "extra_flags": tuple(arguments.flag),
        }
        with sglang(model, START_SECONDS, **spec) as engine:
            print(
                f"{name}, torch {torch.__version__}, {arguments.size}, rank {arguments.rank}, {arguments.dtype}, "
                f"{arguments.people} streams of {TOKENS} tokens\n",
                file=sys.stdout,
            )
            asyncio.run(measure(engine, versions, arguments))


if __name__ == "__main__":
    main()
