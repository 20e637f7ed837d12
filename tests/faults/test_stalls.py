"""A PostgreSQL that does not respond, has closed connections silently, or holds a lock forever.

Requests end in time with a 503, all acknowledged feedback is stored, and everything works afterwards.
"""

import asyncio
import os
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from sqlalchemy import Engine, QueuePool, make_url, select, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core import leases
from app.core.database import Database
from app.core.db_timeouts import CONNECT_SECONDS, GRACE_SECONDS
from app.core.settings import Settings
from app.main import create_app
from app.models import Batch, BatchState, Feedback, Turn
from tests.faults.suite.proxy import Proxy
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine, serve
from workers.curate import curate

FULL = os.environ.get("ATTUNE_FULL") == "1"
SECONDS = 1.0  # the time that a request waits for a response of the database
FAULT_SECONDS = 20.0 if FULL else 6.0  # longer than any time-out
# A request waits for a connection, connects, and waits for a response. Feedback also waits for the request before it.
# The rest is for a loaded machine; the missing 503 shows a request that hangs until the fault ends.
MAX_REQUEST_SECONDS = 2 * (SECONDS + GRACE_SECONDS) + CONNECT_SECONDS + SECONDS + 20.0
RECOVERY_SECONDS = 60.0
LEASE_SECONDS = 12.0
FAULTS = ("stall", "half_open", "refuse") if FULL else ("stall", "half_open")
pytestmark = [
    pytest.mark.slow,  # that requests end in time is what these tests are about
    pytest.mark.timeout(400),
    pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True),
]


def queue_pool(engine: AsyncEngine | Engine) -> QueuePool:
    """Return the engine's connection pool, whose connections can be counted."""
    assert isinstance(engine.pool, QueuePool)
    return engine.pool


@dataclass
class Load:
    """Chats and feedback; each request is repeated until it is acknowledged."""

    api: httpx2.AsyncClient
    is_over: bool = False
    statuses: Counter[str] = field(default_factory=Counter)
    acknowledged: dict[str, str] = field(default_factory=dict)
    chats: set[str] = field(default_factory=set)
    longest_seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    async def chat(self) -> None:
        while not self.is_over:
            answer = await self._post(
                "/v1/chat/completions", {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
            )
            if answer is not None and answer.status_code == 200:
                self.chats.add(answer.json()["id"])

    async def give_feedback(self, turns: list[str], user: int) -> None:
        number = 0
        while not self.is_over:
            number += 1
            turn, id = turns[number % len(turns)], f"feedback-{user}-{number}"
            while not self.is_over:
                answer = await self._post(
                    "/v1/feedback", {"id": id, "completion_id": turn, "kind": "binary", "value": True}
                )
                if answer is not None and answer.status_code in (200, 201):
                    self.acknowledged[id] = turn
                    break

    async def _post(self, path: str, body: dict[str, Any]) -> httpx2.Response | None:
        began = time.monotonic()
        answer = await self.api.post(path, json=body)
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
        self.statuses[f"{path.split('/')[2]} {answer.status_code}"] += 1
        if answer.status_code == 503:
            error = answer.json()["error"]
            if error["code"] != "database_unavailable" or "retry-after" not in answer.headers:
                self.errors.append(answer.text)
            await asyncio.sleep(0.05)
        elif answer.status_code not in (200, 201):
            self.errors.append(f"{answer.status_code} {answer.text[:300]}")
        return answer


@pytest.fixture
def proxied(harness: Harness, proxy: Proxy) -> Settings:
    """Return the settings of the same deployment, with the database behind the proxy."""
    url = make_url(harness.settings.database_url).set(host="127.0.0.1", port=proxy.port)
    return harness.settings.replace(
        {
            "database.url": url.render_as_string(hide_password=False),
            "database.request_timeout_seconds": SECONDS,
            "database.job_timeout_seconds": SECONDS,
            "limits.requests_per_minute": 10**6,
        }
    )


@pytest.mark.parametrize("fault", FAULTS)
async def test_requests_time_out_and_nothing_acknowledged_is_lost(
    harness: Harness, scripted: ScriptedEngine, proxy: Proxy, proxied: Settings, fault: str
) -> None:
    turns = [(await harness.turn()).id for _ in range(4)]
    app = create_app(proxied)
    headers = {"authorization": f"Bearer {harness.key}"}
    with serve(app, lifespan="on") as url:
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as api:
            load = Load(api)
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(load.chat())
                for user in range(8):
                    group.create_task(load.give_feedback(turns, user))
                await asyncio.sleep(1)
                before, load.longest_seconds = Counter(load.statuses), 0.0
                await start_fault(proxy, fault)
                # Every chat of before may be at its end, which is retried for longer than the fault lasts: these
                # begin during the fault.
                for _ in range(4):
                    group.create_task(load.chat())
                await asyncio.sleep(FAULT_SECONDS)
                during = load.statuses - before
                await proxy.restore()
                recovery_seconds = await wait_for_recovery(load)
                await asyncio.sleep(1)
                load.is_over = True
        async with asyncio.timeout(60):  # every connection is returned to its pool
            database = app.services.get(Database)
            while any(queue_pool(engine).checkedout() for engine in (database.engine, database._sync)):
                await asyncio.sleep(0.05)

    print(f"\n{fault}, {FAULT_SECONDS:.0f} s: {dict(during)}, longest {load.longest_seconds:.1f} s,", end=" ")
    stored = {row.idempotency_key: row.turn_id for row in await harness.all(Feedback)}
    lost = [id for id, turn in load.acknowledged.items() if stored.get(id) != turn]
    print(f"recovered in {recovery_seconds:.1f} s, {len(load.acknowledged)} acknowledged, {len(lost)} lost")
    assert load.errors == []
    assert lost == []
    assert load.chats <= {turn.id for turn in await harness.all(Turn)}
    assert during["chat 503"] and during["feedback 503"], "requests get a 503 and do not hang"
    assert load.longest_seconds < MAX_REQUEST_SECONDS
    assert recovery_seconds < RECOVERY_SECONDS


async def start_fault(proxy: Proxy, fault: str) -> None:
    if fault == "stall":
        proxy.stall()
    elif fault == "half_open":
        await proxy.half_open()
    else:
        await proxy.refuse()


async def wait_for_recovery(load: Load) -> float:
    """Return the seconds until a chat and a feedback are acknowledged again."""
    began, before = time.monotonic(), (len(load.chats), len(load.acknowledged))
    while not (len(load.chats) > before[0] and len(load.acknowledged) > before[1]):
        assert time.monotonic() - began < RECOVERY_SECONDS, load.statuses
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("fault", FAULTS)
async def test_worker_gives_up_a_silent_database_and_continues_later(
    harness: Harness, proxy: Proxy, proxied: Settings, fault: str
) -> None:
    turn = await harness.turn()
    db = Database(proxied.database_url, seconds=SECONDS)
    try:
        assert await curate(db, proxied) == 0
        await harness.vote(turn.id)
        await start_fault(proxy, fault)
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(SQLAlchemyError):
                await curate(db, proxied)
            assert time.monotonic() - began < MAX_REQUEST_SECONDS
        await proxy.restore()
        began = time.monotonic()
        assert await curate(db, proxied) == 1
        assert time.monotonic() - began < MAX_REQUEST_SECONDS
        assert queue_pool(db.engine).checkedout() == 0
    finally:
        await db.close()


async def test_lease_survives_a_heartbeat_without_a_response(harness: Harness, proxy: Proxy, proxied: Settings) -> None:
    head = await harness.serving()
    async with harness.db.write() as session:
        session.add(
            Batch(id="bat-1", policy_id=head.policy_id, parent_id=head.id, state=BatchState.OPEN, num_samples=0)
        )
    db = Database(proxied.database_url)  # the default time-outs are far longer than the lease
    try:
        async with db.write() as session:
            fence = await leases.claim(session, Batch, "bat-1", owner="me", seconds=LEASE_SECONDS, states=("open",))
        assert fence is not None
        async with leases.keep_renewed(db, Batch, "bat-1", fence=fence, seconds=LEASE_SECONDS):
            first = await wait_for_heartbeat(harness, None)
            await proxy.half_open()
            await asyncio.sleep(LEASE_SECONDS / 4 + 1)  # the next heartbeat is sent and gets no response
            await proxy.restore()
            await wait_for_heartbeat(harness, first)
    finally:
        await db.close()


async def wait_for_heartbeat(harness: Harness, before: float | None) -> float:
    """Return the time of the next heartbeat. Until then another owner tries to claim the batch, and cannot."""
    last = (await harness.get(Batch, "bat-1")).heartbeat_at if before is None else before
    async with asyncio.timeout(60):
        while True:
            async with harness.db.write() as session:
                other_fence = await leases.claim(session, Batch, "bat-1", owner="other", seconds=60.0, states=("open",))
            assert other_fence is None, "the next heartbeat came too late"
            heartbeat: float = (await harness.get(Batch, "bat-1")).heartbeat_at
            if heartbeat > last:
                return heartbeat
            await asyncio.sleep(0.05)


async def test_lock_timeout_fails_the_request_and_keeps_the_connection(harness: Harness, proxied: Settings) -> None:
    turn = await harness.turn()
    db = Database(proxied.database_url, seconds=SECONDS)
    try:
        async with db.read() as session:
            pid = await session.scalar(text("SELECT pg_backend_pid()"))
        async with harness.db.write() as holder:
            await holder.scalar(select(Turn.id).where(Turn.id == turn.id).with_for_update())
            began = time.monotonic()
            with pytest.raises(OperationalError, match="lock timeout"):
                async with db.write() as session:
                    await session.scalar(select(Turn.id).where(Turn.id == turn.id).with_for_update())
            assert time.monotonic() - began < MAX_REQUEST_SECONDS
        async with db.read() as session:
            assert await session.scalar(text("SELECT pg_backend_pid()")) == pid
    finally:
        await db.close()


async def test_idle_transaction_loses_its_locks(harness: Harness, proxied: Settings) -> None:
    turn = await harness.turn()
    db = Database(proxied.database_url, seconds=SECONDS)
    try:
        with pytest.raises(SQLAlchemyError):
            async with db.write() as idle:
                await idle.scalar(select(Turn.id).where(Turn.id == turn.id).with_for_update())
                async with harness.db.write() as session, asyncio.timeout(40):
                    await session.scalar(select(Turn.id).where(Turn.id == turn.id).with_for_update())
                await idle.scalar(select(Turn.id))
    finally:
        await db.close()


async def test_long_queries_have_no_timeout_and_take_no_request_connection(harness: Harness, proxied: Settings) -> None:
    db = Database(proxied.database_url, seconds=SECONDS)
    try:
        async with db.with_long_timeout.read() as session:
            await session.execute(text("SELECT pg_sleep(:seconds)"), {"seconds": SECONDS + GRACE_SECONDS + 1})
        with pytest.raises(OperationalError, match="statement timeout"):
            async with db.read() as session:
                await session.execute(text("SELECT pg_sleep(:seconds)"), {"seconds": SECONDS + GRACE_SECONDS + 1})
        assert db.with_long_timeout.engine.pool is not db.engine.pool
    finally:
        await db.close()


async def test_exhausted_pool_is_503(harness: Harness, proxied: Settings) -> None:
    app = create_app(proxied)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app),
            base_url="http://attune",
            headers={"authorization": f"Bearer {harness.key}"},
        ) as api,
    ):
        async with AsyncExitStack() as connections:
            pool = queue_pool(app.services.get(Database).engine)
            for _ in range(pool.size() + pool._max_overflow):
                await connections.enter_async_context(app.services.get(Database).engine.connect())
            began = time.monotonic()
            answer = await api.get("/v1/policies")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
            assert answer.headers["retry-after"] and time.monotonic() - began < MAX_REQUEST_SECONDS
        assert (await api.get("/v1/policies")).status_code == 200
