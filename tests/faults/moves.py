"""Moves of the pointer that meet: one is stopped before its N-th statement or commit while another goes as far as it
can. Each meeting has a policy of its own, and must end as if one had come after the other."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
from sqlalchemy import event, select
from sqlalchemy.util import await_only

from alignment.artifacts import MANIFEST
from app.core.database import Database
from app.core.settings import Settings
from app.main import create_app
from app.models import Audit, AuditAction, Deployment, Engine, Policy, Project, Version, VersionState, new_id
from app.policies import repository
from app.projects.bootstrap import create_policy
from tests.support.adapters import make_adapter
from tests.support.deployment import Harness
from tests.support.scripted_engine import logprob
from workers.release.evaluate import evaluate
from workers.release.publish import publish as publish_all

PAUSE_SECONDS = 0.05  # what is not over then waits for a lock of the one that was stopped, or goes on beside it
NAMES = count(1)


@dataclass(frozen=True)
class Side:
    """An API process and a publisher, with connections of their own: nothing but the database stands between two."""

    settings: Settings
    api: httpx2.AsyncClient
    db: Database
    engines: tuple[Any, ...]

    async def ask(self, policy: str, path: str, **body: Any) -> str:
        answer = await self.api.post(f"/v1/policies/{policy}/{path}", json=body)
        return f"{answer.status_code} {answer.json().get('error', {}).get('code')}"

    async def publish(self) -> str:
        await publish_all(self.db, self.settings)
        return "done"

    async def bring_home(self) -> str:
        await evaluate(self.db, self.settings, "test")
        return "done"


Move = Callable[[Side, str], Awaitable[str]]
MOVES: dict[str, Move] = {
    "bring home": lambda side, policy: side.bring_home(),
    "publish": lambda side, policy: side.publish(),
    "roll back": lambda side, policy: side.ask(policy, "rollback"),
    "roll back to v0": lambda side, policy: side.ask(policy, "rollback", version=0),
    "deploy v1": lambda side, policy: side.ask(policy, "deploy", version=1),
    "v1 as a canary": lambda side, policy: side.ask(policy, "deploy", version=1, share=0.5),
    "promote": lambda side, policy: side.ask(policy, "canary/promote"),
    "end": lambda side, policy: side.ask(policy, "canary/abort"),
}


@asynccontextmanager
async def side(settings: Settings, key: str) -> AsyncIterator[Side]:
    app, db = create_app(settings), Database(settings.database)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://attune",
            headers={"authorization": f"Bearer {key}"},
        ) as api,
    ):
        yield Side(settings, api, db, (db.engine.sync_engine, app.services.get(Database).engine.sync_engine))
    await db.close()


@contextmanager
def stopped(side: Side, at: int, meanwhile: Callable[[], Awaitable[None]]) -> Iterator[list[str]]:
    """Before its statement or commit number `at`, `meanwhile` is started and has a moment. What is given is filled with
    the points that it came by."""
    passed: list[str] = []

    def point(told: str) -> None:
        passed.append(told)
        if len(passed) == at:
            await_only(meanwhile())

    def statement(connection: Any, cursor: Any, told: str, *rest: Any) -> None:
        point(told)

    def commit(connection: Any) -> None:
        point("COMMIT")

    for engine in side.engines:
        event.listen(engine, "before_cursor_execute", statement)
        event.listen(engine, "commit", commit)
    try:
        yield passed
    finally:
        for engine in side.engines:
            event.remove(engine, "before_cursor_execute", statement)
            event.remove(engine, "commit", commit)


async def line(harness: Harness, newest: VersionState) -> str:
    """A policy whose v2 serves after v1 and v0; v3, learned from it, is trained, proven or the canary. The engine holds
    all but what is only trained."""
    name = f"line-{next(NAMES)}"
    async with harness.db.write() as session:
        project = await session.scalar(select(Project.id))
        await create_policy(session, project or "", name, harness.settings.model)
        policy = (await session.scalars(select(Policy).where(Policy.name == name))).one()
        rows = [(await session.scalars(select(Version).where(Version.policy_id == policy.id))).one()]
        for number in range(1, 4):
            row = Version(
                id=new_id("ver"),
                policy_id=policy.id,
                number=number,
                parent_id=rows[-1].id,
                state=VersionState.SUPERSEDED,
                adapter_name=f"{name}-v{number}",
                live_at=float(number) if number < 3 else None,
                timings={"export": 0.01},
            )
            rows.append(row)
            session.add(row)
            await session.flush()
        rows[0].state, rows[2].state, rows[3].state = VersionState.SUPERSEDED, VersionState.LIVE, newest
        policy.head_version_id = rows[3].id
        pointer = await session.get_one(Deployment, policy.id)
        pointer.version_id, pointer.previous_version_id, pointer.epoch = rows[2].id, rows[1].id, 2
        if newest == VersionState.TRAINED:
            adapter = harness.settings.versions_dir / "of-every-line"
            if not adapter.exists():
                make_adapter(adapter, Path(harness.settings.model))
            sha256 = hashlib.sha256((adapter / MANIFEST).read_bytes()).hexdigest()
            rows[3].adapter_path, rows[3].manifest_sha256 = str(adapter), sha256
            rows[3].probe = {"ids": [[5, 6]], "logprobs": [[logprob(rows[3].adapter_name, [5], 6)]]}
        if newest == VersionState.CANARY:
            pointer.canary_version_id, pointer.canary_share, pointer.canary_since = rows[3].id, 0.5, 1.0
        held = rows[1:3] if newest == VersionState.TRAINED else rows[1:]
        (await session.get_one(Engine, "engine-0")).loaded = [row.adapter_name for row in held if row.adapter_name]
    return name


async def state(harness: Harness, name: str) -> dict[str, Any]:
    """All that a move may change, by numbers, so that two lines can be compared."""
    async with harness.db.read() as session:
        policy = (await session.scalars(select(Policy).where(Policy.name == name))).one()
        rows = await repository.list_versions(session, policy.id)
        pointer = await session.get_one(Deployment, policy.id)
        mine = select(Audit).where(Audit.subject.startswith(f"{name}@"))
        audit = list(await session.scalars(mine.order_by(Audit.seq)))
    of: dict[str | None, int | None] = {row.id: row.number for row in rows} | {None: None}
    return {
        "versions": [(row.state, plain(row.reason)) for row in rows],
        "serving": of[pointer.version_id],
        "previous": of[pointer.previous_version_id],
        "canary": (of[pointer.canary_version_id], pointer.canary_share),
        "epoch": pointer.epoch,
        "head": of[policy.head_version_id],
        "mode": (policy.mode, policy.kl_alarms),
        "audit": [(row.action, row.subject.partition("@")[2], plain(row.reason), row.details) for row in audit],
    }


def plain(reason: str | None) -> str | None:
    """Whether a version was left behind before it was proven or just after makes no difference."""
    return None if reason is None else reason.partition(" before this one was ")[0]


def keeps_the_rules(found: dict[str, Any]) -> None:
    """What holds after any moves: one version is live, it is what the pointer names, and learning goes on from it, from
    the canary, or from one on its way home; the audit's last word on the pointer is where it points."""
    states = [state for state, _ in found["versions"]]
    assert states.count(VersionState.LIVE) == 1 and states[found["serving"]] == VersionState.LIVE, found
    ahead = (VersionState.LIVE, VersionState.CANARY, VersionState.VERIFIED, VersionState.TRAINED)
    assert states[found["head"]] in ahead, found
    assert (VersionState.CANARY in states) == (found["canary"][0] is not None), found
    pointed = [
        subject
        for action, subject, _, _ in found["audit"]
        if action in (AuditAction.DEPLOYMENT_DEPLOYED, AuditAction.DEPLOYMENT_ROLLED_BACK)
    ]
    assert pointed == [] or pointed[-1] == f"v{found['serving']}", found
    assert found["epoch"] >= 2 + len(pointed), found


async def swept(side: Side) -> None:
    """What the next sweep rings for."""
    await side.bring_home()
    await side.publish()


async def one_after_the_other(harness: Harness, newest: VersionState, moves: list[tuple[Side, str]]) -> dict[str, Any]:
    policy, told = await line(harness, newest), {}
    for number, (side, move) in enumerate(moves):
        told[number] = await MOVES[move](side, policy)
    await swept(moves[0][0])
    return await state(harness, policy) | {"told": told}


async def meeting(
    harness: Harness, newest: VersionState, first: tuple[Side, str], second: tuple[Side, str], at: int
) -> tuple[dict[str, Any], list[str]]:
    """`first` is stopped before its point number `at`. Returns how it ended, and the points that `first` came by."""
    policy = await line(harness, newest)
    others: list[asyncio.Task[str]] = []

    async def meanwhile() -> None:
        other = asyncio.ensure_future(MOVES[second[1]](second[0], policy))
        others.append(other)
        await asyncio.wait([other], timeout=PAUSE_SECONDS)

    with stopped(first[0], at, meanwhile) as passed:
        told = {0: await MOVES[first[1]](first[0], policy)}
    if others:
        told[1] = await others[0]
    await swept(first[0])
    return await state(harness, policy) | {"told": told}, passed
