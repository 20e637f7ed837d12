"""Interleave two operations on a deployment: one pauses before its N-th statement or commit while the other runs.

Each interleaving has its own policy, and must end as if the operations had run one after the other.
"""

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

from alignment.artifacts.manifest import MANIFEST
from app.core.database import Database
from app.core.settings import Settings
from app.main import create_app
from app.models import Audit, AuditAction, Deployment, Engine, Policy, Project, Version, VersionState, new_id
from app.policies import repository
from app.projects.service import create_policy
from tests.support.adapters import make_adapter
from tests.support.deployment import Harness
from tests.support.scripted_engine import logprob
from workers.release.evaluate import evaluate
from workers.release.publish import publish as publish_all

PAUSE_SECONDS = 0.05  # an operation that takes longer waits for a lock of the paused one, or runs concurrently with it
POLICY_NUMBERS = count(1)


@dataclass(frozen=True)
class Process:
    """An API process and a publisher with separate connections, so that two of them share only the database."""

    settings: Settings
    api: httpx2.AsyncClient
    db: Database
    engines: tuple[Any, ...]

    async def post(self, policy: str, path: str, **body: Any) -> str:
        answer = await self.api.post(f"/v1/policies/{policy}/{path}", json=body)
        return f"{answer.status_code} {answer.json().get('error', {}).get('code')}"

    async def publish(self) -> str:
        await publish_all(self.db, self.settings)
        return "done"

    async def evaluate(self) -> str:
        await evaluate(self.db, self.settings, "test")
        return "done"


Operation = Callable[[Process, str], Awaitable[str]]
OPERATIONS: dict[str, Operation] = {
    "evaluate": lambda process, policy: process.evaluate(),
    "publish": lambda process, policy: process.publish(),
    "roll back": lambda process, policy: process.post(policy, "rollback"),
    "roll back to v0": lambda process, policy: process.post(policy, "rollback", version=0),
    "deploy v1": lambda process, policy: process.post(policy, "deploy", version=1),
    "start v1 as a canary": lambda process, policy: process.post(policy, "deploy", version=1, share=0.5),
    "promote the canary": lambda process, policy: process.post(policy, "canary/promote"),
    "abort the canary": lambda process, policy: process.post(policy, "canary/abort"),
}


@asynccontextmanager
async def run_process(settings: Settings, key: str) -> AsyncIterator[Process]:
    app, db = create_app(settings), Database(settings.database_url)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://attune",
            headers={"authorization": f"Bearer {key}"},
        ) as api,
    ):
        yield Process(settings, api, db, (db.engine.sync_engine, app.services.get(Database).engine.sync_engine))
    await db.close()


@contextmanager
def paused_before(process: Process, at: int, meanwhile: Callable[[], Awaitable[None]]) -> Iterator[list[str]]:
    """Run `meanwhile` before the process's statement or commit number `at`.

    Yields a list that collects the statements and commits of the process.
    """
    statements: list[str] = []

    def record(statement: str) -> None:
        statements.append(statement)
        if len(statements) == at:
            await_only(meanwhile())

    def before_statement(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        record(statement)

    def before_commit(connection: Any) -> None:
        record("COMMIT")

    for engine in process.engines:
        event.listen(engine, "before_cursor_execute", before_statement)
        event.listen(engine, "commit", before_commit)
    try:
        yield statements
    finally:
        for engine in process.engines:
            event.remove(engine, "before_cursor_execute", before_statement)
            event.remove(engine, "commit", before_commit)


async def create_policy_with_versions(harness: Harness, newest: VersionState) -> str:
    """Create a policy whose v2 serves after v0 and v1, with a child v3 in the state `newest`.

    The engine has loaded all versions, but v3 only if it is verified or the canary.
    """
    name = f"policy-{next(POLICY_NUMBERS)}"
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
        deployment = await session.get_one(Deployment, policy.id)
        deployment.version_id, deployment.previous_version_id, deployment.epoch = rows[2].id, rows[1].id, 2
        if newest == VersionState.TRAINED:
            adapter = harness.settings.versions_dir / "shared-adapter"
            if not adapter.exists():
                make_adapter(adapter, Path(harness.settings.model))
            sha256 = hashlib.sha256((adapter / MANIFEST).read_bytes()).hexdigest()
            rows[3].adapter_path, rows[3].manifest_sha256 = str(adapter), sha256
            rows[3].probe = {"ids": [[5, 6]], "logprobs": [[logprob(rows[3].adapter_name, [5], 6)]]}
        if newest == VersionState.CANARY:
            deployment.canary_version_id, deployment.canary_share, deployment.canary_since = rows[3].id, 0.5, 1.0
        loaded = rows[1:3] if newest == VersionState.TRAINED else rows[1:]
        (await session.get_one(Engine, "engine-0")).loaded = [row.adapter_name for row in loaded if row.adapter_name]
    return name


async def read_state(harness: Harness, name: str) -> dict[str, Any]:
    """Return everything that an operation may change, with version numbers, so that policies can be compared."""
    async with harness.db.read() as session:
        policy = (await session.scalars(select(Policy).where(Policy.name == name))).one()
        rows = await repository.list_versions(session, policy.id)
        deployment = await session.get_one(Deployment, policy.id)
        entries = select(Audit).where(Audit.subject.startswith(f"{name}@"))
        audit = list(await session.scalars(entries.order_by(Audit.seq)))
    numbers: dict[str | None, int | None] = {row.id: row.number for row in rows} | {None: None}
    return {
        "versions": [(row.state, remove_stage(row.reason)) for row in rows],
        "serving": numbers[deployment.version_id],
        "previous": numbers[deployment.previous_version_id],
        "canary": (numbers[deployment.canary_version_id], deployment.canary_share),
        "epoch": deployment.epoch,
        "head": numbers[policy.head_version_id],
        "mode": (policy.mode, policy.kl_alarms),
        "audit": [(row.action, row.subject.partition("@")[2], remove_stage(row.reason), row.details) for row in audit],
    }


def remove_stage(reason: str | None) -> str | None:
    """Remove the stage from a reason: a version may be superseded before or after it was verified."""
    return None if reason is None else reason.partition(" before this one was ")[0]


def check_invariants(state: dict[str, Any]) -> None:
    """Check what must hold after any operations.

    One version is live, and the deployment names it. Training continues from it, from the canary, or from a version
    before its release. The last audit entry on the deployment names the serving version.
    """
    states = [version_state for version_state, _ in state["versions"]]
    assert states.count(VersionState.LIVE) == 1 and states[state["serving"]] == VersionState.LIVE, state
    possible_heads = (VersionState.LIVE, VersionState.CANARY, VersionState.VERIFIED, VersionState.TRAINED)
    assert states[state["head"]] in possible_heads, state
    assert (VersionState.CANARY in states) == (state["canary"][0] is not None), state
    deployed = [
        subject
        for action, subject, _, _ in state["audit"]
        if action in (AuditAction.DEPLOYMENT_DEPLOYED, AuditAction.DEPLOYMENT_ROLLED_BACK)
    ]
    assert deployed == [] or deployed[-1] == f"v{state['serving']}", state
    assert state["epoch"] >= 2 + len(deployed), state


async def run_due_tasks(process: Process) -> None:
    """Run the tasks that the reconciler would enqueue next."""
    await process.evaluate()
    await process.publish()


async def run_serially(harness: Harness, newest: VersionState, operations: list[tuple[Process, str]]) -> dict[str, Any]:
    """Run the operations one after the other. Return the state and the answers."""
    policy, answers = await create_policy_with_versions(harness, newest), {}
    for number, (process, operation) in enumerate(operations):
        answers[number] = await OPERATIONS[operation](process, policy)
    await run_due_tasks(operations[0][0])
    return await read_state(harness, policy) | {"answers": answers}


async def run_interleaved(
    harness: Harness, newest: VersionState, first: tuple[Process, str], second: tuple[Process, str], at: int
) -> tuple[dict[str, Any], list[str]]:
    """Run `second` before the statement number `at` of `first`. Return the state and the statements of `first`."""
    policy = await create_policy_with_versions(harness, newest)
    others: list[asyncio.Task[str]] = []

    async def meanwhile() -> None:
        other = asyncio.ensure_future(OPERATIONS[second[1]](second[0], policy))
        others.append(other)
        await asyncio.wait([other], timeout=PAUSE_SECONDS)

    with paused_before(first[0], at, meanwhile) as statements:
        answers = {0: await OPERATIONS[first[1]](first[0], policy)}
    if others:
        answers[1] = await others[0]
    await run_due_tasks(first[0])
    return await read_state(harness, policy) | {"answers": answers}, statements
