"""Measure how version swaps affect users, on the real engine: `make bench-swap` or `python -m tests.benchmarks.swap`.

Two replicas and two API processes share one database. Simulated users stream replies continuously while versions are
published, rolled back and deployed in sequence, with idle periods in between. The trainer is simulated: it publishes
adapters of random weights, each with probe log-probs for its verification. At the end the log-probs of every reply are
recomputed with the version that the reply names. For comparison the same users then stream from one engine without
Attune, while it swaps weights as other systems do: pause, reload the weights, resume.

The replicas are SGLang's. With `--engine vllm` they are vLLM's (`make setup-vllm`), and with `--engine sglang vllm` of
both kinds in turn, in one fleet. A version's phases are those of its slowest replica, so that such a fleet does not
tell the kinds apart. With `--in-turn N` there are N fleets of each kind instead, one after another, and the table has
both kinds side by side. The comparison with a pause needs SGLang as the first replica, and is left out otherwise.

With `--adaptation full` all weights are swapped, and this comparison is left out. With `--episodes` the users are
agents, whose chats are episodes of several turns.
"""

import argparse
import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from alignment.config.trainer import TrainerConfig
from app.core.settings import DEMO_MODEL
from app.core.settings.engine import EngineKind, EngineSettings
from tests.benchmarks.deployment import POLICY, machine
from tests.benchmarks.swap_deployment import run_deployment
from tests.benchmarks.swap_episodes import Agents
from tests.benchmarks.swap_releases import pause_reload_resume, publish_all, roll_back_and_deploy
from tests.benchmarks.swap_report import Spans, SwapFigures, measure, print_report, spread, summarize_replies
from tests.benchmarks.swap_users import ReplyRecord, Users
from tests.benchmarks.swap_versions import UnpublishedVersion, make_versions

NAMES: dict[EngineKind, str] = {"sglang": "SGLang", "vllm": "vLLM"}


@dataclass(frozen=True)
class Fleet:
    """One deployment of the benchmark: the kinds of its replicas, and its part of the work."""

    kinds: tuple[EngineKind, ...]
    versions: Sequence[UnpublishedVersion]
    moves: int
    pauses: int
    seed: int

    @property
    def name(self) -> str:
        return " and ".join(NAMES[kind] for kind in self.kinds)


def plan_fleets(args: argparse.Namespace, versions: Sequence[UnpublishedVersion]) -> Iterator[Fleet]:
    """Yield one fleet of all kinds; in turn, fleets of each kind, whose order is reversed each time (ABBA).

    Fleets of the same turn publish the same versions for users with the same questions.
    """
    turns = max(1, args.in_turn)
    fleets = [(kind,) for kind in args.engine] if args.in_turn else [tuple(args.engine)]

    def part(total: int, turn: int) -> slice:
        return slice(total * turn // turns, total * (turn + 1) // turns)

    for turn in range(turns):
        moves, pauses = (len(range(total)[part(total, turn)]) for total in (args.moves, args.peer))
        for kinds in reversed(fleets) if turn % 2 else fleets:
            can_pause = kinds[0] == "sglang" and args.adaptation == "lora"
            of_turn = versions[part(len(versions), turn)]
            yield Fleet(kinds, of_turn, moves, pauses if can_pause else 0, args.seed + turn)


async def run_fleet(args: argparse.Namespace, fleet: Fleet, figures: SwapFigures) -> None:
    """Run one deployment with its users, releases and moves, add its figures and print all; then the comparison."""
    load = os.getloadavg()[0]
    print(f"{fleet.name}: {len(fleet.versions)} publications, {fleet.moves} moves; load average {load:.1f}", flush=True)
    overrides = {"adaptation": args.adaptation, "adapter_delivery": args.adapter_delivery}
    async with run_deployment(
        args.database, engine_kinds=fleet.kinds, replicas=args.replicas, apis=args.apis, **overrides
    ) as deployment:
        spans = Spans()
        kind = Agents if args.episodes else Users
        users = kind(deployment.urls, deployment.key, POLICY, args.people, think=args.think)
        chat_task = asyncio.create_task(users.chat(fleet.seed))
        await asyncio.sleep(args.quiet)
        await publish_all(deployment, fleet.versions, spans, pause=args.pause, quiet=args.quiet)
        call_times, load_times = await roll_back_and_deploy(deployment, fleet.moves)
        users.stopped = True
        await chat_task
        figures.add(await measure(deployment, users.replies, spans, call_times, load_times))
        print_report({fleet.name: figures}, full=args.adaptation == "full")
        if isinstance(users, Agents):
            print(f"{users.summarize()}\n")
        for mode in ("abort", "retract") if fleet.pauses else ():
            replies: list[ReplyRecord] = []
            durations = await pause_reload_resume(deployment, fleet.pauses, mode, replies)
            milliseconds = spread([1000 * seconds for seconds in durations])
            print(f"pause ({mode}), reload, resume: {milliseconds} ms; {summarize_replies(replies)}", flush=True)


async def run(args: argparse.Namespace) -> None:
    print(
        f"{machine()}; {args.replicas} replicas, {args.apis} API processes, {args.database}, {args.people} users "
        f"who wait up to {args.think:g} s between replies, adapters by {args.adapter_delivery}\n"
    )
    directory = Path(mkdtemp(prefix="attune-swap-versions-"))
    full = args.adaptation == "full"
    figures: dict[str, SwapFigures] = {}
    try:
        config = TrainerConfig(device="cpu", lora=None) if full else TrainerConfig(device="cpu")
        versions = await asyncio.to_thread(make_versions, directory, DEMO_MODEL, args.publications, config)
        for fleet in plan_fleets(args, versions):
            await run_fleet(args, fleet, figures.setdefault(fleet.name, SwapFigures()))
        if len(figures) > 1:
            print_report(figures, full=full)
    finally:
        shutil.rmtree(directory)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publications", type=int, default=100)
    parser.add_argument("--moves", type=int, default=40, help="number of rollbacks and deployments, alternating")
    parser.add_argument("--peer", type=int, default=10, help="number of pauses in each mode of the comparison")
    parser.add_argument(
        "--engine",
        nargs="+",
        choices=tuple(NAMES),
        default=["sglang"],
        metavar="KIND",
        help="the kinds of the replicas: sglang, vllm or both, in one fleet",
    )
    parser.add_argument(
        "--in-turn",
        type=int,
        default=0,
        metavar="N",
        help="N fleets of each kind in turn, instead of one of all; each has 1/N of the publications, moves and pauses",
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--apis", type=int, default=2)
    parser.add_argument("--people", type=int, default=4, help="number of simulated users")
    parser.add_argument("--think", type=float, default=0.1, help="the most seconds that a user waits between replies")
    parser.add_argument("--episodes", action="store_true", help="the users are agents: episodes of several chats")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two publications")
    parser.add_argument(
        "--quiet", type=float, default=5.0, help="seconds of the idle period after every tenth publication"
    )
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--adaptation", choices=("lora", "full"), default="lora")
    parser.add_argument(
        "--adapter-delivery", choices=("path", "memory"), default="path", help="how engines get adapters"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if (reason := find_refusal(args)) is not None:
        parser.error(reason)
    return args


def find_refusal(args: argparse.Namespace) -> str | None:
    """Return why these options cannot run together, or None. docs/engines.md lists what vLLM does not do."""
    kinds: list[EngineKind] = args.engine
    if len(set(kinds)) < len(kinds):
        return "--engine names a kind twice"
    if args.in_turn and not (len(kinds) > 1 and 1 <= args.in_turn <= args.publications):
        return "--in-turn needs two kinds in --engine, and a publication for each fleet"
    if not args.in_turn and len(kinds) > args.replicas:
        return f"--engine names {len(kinds)} kinds, and the fleet has {args.replicas} replicas: raise --replicas"
    if "vllm" in kinds and args.adaptation == "full":
        return "--adaptation full: vLLM serves adapters only"
    if "vllm" in kinds and args.adapter_delivery == "memory":
        return "--adapter-delivery memory: vLLM takes adapters by path only"
    for kind in kinds:
        if not (interpreter := EngineSettings(kind=kind).interpreter).exists():
            return f"--engine {kind}: {interpreter} is missing; run make setup{'-vllm' if kind == 'vllm' else ''}"
    return None


def main() -> None:
    asyncio.run(run(parse_arguments()))


if __name__ == "__main__":
    main()
