"""The ends of episodes: found again by the reconciler, and processed once for a group."""

import pytest
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import Episode, Feedback, Turn
from tests.support import episodes
from tests.support.attempts import attempt, compare
from tests.support.deployment import Harness
from workers import reconcile
from workers.curate import curate
from workers.feedback import ended_episodes


async def test_reconciler_finds_an_end_that_nobody_has_processed(harness: Harness) -> None:
    compare(harness)
    await attempt(harness, 1, 1.0)
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        await session.execute(update(Feedback).values(processed=True))
        await session.execute(update(Turn).values(processed=True))
    async with harness.db.read() as session:
        assert "curate" not in await reconcile._tasks_with_work(session, harness.settings)
    async with harness.db.write() as session:
        await session.execute(update(Episode).values(processed=False))
    async with harness.db.read() as session:
        assert "curate" in await reconcile._tasks_with_work(session, harness.settings)


async def test_end_whose_rows_another_transaction_wrote_is_processed_later(harness: Harness) -> None:
    compare(harness)
    episode = await attempt(harness, 1)
    await episodes.end(harness, episode["id"])

    async def fail(session: AsyncSession, *args: object) -> None:
        raise IntegrityError("INSERT", {}, Exception("samples_pkey"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ended_episodes, "update_turn_samples", fail)
        await curate(harness.db, harness.settings)
    assert [row.processed for row in await harness.all(Episode)] == [False]
    await curate(harness.db, harness.settings)
    assert [row.processed for row in await harness.all(Episode)] == [True]


async def test_ends_of_a_group_are_processed_together(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(harness)
    for _ in range(4):
        await attempt(harness, 2, 1.0)
    await attempt(harness, 1, 1.0, group=None)
    processed: list[int] = []
    process_ends = ended_episodes.process_ends

    async def record(session: AsyncSession, ids: list[str], settings: object) -> None:
        processed.append(len(ids))
        await process_ends(session, ids, harness.settings)

    monkeypatch.setattr(ended_episodes, "process_ends", record)
    await curate(harness.db, harness.settings)
    assert processed == [4]
    assert {row.processed for row in await harness.all(Episode)} == {True}
