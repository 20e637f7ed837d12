"""A PostgreSQL that accepts and never answers, has gone without a word, or keeps a lock for ever: requests end in time
with a 503, nothing is acknowledged that is not on record, and everything goes on afterwards."""

import asyncio
import os
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from sqlalchemy import make_url, select, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

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
SECONDS = 1.0  # that a request waits for the database's word
FAULT_SECONDS = 20.0 if FULL else 6.0  # longer than any bound
# Once in line for a connection, once for a connection to be made, once for a word; of a thumb, behind one like it. And
# what a machine with other things to do may add: who hangs until the fault is mended is told by the missing 503.
LATEST = 2 * (SECONDS + GRACE_SECONDS) + CONNECT_SECONDS + SECONDS + 20.0
BACK_SECONDS = 60.0
LEASE_SECONDS = 12.0
FAULTS = ("stall", "half_open", "refuse") if FULL else ("stall", "half_open")
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True),
]


@dataclass
class Load:
    """Chats and thumbs, each under an id of its own that is sent until it is answered."""

    api: httpx2.AsyncClient
    over: bool = False
    statuses: Counter[str] = field(default_factory=Counter)
    acked: dict[str, str] = field(default_factory=dict)
    chats: set[str] = field(default_factory=set)
    latest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    async def chat(self) -> None:
        while not self.over:
            answer = await self._post(
                "/v1/chat/completions", {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
            )
            if answer is not None and answer.status_code == 200:
                self.chats.add(answer.json()["id"])

    async def thumb(self, turns: list[str], who: int) -> None:
        number = 0
        while not self.over:
            number += 1
            turn, id = turns[number % len(turns)], f"thumb-{who}-{number}"
            while not self.over:
                answer = await self._post(
                    "/v1/feedback", {"id": id, "completion_id": turn, "kind": "binary", "value": True}
                )
                if answer is not None and answer.status_code in (200, 201):
                    self.acked[id] = turn
                    break

    async def _post(self, path: str, body: dict[str, Any]) -> httpx2.Response | None:
        began = time.monotonic()
        answer = await self.api.post(path, json=body)
        self.latest = max(self.latest, time.monotonic() - began)
        self.statuses[f"{path.split('/')[2]} {answer.status_code}"] += 1
        if answer.status_code == 503:
            error = answer.json()["error"]
            if error["code"] != "database_unavailable" or "retry-after" not in answer.headers:
                self.wrong.append(answer.text)
            await asyncio.sleep(0.05)
        elif answer.status_code not in (200, 201):
            self.wrong.append(f"{answer.status_code} {answer.text[:300]}")
        return answer


@pytest.fixture
def behind(harness: Harness, door: Proxy) -> Settings:
    """The same deployment, whose way to its database leads through that door."""
    url = make_url(harness.settings.database).set(host="127.0.0.1", port=door.port)
    return harness.settings.model_copy(
        update={
            "database_url": url.render_as_string(hide_password=False),
            "database_seconds": SECONDS,
            "database_job_seconds": SECONDS,
            "requests_per_minute": 10**6,
        }
    )


@pytest.mark.parametrize("fault", FAULTS)
async def test_requests_time_out_and_nothing_acknowledged_is_lost(
    harness: Harness, scripted: ScriptedEngine, door: Proxy, behind: Settings, fault: str
) -> None:
    turns = [(await harness.turn()).id for _ in range(4)]
    app = create_app(behind)
    headers = {"authorization": f"Bearer {harness.key}"}
    with serve(app, lifespan="on") as url:
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as api:
            load = Load(api)
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(load.chat())
                for who in range(8):
                    group.create_task(load.thumb(turns, who))
                await asyncio.sleep(1)
                before, load.latest = Counter(load.statuses), 0.0
                await make(door, fault)
                await asyncio.sleep(FAULT_SECONDS)
                during = load.statuses - before
                await door.mend()
                back = await first_good(load)
                await asyncio.sleep(1)
                load.over = True
        async with asyncio.timeout(60):  # nothing is in the pools' hands that nobody gave back
            while (
                app.services.get(Database).engine.pool.checkedout()
                or app.services.get(Database)._sync.pool.checkedout()
            ):
                await asyncio.sleep(0.05)

    print(
        f"\n{fault}, {FAULT_SECONDS:.0f} s: {dict(during)}, latest {load.latest:.1f} s, back in {back:.1f} s, ", end=""
    )
    said = {row.idempotency_key: row.turn_id for row in await harness.all(Feedback)}
    lost = [id for id, turn in load.acked.items() if said.get(id) != turn]
    print(f"{len(load.acked)} acknowledged, {len(lost)} lost")
    assert load.wrong == []
    assert lost == []
    assert load.chats <= {turn.id for turn in await harness.all(Turn)}
    assert during["chat 503"] and during["feedback 503"], "they were told, and did not hang"
    assert load.latest < LATEST
    assert back < BACK_SECONDS


async def make(door: Proxy, fault: str) -> None:
    if fault == "stall":
        door.stall()
    elif fault == "half_open":
        await door.half_open()
    else:
        await door.refuse()


async def first_good(load: Load) -> float:
    """Until a chat and a thumb are answered well again."""
    began, before = time.monotonic(), (len(load.chats), len(load.acked))
    while not (len(load.chats) > before[0] and len(load.acked) > before[1]):
        assert time.monotonic() - began < BACK_SECONDS, load.statuses
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("fault", FAULTS)
async def test_worker_gives_up_a_silent_database_and_continues_later(
    harness: Harness, door: Proxy, behind: Settings, fault: str
) -> None:
    turn = await harness.turn()
    db = Database(behind.database, seconds=SECONDS)
    try:
        assert await curate(db, behind) == 0
        await harness.thumb(turn.id)
        await make(door, fault)
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(SQLAlchemyError):
                await curate(db, behind)
            assert time.monotonic() - began < LATEST
        await door.mend()
        began = time.monotonic()
        assert await curate(db, behind) == 1
        assert time.monotonic() - began < LATEST
        assert db.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    finally:
        await db.close()


async def test_lease_survives_a_heartbeat_without_an_answer(harness: Harness, door: Proxy, behind: Settings) -> None:
    head = await harness.serving()
    async with harness.db.write() as session:
        session.add(
            Batch(id="bat-1", policy_id=head.policy_id, parent_id=head.id, state=BatchState.OPEN, num_samples=0)
        )
    db = Database(behind.database)  # whose own patience is far longer than the lease
    try:
        async with db.write() as session:
            fence = await leases.claim(session, Batch, "bat-1", owner="me", seconds=LEASE_SECONDS, states=("open",))
        assert fence is not None
        async with leases.keep_renewed(db, Batch, "bat-1", fence=fence, seconds=LEASE_SECONDS):
            first = await beaten(harness, None)
            await door.half_open()
            await asyncio.sleep(LEASE_SECONDS / 4 + 1)  # the next one is on its way, and is not heard
            await door.mend()
            await beaten(harness, first)
    finally:
        await db.close()


async def beaten(harness: Harness, before: float | None) -> float:
    """When a beat came after that one. Until then nobody else can have the batch, who tries all the time."""
    claimed = (await harness.get(Batch, "bat-1")).heartbeat_at if before is None else before
    async with asyncio.timeout(60):
        while True:
            async with harness.db.write() as session:
                stolen = await leases.claim(session, Batch, "bat-1", owner="other", seconds=60.0, states=("open",))
            assert stolen is None, "the next beat came too late"
            beat: float = (await harness.get(Batch, "bat-1")).heartbeat_at
            if beat > claimed:
                return beat
            await asyncio.sleep(0.05)


async def test_lock_timeout_fails_the_request_and_keeps_the_connection(harness: Harness, behind: Settings) -> None:
    turn = await harness.turn()
    db = Database(behind.database, seconds=SECONDS)
    try:
        async with db.read() as session:
            pid = await session.scalar(text("SELECT pg_backend_pid()"))
        async with harness.db.write() as keeper:
            await keeper.scalar(select(Turn.id).where(Turn.id == turn.id).with_for_update())
            began = time.monotonic()
            with pytest.raises(OperationalError, match="lock timeout"):
                async with db.write() as session:
                    await session.scalar(select(Turn.id).where(Turn.id == turn.id).with_for_update())
            assert time.monotonic() - began < LATEST
        async with db.read() as session:
            assert await session.scalar(text("SELECT pg_backend_pid()")) == pid
    finally:
        await db.close()


async def test_idle_transaction_loses_its_locks(harness: Harness, behind: Settings) -> None:
    turn = await harness.turn()
    db = Database(behind.database, seconds=SECONDS)
    try:
        with pytest.raises(SQLAlchemyError):
            async with db.write() as silent:
                await silent.scalar(select(Turn.id).where(Turn.id == turn.id).with_for_update())
                async with harness.db.write() as session, asyncio.timeout(40):
                    await session.scalar(select(Turn.id).where(Turn.id == turn.id).with_for_update())
                await silent.scalar(select(Turn.id))
    finally:
        await db.close()


async def test_long_queries_are_not_cut_and_take_no_request_connection(harness: Harness, behind: Settings) -> None:
    db = Database(behind.database, seconds=SECONDS)
    try:
        async with db.without_timeout.read() as session:
            await session.execute(text("SELECT pg_sleep(:long)"), {"long": SECONDS + GRACE_SECONDS + 1})
        with pytest.raises(OperationalError, match="statement timeout"):
            async with db.read() as session:
                await session.execute(text("SELECT pg_sleep(:long)"), {"long": SECONDS + GRACE_SECONDS + 1})
        assert db.without_timeout.engine.pool is not db.engine.pool
    finally:
        await db.close()


async def test_exhausted_pool_is_503(harness: Harness, behind: Settings) -> None:
    app = create_app(behind)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app),
            base_url="http://attune",
            headers={"authorization": f"Bearer {harness.key}"},
        ) as api,
    ):
        async with AsyncExitStack() as taken:
            pool = app.services.get(Database).engine.pool
            for _ in range(pool.size() + pool._max_overflow):
                await taken.enter_async_context(app.services.get(Database).engine.connect())
            began = time.monotonic()
            answer = await api.get("/v1/policies")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
            assert answer.headers["retry-after"] and time.monotonic() - began < LATEST
        assert (await api.get("/v1/policies")).status_code == 200
