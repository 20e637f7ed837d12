"""Concurrent erasures, blocked raters and curate runs: each of them takes full effect."""

import asyncio
from collections import Counter

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.settings import Settings
from app.models import Feedback, Rater, RaterStanding, Reward, Sample, SampleState, Turn
from tests.support.deployment import Harness
from workers.curate import curate

SUBJECTS = 6
ROUNDS = 3
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace({"limits.max_long_requests": 2 * SUBJECTS})  # erasures and blocks at once


async def test_concurrent_erasures_blocks_and_curate_runs_take_effect(harness: Harness) -> None:
    settings = harness.settings.replace({"raters.trust": True, "raters.max_rater_day": 10**6})
    blocked = [f"troll-{number}" for number in range(SUBJECTS)]
    statuses: Counter[int] = Counter()
    for round in range(ROUNDS):
        turns = [
            (await harness.turn(end_user=f"user-{round}-{number}", conversation_id=f"talk-{round}-{number}")).id
            for number in range(SUBJECTS)
            for _ in range(4)
        ]
        for at, turn_id in enumerate(turns):
            for step in range(3):
                source = {"kind": "HUMAN", "id": blocked[(at + step) % SUBJECTS]}
                assert (await harness.vote(turn_id, source=source)).status_code == 201
        if round:  # in the first round the feedback is not processed yet
            await curate(harness.db, settings)
            for turn_id in turns:
                await harness.vote(turn_id, "down", source={"kind": "HUMAN", "id": blocked[0]})

        async def erase(number: int, round: int = round) -> None:
            answer = await harness.api.delete(f"/v1/subjects/user-{round}-{number}")
            statuses[answer.status_code] += 1

        async def block(name: str) -> None:
            for standing in ("quarantined", "blocked"):
                answer = await harness.api.put(f"/v1/raters/HUMAN/{name}", json={"standing": standing})
                statuses[answer.status_code] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(0, SUBJECTS, 2):
                group.create_task(erase(number))
            for name in blocked:
                group.create_task(block(name))
            for _ in range(3):
                group.create_task(curate(harness.db, settings))
    while await curate(harness.db, settings):
        pass

    assert set(statuses) == {200}, statuses
    raters = {row.name: row.standing for row in await harness.all(Rater)}
    assert {raters[f"HUMAN/{name}"] for name in blocked} == {RaterStanding.BLOCKED}
    stored_turns = await harness.all(Turn)
    erased = {turn.id for turn in stored_turns if turn.deleted_at is not None}
    assert len(erased) == ROUNDS * SUBJECTS // 2 * 4
    assert not [row for row in await harness.all(Feedback) if row.turn_id in erased and row.comment is not None]
    assert not [row for row in await harness.all(Reward) if row.turn_id in erased]
    assert all(row.weight == 0 for row in await harness.all(Reward)), "every rater is blocked"
    assert not [
        row for row in await harness.all(Sample) if row.state == SampleState.QUARANTINED and row.turn_id in erased
    ]
    open_turn_ids = [row.turn_id for row in await harness.all(Sample) if row.state == SampleState.OPEN]
    assert not set(open_turn_ids) & erased


async def test_two_deadlocked_transactions_are_both_committed(db: Database, harness: Harness) -> None:
    if db.embedded:
        pytest.skip("SQLite has one writer and cannot deadlock")
    one, other = (await harness.turn()).id, (await harness.turn()).id
    both_locked, tries = asyncio.Barrier(2), Counter[str]()

    async def write(session: AsyncSession, first: str, second: str) -> None:
        tries[first] += 1
        for id in (first, second):
            turn = (await session.scalars(select(Turn).where(Turn.id == id).with_for_update())).one()
            turn.request_metadata = {**turn.request_metadata, first: "was here"}
            await session.flush()
            if id == first and sum(tries.values()) <= 2:
                await both_locked.wait()

    await asyncio.gather(
        db.retry_on_deadlock(lambda session: write(session, one, other)),
        db.retry_on_deadlock(lambda session: write(session, other, one)),
    )
    assert sum(tries.values()) == 3, "one of the transactions was retried"
    assert [set(turn.request_metadata) for turn in await harness.all(Turn)] == [{one, other}] * 2


async def test_only_deadlocks_are_retried(db: Database) -> None:
    tries = 0

    async def work(session: AsyncSession) -> None:
        nonlocal tries
        tries += 1
        raise OperationalError("SELECT", {}, Exception("the server closed the connection"))

    with pytest.raises(OperationalError):
        await db.retry_on_deadlock(work)
    assert tries == 1
