"""Samples → Batch: enough, fresh enough, and not all the same."""

from typing import Any

import pytest
from sqlalchemy import select, update

from app.core.database import now
from app.core.settings import Settings
from app.models import Audit, Batch, BatchState, Mode, Policy, Sample, SampleState, Version, VersionState
from tests.support.deployment import Ring
from workers.feedback.curate import curate
from workers.training.assemble import assemble


async def rate(
    ring: Ring, thumbs: str, version: Version | None = None, who: str | None = None, **values: Any
) -> list[str]:
    """One rated turn per character: + or -. Its rater is somebody of its own unless `who` names one."""
    turns = []
    for thumb in thumbs:
        turn = await ring.turn(version, **values)
        turns.append(turn.id)
        source = {} if who is None else {"source": {"kind": "HUMAN", "id": who}}
        await ring.thumb(turn.id, "up" if thumb == "+" else "down", **source)
    await curate(ring.db, ring.settings)
    return turns


async def batched(ring: Ring) -> set[str]:
    return {sample.turn_id for sample in await ring.all(Sample) if sample.batch_id is not None}


def told(ring: Ring, **settings: Any) -> Settings:
    return ring.settings.model_copy(update=settings)


async def test_too_few_samples_wait(ring: Ring) -> None:
    await rate(ring, "+-+-+-+")
    assert await assemble(ring.db, ring.settings) == 0
    assert await ring.all(Batch) == []


async def test_enough_samples_become_one_frozen_batch(ring: Ring) -> None:
    await rate(ring, "+-+-+-+-+-")
    assert await assemble(ring.db, ring.settings) == 1
    [batch] = await ring.all(Batch)
    assert (batch.state, batch.num_samples, batch.parent_id) == (BatchState.OPEN, 8, (await ring.serving()).id)
    states = sorted(sample.state for sample in await ring.all(Sample))
    assert states == [SampleState.BATCHED] * 8 + [SampleState.OPEN] * 2


async def test_one_batch_at_a_time(ring: Ring) -> None:
    await rate(ring, "+-" * 8)
    await assemble(ring.db, ring.settings)
    await assemble(ring.db, ring.settings)
    assert len(await ring.all(Batch)) == 1


async def test_a_batch_without_variance_is_refused_with_its_reason_on_record(ring: Ring) -> None:
    await rate(ring, "++++++++")
    await assemble(ring.db, ring.settings)
    [batch] = await ring.all(Batch)
    assert batch.state == BatchState.REFUSED
    assert "rewards are 1.0" in batch.reason
    assert {sample.state for sample in await ring.all(Sample)} == {SampleState.DROPPED}
    assert "batch refused" in [row.action for row in await ring.all(Audit)]
    await rate(ring, "+-+-+-+-")
    assert await assemble(ring.db, ring.settings) == 1, "learning goes on"


async def test_a_stale_sample_never_reaches_a_batch(ring: Ring) -> None:
    base = await ring.serving()
    await rate(ring, "+-")
    first = await ring.version(VersionState.LIVE)
    await rate(ring, "+-", first)
    second = await ring.version(VersionState.LIVE)
    await rate(ring, "+-+-+-+-", second)
    await assemble(ring.db, ring.settings)
    by_version = {(sample.version_id, sample.state) for sample in await ring.all(Sample)}
    assert (base.id, SampleState.DROPPED) in by_version, "two versions behind"
    assert (first.id, SampleState.BATCHED) in by_version, "one version behind"


async def test_a_sample_of_a_version_that_was_rolled_back_never_reaches_a_batch(ring: Ring) -> None:
    left = await ring.version(VersionState.ROLLED_BACK)
    await rate(ring, "+-", left)
    policy = await ring.policy()
    async with ring.db.write() as session:
        (await session.get_one(type(policy), policy.id)).head_version_id = left.parent_id
    await assemble(ring.db, ring.settings)
    assert {sample.state for sample in await ring.all(Sample)} == {SampleState.DROPPED}


async def test_nothing_is_assembled_on_a_head_that_has_not_come_home(ring: Ring) -> None:
    await rate(ring, "+-+-+-+-")
    await ring.version(VersionState.TRAINED)
    assert await assemble(ring.db, ring.settings) == 0


async def test_one_rater_never_has_more_than_a_share_of_a_batch(ring: Ring) -> None:
    settings = told(ring, max_rater_share=0.25)
    loud = await rate(ring, "+-" * 10, who="loud")
    await rate(ring, "+-+-+")
    assert await assemble(ring.db, settings) == 0, "two of the loud one's and five others are seven"
    await rate(ring, "-")
    assert await assemble(ring.db, settings) == 1
    taken = await batched(ring)
    assert len(taken & set(loud)) == 2 and len(taken) == 8
    [batch] = await ring.all(Batch)
    assert batch.num_raters == 7


@pytest.mark.parametrize("capped", ["conversation", "cluster"])
async def test_neither_a_conversation_nor_what_is_nearly_the_same_fills_a_batch(ring: Ring, capped: str) -> None:
    shares = {"max_conversation_share": 0.25, "max_cluster_share": 0.25}
    alike = await rate(ring, "+-" * 5, conversation_id="c" if capped == "conversation" else None)
    async with ring.db.write() as session:
        if capped == "cluster":
            await session.execute(update(Sample).values(cluster="same"))
    others = await rate(ring, "+-+-+-")
    async with ring.db.write() as session:
        await session.execute(update(Sample).where(Sample.turn_id.in_(others)).values(cluster=None))
    assert await assemble(ring.db, told(ring, **shares)) == 1
    assert len(await batched(ring) & set(alike)) == 2


async def test_programs_are_not_capped(ring: Ring) -> None:
    for number in range(8):
        turn = await ring.turn()
        await ring.thumb(turn.id, "up" if number % 2 else "down", source={"kind": "CODE", "id": "verifier"})
    await curate(ring.db, ring.settings)
    assert await assemble(ring.db, told(ring, max_rater_share=0.05)) == 1


async def test_a_batch_must_have_enough_raters(ring: Ring) -> None:
    await rate(ring, "+-+-", who="ada")
    await rate(ring, "+-+-", who="bob")
    some = {"max_rater_share": 0.5}
    assert await assemble(ring.db, told(ring, min_raters=3, **some)) == 0
    assert await assemble(ring.db, told(ring, min_raters=2, **some)) == 1


async def test_a_small_batch_is_frozen_when_its_first_sample_has_waited_long_enough(ring: Ring) -> None:
    await rate(ring, "+-+")
    assert await assemble(ring.db, told(ring, min_batch_size=3, max_wait_seconds=1000)) == 0
    assert await assemble(ring.db, told(ring, min_batch_size=4, max_wait_seconds=0)) == 0
    assert await assemble(ring.db, told(ring, min_batch_size=3, max_wait_seconds=0)) == 1
    [batch] = await ring.all(Batch)
    assert batch.num_samples == 3


async def test_a_share_is_of_the_batch_that_there_is(ring: Ring) -> None:
    """Of eight two may be one rater's, of four only one."""
    await rate(ring, "+-", who="ada")
    await rate(ring, "+-+")
    patient = told(ring, min_batch_size=4, max_wait_seconds=0, max_rater_share=0.25)
    assert await assemble(ring.db, patient) == 1
    [batch] = await ring.all(Batch)
    assert (batch.num_samples, batch.num_raters) == (4, 4)


async def test_a_sample_that_is_not_ripe_waits(ring: Ring) -> None:
    await rate(ring, "+-+-+-+-")
    async with ring.db.write() as session:
        await session.execute(update(Sample).values(matures_at=4e9))
    assert await assemble(ring.db, ring.settings) == 0
    async with ring.db.write() as session:
        await session.execute(update(Sample).values(matures_at=1.0))
    assert await assemble(ring.db, ring.settings) == 1


async def test_replies_to_one_prompt_stay_together(ring: Ring) -> None:
    await rate(ring, "+-+-+-+")
    group = []
    for index in range(4):
        first = group[0] if group else None
        named = {"completion_id": first, "choice_index": index} if first else {}
        turn = await ring.turn(**named)
        group.append(turn.id)
        body = {"completion_id": group[0], "choice_index": index, "kind": "binary", "value": index % 2 == 0}
        await ring.api.post("/v1/feedback", json=body)
    await curate(ring.db, ring.settings)
    await rate(ring, "-")
    assert await assemble(ring.db, ring.settings) == 1
    taken = await batched(ring)
    assert len(taken) == 8 and not taken & set(group), "one place is left, and the group does not fit"


async def test_after_an_alarm_one_round_is_learned_from_the_serving_version_alone(ring: Ring) -> None:
    older = await rate(ring, "+-+-")
    live = await ring.version(VersionState.LIVE)
    await rate(ring, "+-+-", live)
    async with ring.db.write() as session:
        await session.execute(update(Policy).values(mode=Mode.SYNCHRONOUS))
    assert await assemble(ring.db, ring.settings) == 0
    await rate(ring, "+-+-", live)
    assert await assemble(ring.db, ring.settings) == 1
    assert not await batched(ring) & set(older)


async def test_nothing_is_assembled_while_learning_is_halted(ring: Ring) -> None:
    await rate(ring, "+-+-+-+-")
    async with ring.db.write() as session:
        await session.execute(update(Policy).values(mode=Mode.HALTED))
    assert await assemble(ring.db, ring.settings) == 0
    async with ring.db.write() as session:
        await session.execute(update(Policy).values(mode=Mode.ASYNCHRONOUS))
    assert await assemble(ring.db, ring.settings) == 1


async def test_what_is_about_to_be_too_old_is_waited_for_where_that_is_asked_for(ring: Ring) -> None:
    old = await rate(ring, "+-")
    live = await ring.version(VersionState.LIVE)
    async with ring.db.write() as session:
        clock = await session.scalar(select(now()))
        await session.execute(update(Sample).values(matures_at=clock + 100))
    await rate(ring, "+-+-+-+-", live)
    assert await assemble(ring.db, told(ring, on_stale="wait")) == 0
    async with ring.db.write() as session:
        await session.execute(update(Sample).where(Sample.turn_id.in_(old)).values(matures_at=1.0))
    assert await assemble(ring.db, told(ring, on_stale="wait")) == 1
    assert set(old) < await batched(ring)


async def test_dropping_does_not_wait_and_waiting_has_an_end(ring: Ring) -> None:
    await rate(ring, "+-")
    live = await ring.version(VersionState.LIVE)
    async with ring.db.write() as session:
        clock = await session.scalar(select(now()))
        await session.execute(update(Sample).values(matures_at=clock + 100))
    await rate(ring, "+-+-+-+-", live)
    assert await assemble(ring.db, told(ring, on_stale="wait", max_wait_seconds=0)) == 1


async def test_who_is_alone_may_be_learned_from_when_shares_are_off(ring: Ring) -> None:
    await rate(ring, "+-+-+-+-", who="ada")
    assert await assemble(ring.db, told(ring, trust=True, max_rater_share=0.9)) == 0, "a newcomer has less than that"
    assert await assemble(ring.db, told(ring, trust=True)) == 1


async def test_a_comparison_by_a_newcomer_is_not_torn_apart(ring: Ring) -> None:
    a, b = await ring.turn(), await ring.turn()
    await ring.api.post("/v1/feedback", json={"kind": "comparison", "value": [a.id, b.id], "source": {"id": "ada"}})
    await rate(ring, "+-+-+-")
    assert await assemble(ring.db, told(ring, trust=True, max_rater_share=0.2)) == 1
    assert {a.id, b.id} <= await batched(ring)


async def test_where_there_are_few_raters_an_even_share_is_everybodys(ring: Ring) -> None:
    for who in ("a", "b", "c", "d"):
        await rate(ring, "+-", who=who)
    few = told(ring, trust=True, max_rater_share=0.05)
    assert await assemble(ring.db, few) == 0, "four are nobody's crowd"
    await rate(ring, "+", who="e")
    assert await assemble(ring.db, few) == 1
