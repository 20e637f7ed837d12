"""Samples that wait are counted as totals and by what has changed since. Work is counted, not time."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import func, select, text, update

from app.models import (
    COUNTED_STATES,
    IS_MISCOUNTED,
    Batch,
    BatchState,
    Feedback,
    Sample,
    SampleRule,
    SampleState,
    SampleTotal,
    Turn,
)
from app.policies.locks import lock_policy
from app.training import batch_samples, sample_totals
from tests.support.deployment import Harness
from tests.support.statement_work import count_work
from tests.support.trained_versions import create_version
from tests.support.waiting_samples import add_samples, analyze
from workers.curate import curate
from workers.database_metrics import read_metrics
from workers.training.assemble import assemble

FEW, MANY = 500, 2500
LONG_AGO = {"changed_at": Sample.changed_at - 2 * sample_totals.MIN_AGE_SECONDS}


async def count(harness: Harness) -> int:
    """Count the samples into totals as a minute later, until none is left; return how many were counted."""
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(LONG_AGO))
    total = 0
    while counted := await sample_totals.count_miscounted(harness.db):
        total += counted
    return total


async def check(harness: Harness) -> dict[SampleState, int]:
    """Return the samples that wait by state. Their numbers must be those of the rows, and the totals too."""
    policy = await harness.policy()
    async with harness.db.read() as session:
        counts = await sample_totals.count_waiting(session, [policy.id])
    samples = await harness.all(Sample)
    assert {state: number for (_, state), number in counts.items()} == Counter(
        sample.state for sample in samples if sample.state in sample_totals.WAITING_STATES
    )
    totals = {row.state: row.num_samples for row in await harness.all(SampleTotal) if row.num_samples}
    assert totals == Counter(sample.counted_state for sample in samples if sample.counted_state)
    return {state: number for (_, state), number in counts.items()}


async def test_samples_are_counted_a_minute_after_their_last_change(harness: Harness) -> None:
    await add_samples(harness, 3, lambda number: 1.0)
    assert await sample_totals.count_miscounted(harness.db) == 0
    assert await check(harness) == {"open": 3}
    assert await count(harness) == 3 and await count(harness) == 0
    assert await check(harness) == {"open": 3}


async def test_a_sample_in_another_state_is_counted_there(harness: Harness) -> None:
    await add_samples(harness, 4, lambda number: 1.0)
    await count(harness)
    states = [SampleState.QUARANTINED, SampleState.BATCHED, SampleState.TRAINED]
    async with harness.db.write() as session:
        for turn_id, state in zip(sorted(row.turn_id for row in await harness.all(Sample)), states, strict=False):
            await session.execute(update(Sample).where(Sample.turn_id == turn_id).values(state=state))
    assert await check(harness) == {"open": 1, "quarantined": 1, "batched": 1}
    assert await count(harness) == 3
    assert await check(harness) == {"open": 1, "quarantined": 1, "batched": 1}


async def test_samples_are_counted_in_steps_and_by_several_processes(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_totals, "COUNT_STEP", 7)
    await add_samples(harness, 40, lambda number: 1.0)
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(LONG_AGO))

    async def count_all() -> int:
        total = 0
        while counted := await sample_totals.count_miscounted(harness.db):
            total += counted
        return total

    assert sum(await asyncio.gather(count_all(), count_all(), count_all())) == 40
    assert await check(harness) == {"open": 40}


async def test_samples_that_are_counted_are_nothing_new_to_the_assembly(harness: Harness) -> None:
    await add_samples(harness, 3, lambda number: 1.0)
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(changed_at=5.0))
    assert await sample_totals.count_miscounted(harness.db) == 3
    assert [row.changed_at for row in await harness.all(Sample)] == [5.0] * 3


@pytest.mark.parametrize("seed", range(3))
async def test_counts_are_those_of_the_rows_after_any_series_of_acts(harness: Harness, seed: int) -> None:
    chance = random.Random(seed)
    harness.settings = harness.settings.replace({"trainer.batch_size": 4, "trainer.min_batch_size": 2})

    async def pick_turn() -> Turn | None:
        turns = [turn for turn in await harness.all(Turn) if turn.deleted_at is None]
        return chance.choice(turns) if turns else None

    async def chat_and_vote() -> None:
        turn = await harness.turn(conversation_id=f"c-{chance.randrange(3)}")
        await vote_on(turn)

    async def vote_on(turn: Turn | None) -> None:
        if turn is not None:
            source = {"id": f"p-{chance.randrange(3)}"}
            await harness.vote(turn.id, chance.choice(("up", "down")), source=source)

    async def replace() -> None:
        await vote_on(await pick_turn())

    async def withdraw() -> None:
        votes = [row for row in await harness.all(Feedback) if row.kind == "binary"]
        if votes:
            await harness.api.delete(f"/v1/feedback/{chance.choice(votes).id}")

    async def erase() -> None:
        if (turn := await pick_turn()) is not None:
            await harness.api.delete(f"/v1/chat/completions/{turn.id}")

    async def freeze() -> None:
        await assemble(harness.db, harness.settings)

    async def end_batch() -> None:
        batches = [row for row in await harness.all(Batch) if row.state == BatchState.OPEN]
        if batches:
            async with harness.db.write() as session:
                batch = await session.get_one(Batch, batches[0].id)
                locked = await lock_policy(session, batch.policy_id)
                batch.state = BatchState.FAILED
                await session.flush()
                await batch_samples.return_samples(locked, [batch.id], batch_samples.UNDONE)

    async def learn_and_undo() -> None:
        open_turns = [row.turn_id for row in await harness.all(Sample) if row.state == SampleState.OPEN]
        if open_turns:
            version = await create_version(harness, *[await harness.get(Turn, id) for id in open_turns[:2]])
            async with harness.db.write() as session:
                reasons = {version.batch_id or "": "people judged it"}
                locked = await lock_policy(session, version.policy_id)
                await batch_samples.drop_trained(locked, reasons, SampleRule.ROLLED_BACK)

    async def quarantine() -> None:
        samples = [row.turn_id for row in await harness.all(Sample) if row.state in COUNTED_STATES]
        if samples:
            is_chosen = Sample.turn_id == chance.choice(samples)
            async with harness.db.write() as session:
                state = chance.choice(COUNTED_STATES)
                await session.execute(update(Sample).where(is_chosen).values(state=state))

    async def curate_all() -> None:
        await curate(harness.db, harness.settings)

    async def count_some() -> None:
        async with harness.db.write() as session:
            await session.execute(update(Sample).values(LONG_AGO))
        await sample_totals.count_miscounted(harness.db)

    acts: list[Callable[[], Awaitable[None]]] = [
        replace,
        withdraw,
        erase,
        freeze,
        end_batch,
        learn_and_undo,
        quarantine,
    ]
    acts += [chat_and_vote, curate_all, count_some] * 3
    for _ in range(60):
        await chance.choice(acts)()
        await check(harness)
    await count(harness)
    async with harness.db.read() as session:
        is_miscounted = text(IS_MISCOUNTED)
        assert await session.scalar(select(func.count()).select_from(Sample).where(is_miscounted)) == 0
    await check(harness)


@pytest.mark.parametrize("page", ["/v1/status", "metrics of the workers"])
async def test_pages_cost_the_same_however_many_samples_wait(
    harness: Harness, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest rows are left out: their number is bounded."""
    monkeypatch.setattr("app.ops.status.MAX_ROWS", 10)

    async def read() -> None:
        if page.startswith("/"):
            assert (await harness.api.get(page)).json()["samples"] == {"open": number_of_samples}
            return
        async with harness.db.read() as session:
            [samples] = [one for one in await read_metrics(session, harness.settings) if one.name == "attune_samples"]
        assert max(sample.value for sample in samples.samples) == number_of_samples

    amounts, number_of_samples = [], 0
    for prefix, added in (("a", FEW), ("b", MANY - FEW)):
        await add_samples(harness, added, lambda number: 1.0, prefix)
        number_of_samples += added
        await count(harness)
        await analyze(harness)
        await read()
        async with count_work(harness.api_database if page.startswith("/") else harness.db) as work:
            await read()
        amounts.append(work.amount)
    assert amounts[1] < 1.2 * amounts[0] + 20
