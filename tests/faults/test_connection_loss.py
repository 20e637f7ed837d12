"""The database connection is lost during a deployment change: before a statement, the commit, or its response."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from sqlalchemy import make_url, update
from sqlalchemy.exc import SQLAlchemyError

from app.models import Version, VersionState
from tests.faults.interleavings import (
    OPERATIONS,
    Process,
    check_invariants,
    create_policy_with_versions,
    paused_before,
    read_state,
    run_process,
)
from tests.faults.suite.proxy import Proxy
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

DONE = ("200 None", "done")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True),
]


@pytest.fixture
async def process(harness: Harness, scripted: ScriptedEngine, proxy: Proxy) -> AsyncIterator[Process]:
    """An API process and a publisher that reach the database through the proxy."""
    url = make_url(harness.settings.database_url).set(host="127.0.0.1", port=proxy.port)
    settings = harness.settings.replace({"database.url": url.render_as_string(hide_password=False)})
    async with run_process(settings, harness.key) as process:
        yield process


@pytest.mark.parametrize("operation", ["evaluate", "publish", "roll back to v0", "deploy v1"])
@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.slow
async def test_operation_with_a_lost_connection_is_atomic_and_can_be_retried(
    harness: Harness, proxy: Proxy, process: Process, operation: str, lost: str
) -> None:
    async def cut_connection() -> None:
        if lost == "request":
            await proxy.refuse()
        else:
            proxy.drop_answers()

    newest = VersionState.TRAINED if operation == "evaluate" else VersionState.VERIFIED
    policy = await create_policy_with_versions(harness, newest)
    before = await read_state(harness, policy)
    await OPERATIONS[operation](process, policy)
    after = await read_state(harness, policy)
    at, commits, counts = 1, 0, [0, 0]
    while True:
        policy = await create_policy_with_versions(harness, newest)
        with paused_before(process, at, cut_connection) as statements:
            answer = await attempt(process, operation, policy)
        if len(statements) < at and answer in DONE:
            if commits:
                break
            at = 1  # cached queries shifted the statement numbers, and no commit was cut: start again
            continue
        if len(statements) < at:
            continue  # the pool gave a connection that an earlier cut had closed: try again
        where = f"{lost} lost at {statements[at - 1]!r}, statement {at} of {operation!r}"
        state = await read_committed_state(harness, policy, before)
        check_invariants(state)
        assert state in (before, after), where
        assert answer not in DONE or state == after, f"{where}: acknowledged, but not done"
        if state != before:
            assert statements[at - 1] == "COMMIT" or "COMMIT" in statements[: at - 1], where
        commits += statements[at - 1] == "COMMIT"
        counts[state == after] += 1
        await proxy.restore()
        async with asyncio.timeout(30):  # the reconciler enqueues the task again, and a client retries
            while await attempt(process, operation, policy) not in DONE or await read_state(harness, policy) != after:
                await expire_leases(harness)
                await asyncio.sleep(0.05)
        at += 1
    print(f"\n{operation}, {lost} lost: {at - 1} statements, {commits} commits; undone {counts[0]}, done {counts[1]}")
    assert commits >= 1 and counts[0] and (counts[1] or lost == "request")


async def expire_leases(harness: Harness) -> None:
    """Expire the leases of a process that lost its connection."""
    async with harness.db.write() as session:
        await session.execute(update(Version).values(lease_until=0.0))


async def attempt(process: Process, operation: str, policy: str) -> str:
    with suppress(SQLAlchemyError):
        return await OPERATIONS[operation](process, policy)
    return "the publisher's task failed"


async def read_committed_state(harness: Harness, policy: str, before: dict[str, object]) -> dict[str, object]:
    """Return the state once a COMMIT that was sent has had time to take effect."""
    state = await read_state(harness, policy)
    for _ in range(4):
        if state != before:
            break
        await asyncio.sleep(0.02)
        state = await read_state(harness, policy)
    return state
