"""What people notice of a swap, on the real engine: `make bench-swap`, or `python -m tests.benchmarks.swap`.

Two replicas and two API processes over one database; users stream replies without a break while versions are
published, rolled back and deployed, one after the other, with quiet times in between. The trainer's part is played:
adapters of random weights, each with the log-probs that it is proven by. At the end every reply is computed again
under the version that it names. Then the same users talk to one engine alone while it does what others do: pause,
reload the weights, go on.

With `--adaptation full` all weights are exchanged: there is no such comparison, for it is what is measured.
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
from app.inference.pool import load_engine_keys
from app.models import Audit, Engine, EngineState, Origin, Policy, Turn, Version, VersionState
from app.policies.service import is_loaded
from app.projects.bootstrap import bootstrap
from demo.recompute_logprobs import check_logprobs
from tests.benchmarks.deployment import POLICY, database, machine
from tests.benchmarks.load import quantile
from tests.benchmarks.swap_users import STALL_SECONDS, Seen, Users
from tests.benchmarks.swap_versions import Made, make, publish
from tests.support.engine_fixture import free_port
from tests.support.processes import processes

PHASES = {
    "lora": ("export", "check", "transfer", "load", "verify", "switch", "trained_to_served"),
    "full": ("export", "check", "drain", "load", "verify", "exchange", "switch", "trained_to_served"),
}
PATIENCE_SECONDS = 60.0
Span = tuple[float, float]


@dataclass
class Deployed:
    settings: Settings
    db: Database
    key: str
    policy_id: str
    urls: list[str]
    engines: list[str]
    supervisors: list[ManagedProcess]


@dataclass
class Spans:
    """When a version was coming home, and when nothing was, on `time.perf_counter`; and milliseconds from live until
    every replica held it."""

    busy: list[Span] = field(default_factory=list)
    quiet: list[Span] = field(default_factory=list)
    held_by_all: list[float] = field(default_factory=list)


@asynccontextmanager
async def deployed(kind: str, *, replicas: int, apis: int, **more: Any) -> AsyncIterator[Deployed]:
    """`kind`: of the database. `more`: settings other than the defaults."""
    home = Path(mkdtemp(prefix="attune-swap-"))
    try:
        with database(kind, home) as url:
            await asyncio.to_thread(upgrade, url)
            ports = [free_port() for _ in range(replicas)]
            settings = Settings(
                home=home,
                database_url=url,
                policy=POLICY,
                engine_port=ports[0],
                requests_per_minute=10**9,
                **more,
            )
            task_sender = TaskSender(make_celery(settings.broker_url, settings.broker_dir))
            db = Database(url, task_sender)
            async with db.write() as session:
                key = await bootstrap(session, settings.policy, settings.model, settings.adaptation)
            async with db.read() as session:
                policy_id = await session.scalar(select(Policy.id))
            assert key is not None and policy_id is not None
            load_engine_keys(settings)  # made before the replicas race for it
            with processes(settings) as running:
                python, logs, urls = sys.executable, settings.logs_dir, [running.settings.url]
                for number, port in enumerate(ports[1:], 1):
                    child = ManagedProcess(
                        f"engine-{number}", [python, "-m", "workers.engine"], logs / f"engine-{number}.log"
                    )
                    child.environment |= {"ATTUNE_ENGINE_NAME": f"engine-{number}", "ATTUNE_ENGINE_PORT": str(port)}
                    running.children[child.name] = child
                for number in range(1, apis):
                    port = free_port()
                    child = ManagedProcess(
                        f"api-{number}", [python, "-m", "app.cli.main", "serve"], logs / f"api-{number}.log"
                    )
                    running.children[child.name] = child
                    urls.append(f"http://127.0.0.1:{port}")
                    child.environment |= {"ATTUNE_PORT": str(port)}
                own = {name: dict(child.environment) for name, child in running.children.items()}
                wanted = [name for name in running.children if name.startswith(("engine", "api"))]
                for name in (*wanted, "publisher", "worker", "beat"):
                    child = running.children[name]
                    child.environment |= running.environment | own[name]
                    child.start()
                engines = [f"http://127.0.0.1:{port}" for port in ports]
                supervisors = [child for name, child in running.children.items() if name.startswith("engine")]
                there = Deployed(running.settings, db, key, policy_id, urls, engines, supervisors)
                await ready(there, replicas)
                yield there
            await db.close()
            task_sender.close()
    finally:
        shutil.rmtree(home)


async def ready(there: Deployed, replicas: int) -> None:
    async with asyncio.timeout(300):
        while True:
            async with there.db.read() as session:
                up = list(await session.scalars(select(Engine).where(Engine.state == EngineState.READY)))
            if len(up) == replicas:
                break
            await asyncio.sleep(0.2)
        for url in there.urls:
            while True:
                try:
                    if httpx2.get(f"{url}/livez", timeout=1, trust_env=False).status_code == 200:
                        break
                except httpx2.TransportError:
                    await asyncio.sleep(0.1)


async def swap(there: Deployed, made: Sequence[Made], spans: Spans, given: argparse.Namespace) -> None:
    """Publish them all. Every tenth is followed by a quiet while."""
    for number, one in enumerate(made, 1):
        began = time.perf_counter()
        version_id = await publish(there.db, there.settings, there.policy_id, one)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                async with there.db.read() as session:
                    version = await session.get_one(Version, version_id)
                if version.state == VersionState.LIVE and "trained_to_served" in version.timings:
                    break
                assert version.state != VersionState.REJECTED, version.reason
                await asyncio.sleep(0.02)
        ended = time.perf_counter()
        spans.busy.append((began, ended))
        await held(there.db, version)
        spans.held_by_all.append(1000 * (time.perf_counter() - ended))
        await asyncio.sleep(given.pause)
        if number % 10 == 0:
            print(f"{number} of {len(made)} published", flush=True)
            await asyncio.sleep(3 * there.settings.reconcile_seconds)  # what is old is unloaded meanwhile
            began = time.perf_counter()
            await asyncio.sleep(given.quiet)
            spans.quiet.append((began, time.perf_counter()))


async def held(db: Database, version: Version, *, by: Callable[[Iterable[bool]], bool] = all) -> None:
    """Waits until every replica has it, or with `any` one."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            async with db.read() as session:
                if by(is_loaded(engine, version) for engine in await session.scalars(select(Engine))):
                    return
            await asyncio.sleep(0.02)


async def misnamed(db: Database, seen: Sequence[Seen]) -> int:
    """Replies that named another version to the user than is on record."""
    async with db.read() as session:
        rows = await session.execute(
            select(Turn.completion_id, Version.number).join(Version, Version.id == Turn.version_id)
        )
        known = {id: f"{POLICY}@v{number}" for id, number in rows}
    return sum(known.get(reply.id or "") != reply.label for reply in seen if reply.trouble is None)


async def go_back_and_forth(there: Deployed, moves: int) -> tuple[list[float], list[float]]:
    """Back one version, and forward again: milliseconds of each call, and until a replica had what it asked for."""
    took, waited = list[float](), list[float]()
    headers = {"authorization": f"Bearer {there.key}"}
    async with httpx2.AsyncClient(base_url=there.urls[0], headers=headers, timeout=30, trust_env=False) as api:
        serving = (await api.get(f"/v1/policies/{POLICY}")).json()["serving"]
        newest = int(serving.rpartition("v")[2])
        for number in range(moves):
            body = {"version": newest if number % 2 else newest - 1}
            began = time.perf_counter()
            answer = await api.post(f"/v1/policies/{POLICY}/{'deploy' if number % 2 else 'rollback'}", json=body)
            took.append(1000 * (time.perf_counter() - began))
            assert answer.status_code == 200, answer.text
            async with there.db.read() as session:
                asked = select(Version).where(Version.number == body["version"])
                version = (await session.scalars(asked)).one()
            await held(there.db, version, by=any)
            waited.append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(0.5)
    return took, waited


async def pause_reload_resume(there: Deployed, times: int, mode: str, seen: list[Seen]) -> list[float]:
    """What a peer does, on one replica that people talk to without us between: seconds of each."""
    keys, url = load_engine_keys(there.settings), there.engines[0]
    users = Users([url], keys.api, "default", 4, seen=seen)
    talking = asyncio.create_task(users.talk(99))
    took = []
    headers = {"authorization": f"Bearer {keys.admin}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as engine:
        for _ in range(times):
            await asyncio.sleep(1.0)
            began = time.perf_counter()
            reload = {"model_path": str(DEMO_MODEL), "flush_cache": True}
            for path, body in (
                ("/pause_generation", {"mode": mode}),
                ("/update_weights_from_disk", reload),
                ("/continue_generation", {"torch_empty_cache": False}),
            ):
                answer = await engine.post(path, json=body)
                assert answer.status_code == 200, f"{path}: {answer.text}"
            took.append(time.perf_counter() - began)
    users.over = True
    await talking
    return took


async def lags(there: Deployed) -> dict[str, list[float]]:
    """By what moved it: milliseconds from each move of the pointer to the last new turn on a version that it left."""
    async with there.db.read() as session:
        moves = [
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
    found: dict[str, list[float]] = {"deployment.deployed": [], "deployment.rolled_back": []}
    ends = [moment for _, moment in moves[1:]] + [float("inf")]
    for (action, moment), until, number in zip(moves, ends, served, strict=True):
        late = [at - moment for at, of in turns if moment < at < until and of != number]
        found[action].append(1000 * max(late, default=0.0))
    return found


def spread(values: Sequence[float], digits: int = 0) -> str:
    shares = " | ".join(f"{quantile(values, share):.{digits}f}" for share in (0.5, 0.95, 0.99))
    return f"{shares} | {max(values, default=float('nan')):.{digits}f}"


def of_spans(seen: Sequence[Seen], spans: Sequence[Span]) -> list[float]:
    """Milliseconds to the first words of the replies that were asked for meanwhile."""
    return [
        1000 * (reply.first_at - reply.asked_at)
        for reply in seen
        if reply.trouble is None and any(began <= reply.asked_at < ended for began, ended in spans)
    ]


def people(seen: Sequence[Seen]) -> str:
    troubles = [reply.trouble for reply in seen if reply.trouble]
    stalls = sum(reply.widest > STALL_SECONDS for reply in seen)
    widest = max((reply.widest for reply in seen), default=0.0)
    told = f"{len(seen)} replies, {len(troubles)} failed, cut or misnamed, {stalls} stalled; widest gap {widest:.2f} s"
    return told + (f" ({troubles[:3]})" if troubles else "")


async def run(given: argparse.Namespace) -> None:
    print(
        f"{machine()}; {given.replicas} replicas, {given.apis} API processes, {given.database}, {given.people} users "
        f"who think for up to {given.think:g} s, adapters by {given.transport}\n"
    )
    aside = Path(mkdtemp(prefix="attune-swap-versions-"))
    try:
        full = given.adaptation == "full"
        config = TrainerConfig(device="cpu", lora=None) if full else TrainerConfig(device="cpu")
        made = await asyncio.to_thread(make, aside, DEMO_MODEL, given.publications, config)
        told = {"adaptation": given.adaptation, "adapter_delivery": given.adapter_delivery}
        async with deployed(given.database, replicas=given.replicas, apis=given.apis, **told) as there:
            spans = Spans()
            users = Users(there.urls, there.key, POLICY, given.people, think=given.think)
            talking = asyncio.create_task(users.talk(given.seed))
            await asyncio.sleep(given.quiet)
            await swap(there, made, spans, given)
            calls, waited = await go_back_and_forth(there, given.moves)
            users.over = True
            await talking
            await report(there, users.seen, spans, calls, waited)
            for mode in () if full else ("abort", "retract"):
                seen: list[Seen] = []
                took = await pause_reload_resume(there, given.peer, mode, seen)
                print(f"pause ({mode}), reload, resume: {spread([1000 * value for value in took])} ms; {people(seen)}")
    finally:
        shutil.rmtree(aside)


async def report(there: Deployed, seen: list[Seen], spans: Spans, calls: list[float], waited: list[float]) -> None:
    async with there.db.read() as session:
        versions = [v for v in await session.scalars(select(Version)) if "trained_to_served" in v.timings]
        cut = await session.scalar(select(func.count()).where(Turn.exclusion_reason.startswith("the weights changed")))
    print("\n| milliseconds | p50 | p95 | p99 | worst |\n|---|---|---|---|---|")
    phases = PHASES[there.settings.adaptation]
    for phase in (phase for phase in phases if phase in versions[0].timings):
        print(f"| {phase} | {spread([1000 * version.timings[phase] for version in versions], 1)} |")
    moved = await lags(there)
    print(f"| pointer move → last new turn on the old version | {spread(moved['deployment.deployed'], 1)} |")
    print(f"| the same, rolling back | {spread(moved['deployment.rolled_back'], 1)} |")
    print(f"| the call of a rollback or deploy | {spread(calls, 1)} |")
    print(f"| from that call until a replica has the version | {spread(waited, 1)} |")
    print(f"| first words, while a version comes home | {spread(of_spans(seen, spans.busy))} |")
    print(f"| first words, quiet | {spread(of_spans(seen, spans.quiet))} |")
    print(f"| live → held by every replica | {spread(spans.held_by_all)} |")
    attested, good = await check_logprobs(there.db, there.settings), sum(reply.trouble is None for reply in seen)
    moments = sum(len(values) for values in moved.values())
    print(f"\n{len(versions)} publications, {moments} moves of the pointer: {people(seen)}")
    if there.settings.adaptation == "full":
        print(f"{cut} replies went on with other weights than they began with, and are not learned from")
    print(
        f"{await misnamed(there.db, seen)} named another version than is on record; computed again: {attested.replies} "
        f"of {good} good replies, {attested.mislabelled} not of the version that they name (largest distance "
        f"{attested.largest_distance:.1e})\n"
    )


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--publications", type=int, default=100)
    given.add_argument("--moves", type=int, default=40, help="rollbacks and deployments, in turns")
    given.add_argument("--peer", type=int, default=10, help="pauses of the comparison, in each mode")
    given.add_argument("--replicas", type=int, default=2)
    given.add_argument("--apis", type=int, default=2)
    given.add_argument("--people", type=int, default=4)
    given.add_argument("--think", type=float, default=0.1, help="seconds at most that a user waits between replies")
    given.add_argument("--pause", type=float, default=0.5, help="seconds between two publications")
    given.add_argument("--quiet", type=float, default=5.0, help="seconds after every tenth")
    given.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    given.add_argument("--adaptation", choices=("lora", "full"), default="lora")
    given.add_argument("--adapter-delivery", choices=("path", "memory"), default="path", help="of adapters")
    given.add_argument("--seed", type=int, default=1)
    asyncio.run(run(given.parse_args()))


if __name__ == "__main__":
    main()
