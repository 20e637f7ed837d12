"""Measure how version swaps affect users, on the real engine: `make bench-swap` or `python -m tests.benchmarks.swap`.

Two replicas and two API processes share one database. Simulated users stream replies continuously while versions are
published, rolled back and deployed in sequence, with idle periods in between. The trainer is simulated: it publishes
adapters of random weights, each with probe log-probs for its verification. At the end the log-probs of every reply are
recomputed with the version that the reply names. For comparison the same users then stream from one engine without
Attune, while it swaps weights as other systems do: pause, reload the weights, resume.

With `--adaptation full` all weights are swapped, and this comparison is left out. With `--episodes` the users are
agents, whose chats are episodes of several turns.
"""

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx2
from sqlalchemy import func, select

from alignment.config.trainer import TrainerConfig
from app.core.database import Database
from app.core.jobs import TaskSender, make_celery
from app.core.migrate import upgrade
from app.core.processes import ManagedProcess
from app.core.settings import DEMO_MODEL, Settings
from app.engines.fleet import is_loaded
from app.inference.keys import load_engine_keys
from app.models import Audit, Engine, EngineState, Origin, Policy, Turn, Version, VersionState
from app.projects.service import bootstrap
from demo.recompute_logprobs import check_logprobs
from tests.benchmarks.deployment import POLICY, database, machine
from tests.benchmarks.load import quantile
from tests.benchmarks.swap_episodes import Agents
from tests.benchmarks.swap_users import STALL_SECONDS, ReplyRecord, Users
from tests.benchmarks.swap_versions import UnpublishedVersion, make_versions, publish
from tests.support.engine_fixture import free_port
from tests.support.processes import processes
from tests.support.settings import by_path

PHASES = {
    "lora": ("export", "check", "transfer", "load", "verify", "switch", "trained_to_served"),
    "full": ("export", "check", "drain", "load", "verify", "exchange", "switch", "trained_to_served"),
}
TIMEOUT_SECONDS = 60.0
Span = tuple[float, float]


@dataclass
class SwapDeployment:
    settings: Settings
    db: Database
    key: str
    policy_id: str
    urls: list[str]
    engines: list[str]
    supervisors: list[ManagedProcess]


@dataclass
class Spans:
    """Spans of releases and of idle periods, on `time.perf_counter`.

    `loaded_everywhere`: milliseconds from live until every replica has the version loaded.
    """

    releases: list[Span] = field(default_factory=list)
    idle: list[Span] = field(default_factory=list)
    loaded_everywhere: list[float] = field(default_factory=list)


@asynccontextmanager
async def run_deployment(kind: str, *, replicas: int, apis: int, **overrides: Any) -> AsyncIterator[SwapDeployment]:
    """Run a deployment with a database of `kind`. `overrides`: settings that differ from the defaults."""
    home = Path(mkdtemp(prefix="attune-swap-"))
    try:
        with database(kind, home) as url:
            await asyncio.to_thread(upgrade, url)
            ports = [free_port() for _ in range(replicas)]
            settings = Settings(
                home=home,
                database={"url": url},
                policy=POLICY,
                engine={"port": ports[0]},
                limits={"requests_per_minute": 10**9},
            ).replace(by_path(overrides))
            task_sender = TaskSender(make_celery(settings.broker.url, settings.broker_dir))
            db = Database(url, task_sender)
            async with db.write() as session:
                key = await bootstrap(session, settings.policy, settings.model)
            async with db.read() as session:
                policy_id = await session.scalar(select(Policy.id))
            assert key is not None and policy_id is not None
            load_engine_keys(settings)  # create the keys before the replicas start, which would race for it
            with processes(settings) as running:
                python, logs, urls = sys.executable, settings.logs_dir, [running.settings.local_url]
                for number, port in enumerate(ports[1:], 1):
                    child = ManagedProcess(
                        f"engine-{number}", [python, "-m", "workers.engine"], logs / f"engine-{number}.log"
                    )
                    child.environment |= {"ATTUNE_ENGINE__NAME": f"engine-{number}", "ATTUNE_ENGINE__PORT": str(port)}
                    running.children[child.name] = child
                for number in range(1, apis):
                    port = free_port()
                    child = ManagedProcess(
                        f"api-{number}", [python, "-m", "app.cli.main", "serve"], logs / f"api-{number}.log"
                    )
                    running.children[child.name] = child
                    urls.append(f"http://127.0.0.1:{port}")
                    child.environment |= {"ATTUNE_SERVER__PORT": str(port)}
                own_environments = {name: dict(child.environment) for name, child in running.children.items()}
                servers = [name for name in running.children if name.startswith(("engine", "api"))]
                for name in (*servers, "publisher", "worker", "beat"):
                    child = running.children[name]
                    child.environment |= running.environment | own_environments[name]
                    child.start()
                engines = [f"http://127.0.0.1:{port}" for port in ports]
                supervisors = [child for name, child in running.children.items() if name.startswith("engine")]
                deployment = SwapDeployment(running.settings, db, key, policy_id, urls, engines, supervisors)
                await wait_until_ready(deployment, replicas)
                yield deployment
            await db.close()
            task_sender.close()
    finally:
        shutil.rmtree(home)


async def wait_until_ready(deployment: SwapDeployment, replicas: int) -> None:
    async with asyncio.timeout(300):
        while True:
            async with deployment.db.read() as session:
                ready = list(await session.scalars(select(Engine).where(Engine.state == EngineState.READY)))
            if len(ready) == replicas:
                break
            await asyncio.sleep(0.2)
        for url in deployment.urls:
            while True:
                try:
                    if httpx2.get(f"{url}/livez", timeout=1, trust_env=False).status_code == 200:
                        break
                except httpx2.TransportError:
                    await asyncio.sleep(0.1)


async def publish_all(
    deployment: SwapDeployment, versions: Sequence[UnpublishedVersion], spans: Spans, args: argparse.Namespace
) -> None:
    """Publish all versions, with an idle period after every tenth."""
    for number, unpublished in enumerate(versions, 1):
        start = time.perf_counter()
        version_id = await publish(deployment.db, deployment.settings, deployment.policy_id, unpublished)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                async with deployment.db.read() as session:
                    version = await session.get_one(Version, version_id)
                if version.state == VersionState.LIVE and "trained_to_served" in version.timings:
                    break
                assert version.state != VersionState.REJECTED, version.reason
                await asyncio.sleep(0.02)
        ended = time.perf_counter()
        spans.releases.append((start, ended))
        await wait_until_loaded(deployment.db, version)
        spans.loaded_everywhere.append(1000 * (time.perf_counter() - ended))
        await asyncio.sleep(args.pause)
        if number % 10 == 0:
            print(f"{number} of {len(versions)} published", flush=True)
            await asyncio.sleep(
                3 * deployment.settings.workers.reconcile_seconds
            )  # old versions are unloaded meanwhile
            start = time.perf_counter()
            await asyncio.sleep(args.quiet)
            spans.idle.append((start, time.perf_counter()))


async def wait_until_loaded(db: Database, version: Version, *, by: Callable[[Iterable[bool]], bool] = all) -> None:
    """Wait until every replica has loaded the version; with `by=any`, until one has."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            async with db.read() as session:
                if by(is_loaded(engine, version) for engine in await session.scalars(select(Engine))):
                    return
            await asyncio.sleep(0.02)


async def count_misnamed(db: Database, replies: Sequence[ReplyRecord]) -> int:
    """Count the replies that named another version to the user than the recorded one."""
    async with db.read() as session:
        rows = await session.execute(
            select(Turn.completion_id, Version.number).join(Version, Version.id == Turn.version_id)
        )
        labels = {id: f"{POLICY}@v{number}" for id, number in rows}
    return sum(labels.get(reply.id or "") != reply.label for reply in replies if reply.failure is None)


async def roll_back_and_deploy(deployment: SwapDeployment, moves: int) -> tuple[list[float], list[float]]:
    """Alternate between rollback by one version and deploy.

    Return the milliseconds of each call, and the milliseconds until a replica has the requested version.
    """
    call_times, load_times = list[float](), list[float]()
    headers = {"authorization": f"Bearer {deployment.key}"}
    async with httpx2.AsyncClient(base_url=deployment.urls[0], headers=headers, timeout=30, trust_env=False) as api:
        serving = (await api.get(f"/v1/policies/{POLICY}")).json()["serving"]
        newest = int(serving.rpartition("v")[2])
        for number in range(moves):
            body = {"version": newest if number % 2 else newest - 1}
            start = time.perf_counter()
            response = await api.post(f"/v1/policies/{POLICY}/{'deploy' if number % 2 else 'rollback'}", json=body)
            call_times.append(1000 * (time.perf_counter() - start))
            assert response.status_code == 200, response.text
            async with deployment.db.read() as session:
                statement = select(Version).where(Version.number == body["version"])
                version = (await session.scalars(statement)).one()
            await wait_until_loaded(deployment.db, version, by=any)
            load_times.append(1000 * (time.perf_counter() - start))
            await asyncio.sleep(0.5)
    return call_times, load_times


async def pause_reload_resume(
    deployment: SwapDeployment, times: int, mode: str, replies: list[ReplyRecord]
) -> list[float]:
    """Swap weights as other systems do, on one replica that users access directly. Return the seconds of each swap."""
    keys, url = load_engine_keys(deployment.settings), deployment.engines[0]
    users = Users([url], keys.api, "default", 4, replies=replies)
    chat_task = asyncio.create_task(users.chat(99))
    durations = []
    headers = {"authorization": f"Bearer {keys.admin}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as engine:
        for _ in range(times):
            await asyncio.sleep(1.0)
            start = time.perf_counter()
            reload = {"model_path": str(DEMO_MODEL), "flush_cache": True}
            for path, body in (
                ("/pause_generation", {"mode": mode}),
                ("/update_weights_from_disk", reload),
                ("/continue_generation", {"torch_empty_cache": False}),
            ):
                response = await engine.post(path, json=body)
                assert response.status_code == 200, f"{path}: {response.text}"
            durations.append(time.perf_counter() - start)
    users.stopped = True
    await chat_task
    return durations


async def switch_delays(deployment: SwapDeployment) -> dict[str, list[float]]:
    """Return milliseconds from each deployment switch to the last new turn on an old version, by audit action."""
    async with deployment.db.read() as session:
        switches = [
            (row.action, row.created_at)
            for row in await session.scalars(
                select(Audit)
                .where(Audit.action.in_(("deployment.deployed", "deployment.rolled_back")))
                .order_by(Audit.seq)
            )
        ]
        turns = (
            await session.execute(
                select(Turn.created_at, Version.number)
                .join(Version, Version.id == Turn.version_id)
                .where(Turn.origin == Origin.CHAT)
                .order_by(Turn.created_at)
            )
        ).all()
        served = [
            int(subject.rpartition("v")[2])
            for subject in await session.scalars(
                select(Audit.subject)
                .where(Audit.action.in_(("deployment.deployed", "deployment.rolled_back")))
                .order_by(Audit.seq)
            )
        ]
    delays: dict[str, list[float]] = {"deployment.deployed": [], "deployment.rolled_back": []}
    ends = [switched_at for _, switched_at in switches[1:]] + [float("inf")]
    for (action, switched_at), until, number in zip(switches, ends, served, strict=True):
        late = [at - switched_at for at, version in turns if switched_at < at < until and version != number]
        delays[action].append(1000 * max(late, default=0.0))
    return delays


def spread(values: Sequence[float], digits: int = 0) -> str:
    shares = " | ".join(f"{quantile(values, share):.{digits}f}" for share in (0.5, 0.95, 0.99))
    return f"{shares} | {max(values, default=float('nan')):.{digits}f}"


def first_token_times(replies: Sequence[ReplyRecord], spans: Sequence[Span]) -> list[float]:
    """Return the milliseconds to the first token of the replies that were requested in the spans."""
    return [
        1000 * (reply.first_at - reply.requested_at)
        for reply in replies
        if reply.failure is None and any(start <= reply.requested_at < ended for start, ended in spans)
    ]


def summarize_replies(replies: Sequence[ReplyRecord]) -> str:
    failures = [reply.failure for reply in replies if reply.failure]
    stalls = sum(reply.largest_gap > STALL_SECONDS for reply in replies)
    largest_gap = max((reply.largest_gap for reply in replies), default=0.0)
    counts = f"{len(replies)} replies, {len(failures)} failed, cut or misnamed, {stalls} stalled"
    return f"{counts}; largest gap {largest_gap:.2f} s" + (f" ({failures[:3]})" if failures else "")


async def run(args: argparse.Namespace) -> None:
    print(
        f"{machine()}; {args.replicas} replicas, {args.apis} API processes, {args.database}, {args.people} users "
        f"who wait up to {args.think:g} s between replies, adapters by {args.adapter_delivery}\n"
    )
    directory = Path(mkdtemp(prefix="attune-swap-versions-"))
    try:
        full = args.adaptation == "full"
        config = TrainerConfig(device="cpu", lora=None) if full else TrainerConfig(device="cpu")
        versions = await asyncio.to_thread(make_versions, directory, DEMO_MODEL, args.publications, config)
        overrides = {"adaptation": args.adaptation, "adapter_delivery": args.adapter_delivery}
        async with run_deployment(args.database, replicas=args.replicas, apis=args.apis, **overrides) as deployment:
            spans = Spans()
            kind = Agents if args.episodes else Users
            users = kind(deployment.urls, deployment.key, POLICY, args.people, think=args.think)
            chat_task = asyncio.create_task(users.chat(args.seed))
            await asyncio.sleep(args.quiet)
            await publish_all(deployment, versions, spans, args)
            call_times, load_times = await roll_back_and_deploy(deployment, args.moves)
            users.stopped = True
            await chat_task
            await report(deployment, users.replies, spans, call_times, load_times)
            if isinstance(users, Agents):
                print(f"{users.summarize()}\n")
            for mode in () if full else ("abort", "retract"):
                replies: list[ReplyRecord] = []
                durations = await pause_reload_resume(deployment, args.peer, mode, replies)
                milliseconds = spread([1000 * seconds for seconds in durations])
                print(f"pause ({mode}), reload, resume: {milliseconds} ms; {summarize_replies(replies)}")
    finally:
        shutil.rmtree(directory)


async def report(
    deployment: SwapDeployment,
    replies: list[ReplyRecord],
    spans: Spans,
    call_times: list[float],
    load_times: list[float],
) -> None:
    async with deployment.db.read() as session:
        rows = await session.scalars(select(Version).order_by(Version.number, Version.id))
        versions = [version for version in rows if "trained_to_served" in version.timings]
        mixed = await session.scalar(
            select(func.count()).where(Turn.exclusion_reason.startswith("the weights changed"))
        )
    print("\n| milliseconds | p50 | p95 | p99 | worst |\n|---|---|---|---|---|")
    phases = PHASES[deployment.settings.trainer.adaptation]
    for phase in (phase for phase in phases if phase in versions[0].timings):
        print(f"| {phase} | {spread([1000 * version.timings[phase] for version in versions], 1)} |")
    delays = await switch_delays(deployment)
    print(f"| deployment switch → last new turn on the old version | {spread(delays['deployment.deployed'], 1)} |")
    print(f"| the same, for a rollback | {spread(delays['deployment.rolled_back'], 1)} |")
    print(f"| the API call of a rollback or deploy | {spread(call_times, 1)} |")
    print(f"| from that call until a replica has the version | {spread(load_times, 1)} |")
    print(f"| first token, during a release | {spread(first_token_times(replies, spans.releases))} |")
    print(f"| first token, idle | {spread(first_token_times(replies, spans.idle))} |")
    print(f"| live → loaded by every replica | {spread(spans.loaded_everywhere)} |")
    recomputed, good = (
        await check_logprobs(deployment.db, deployment.settings),
        sum(reply.failure is None for reply in replies),
    )
    switches = sum(len(values) for values in delays.values())
    print(f"\n{len(versions)} publications, {switches} switches of the deployment: {summarize_replies(replies)}")
    if deployment.settings.trainer.adaptation == "full":
        print(f"{mixed} replies continued with other weights than they start with, and are not trained on")
    print(
        f"{await count_misnamed(deployment.db, replies)} named another version than the recorded one; recomputed: "
        f"{recomputed.replies} of {good} good replies, {recomputed.mislabelled} not from the version they name "
        f"(largest distance {recomputed.largest_distance:.1e})\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publications", type=int, default=100)
    parser.add_argument("--moves", type=int, default=40, help="number of rollbacks and deployments, alternating")
    parser.add_argument("--peer", type=int, default=10, help="number of pauses in each mode of the comparison")
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
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
