"""Samples come back: from rejected and rolled-back versions, from failed batches, and into versions live again."""

from collections.abc import Mapping

import pytest
from sqlalchemy import select, update

from alignment.types import ReturnReason
from app.core.leases import LeaseLost
from app.models import (
    Batch,
    BatchState,
    BatchTurn,
    Feedback,
    Rater,
    RaterStanding,
    Sample,
    SampleRule,
    SampleState,
    Turn,
    Version,
)
from app.training.batch_samples import MAX_RETURNS, NO_CONTRAST, UNDONE
from tests.support.deployment import Harness
from tests.support.updates import (
    TRAINED,
    claim_next_batch,
    deploy,
    expire_leases,
    rate,
    reject,
    release,
    roll_back,
    samples_by_turn,
    train,
    trained_without,
)
from workers.curate import curate
from workers.training import batch_claims, batches
from workers.training.assemble import assemble


async def states(harness: Harness) -> set[tuple[str, str | None, str | None]]:
    return {(sample.state, sample.rule, sample.batch_id) for sample in await harness.all(Sample)}


async def feedback_batches(harness: Harness) -> set[str | None]:
    return {row.batch_id for row in await harness.all(Feedback)}


async def num_returns(harness: Harness) -> set[int]:
    return {sample.num_returns for sample in await harness.all(Sample)}


async def forget_undone(harness: Harness) -> None:
    """Let the samples of an undone version join a batch without new feedback, as if their batch had failed."""
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(reason="its batch failed"))


OPEN: set[tuple[str, str | None, str | None]] = {(SampleState.OPEN, None, None)}


async def test_a_batch_keeps_the_turns_and_the_feedback_that_it_was_frozen_with(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+-")
    claimed = await claim_next_batch(harness)
    rows = await harness.all(BatchTurn)
    assert {(row.batch_id, row.turn_id) for row in rows} == {(claimed.row.id, turn) for turn in turns}
    assert await feedback_batches(harness) == {claimed.row.id}
    comment = {"completion_id": turns[0], "kind": "comment", "value": "nice"}
    assert (await harness.api.post("/v1/feedback", json=comment)).status_code == 201
    assert await feedback_batches(harness) == {claimed.row.id, None}, "a comment is no reward"


async def test_samples_of_a_rejected_version_return(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+-")
    version = await train(harness)
    await reject(harness, version)
    samples = await samples_by_turn(harness)
    assert await states(harness) == OPEN and await num_returns(harness) == {1}
    assert {sample.reason for sample in samples.values()} == {"shop@v1 was rejected: its KL is too high"}
    assert await feedback_batches(harness) == {None}
    again = await claim_next_batch(harness)
    assert {sample.turn_id for sample in again.batch.samples} == set(turns)
    assert len(await harness.all(BatchTurn)) == 16, "both batches keep their turns"


async def test_feedback_that_came_meanwhile_counts(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+-")
    version = await train(harness)
    await harness.vote(turns[0], "down")
    await curate(harness.db, harness.settings)
    assert (await samples_by_turn(harness))[turns[0]].reward == 1.0, "the sample is trained"
    await reject(harness, version)
    assert await assemble(harness.db, harness.settings) == 0, "its reward must be computed again first"
    again = await claim_next_batch(harness)
    assert {sample.turn_id: sample.reward for sample in again.batch.samples}[turns[0]] == -1.0


async def test_feedback_withdrawn_meanwhile_drops_the_returned_sample(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+-")
    feedback = {row.turn_id: row.id for row in await harness.all(Feedback)}
    version = await train(harness)
    assert (await harness.api.delete(f"/v1/feedback/{feedback[turns[0]]}")).status_code == 200
    await reject(harness, version)
    await curate(harness.db, harness.settings)
    sample = (await samples_by_turn(harness))[turns[0]]
    assert (sample.state, sample.rule) == (SampleState.DROPPED, SampleRule.WITHDRAWN)


async def test_samples_that_must_not_be_learned_from_do_not_return(harness: Harness) -> None:
    erased, excluded, blocked, quarantined = turns = await rate(harness, "+-+-")
    others = await rate(harness, "+-+-")
    for turn, name in ((blocked, "mallory"), (quarantined, "eve")):
        await harness.vote(turn, source={"kind": "HUMAN", "id": name})
    await curate(harness.db, harness.settings)
    version = await train(harness)
    await harness.api.delete(f"/v1/chat/completions/{erased}")
    async with harness.db.write() as session:
        await session.execute(update(Turn).where(Turn.id == excluded).values(exclusion_reason="no consent"))
        names = await session.scalars(select(Rater.name))
        project_id = (await harness.policy()).project_id
        standing = {"HUMAN/mallory": RaterStanding.BLOCKED, "HUMAN/eve": RaterStanding.QUARANTINED}
        for name in set(names) & set(standing):
            row = await session.get_one(Rater, (project_id, name))
            row.standing, row.reason = standing[name], "a test"
    await reject(harness, version)
    samples = await samples_by_turn(harness)
    assert [(samples[turn].state, samples[turn].rule, samples[turn].batch_id) for turn in turns] == [
        (SampleState.DROPPED, SampleRule.ERASED, None),
        (SampleState.DROPPED, SampleRule.EXCLUDED, None),
        (SampleState.OPEN, None, None),  # another rater has judged it too
        (SampleState.QUARANTINED, None, None),
    ]
    await curate(harness.db, harness.settings)
    assert (await samples_by_turn(harness))[blocked].reward == 1.0, "without the blocked rater's vote"
    assert {samples[turn].state for turn in others} == {SampleState.OPEN}


async def test_a_sample_of_a_blocked_rater_alone_is_dropped(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+", rater="ada")
    turns += await rate(harness, "-", rater="mallory")
    version = await train(harness)
    body = {"standing": "blocked", "reason": "a test"}
    assert (await harness.api.put("/v1/raters/HUMAN%2Fmallory", json=body)).status_code in (200, 404, 405)
    async with harness.db.write() as session:
        row = await session.get(Rater, ((await harness.policy()).project_id, "HUMAN/mallory"))
        assert row is not None
        row.standing = RaterStanding.BLOCKED
    await reject(harness, version)
    sample = (await samples_by_turn(harness))[turns[-1]]
    assert (sample.state, sample.rule) == (SampleState.DROPPED, SampleRule.RATER_BLOCKED)


async def test_samples_of_versions_rejected_again_and_again_are_dropped(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    for _ in range(MAX_RETURNS):
        await reject(harness, await train(harness))
        assert await states(harness) == OPEN
    await reject(harness, await train(harness))
    assert await states(harness) == {(SampleState.DROPPED, SampleRule.VERSION_REJECTED, None)}
    assert await feedback_batches(harness) == {None}


async def test_samples_of_a_version_rolled_back_unjudged_return(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    version = await release(harness, await train(harness))
    await harness.turn(version)  # nobody judges it
    await roll_back(harness)
    assert await states(harness) == OPEN and await num_returns(harness) == {1}
    reasons = {sample.reason for sample in await harness.all(Sample)}
    assert reasons == {UNDONE}


async def test_samples_of_an_undone_version_start_no_update_without_new_feedback(harness: Harness) -> None:
    """An operator has returned to a version: the same samples must not make another one like that which was undone."""
    undone = await rate(harness, "+-+-+-+-")
    await release(harness, await train(harness))
    await roll_back(harness)
    await curate(harness.db, harness.settings)
    impatient = harness.settings.replace({"trainer.max_wait_seconds": 0.0, "trainer.min_batch_size": 2})
    assert await assemble(harness.db, impatient) == 0
    triggered = await harness.api.post("/v1/policies/shop/training/trigger", json={})
    assert triggered.status_code == 200 and await assemble(harness.db, impatient) == 0
    await harness.vote(undone[0], "down", source={"kind": "HUMAN", "id": "ada"})  # new feedback on one of them
    await harness.vote(undone[1], "up", source={"kind": "HUMAN", "id": "ada"})
    await rate(harness, "+-")
    claimed = await claim_next_batch(harness)
    in_batch = {sample.turn_id for sample in claimed.batch.samples}
    assert {undone[0], undone[1]} <= in_batch, "their rewards have changed, so they are new"
    assert len(in_batch) == 8 and len(in_batch & set(undone)) == 6, "four are new, and as many others join them"


async def test_samples_of_a_version_judged_and_rolled_back_are_dropped(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+-")
    version = await release(harness, await train(harness))
    await rate(harness, "-", version)
    await roll_back(harness)
    samples = await samples_by_turn(harness)
    dropped = {(samples[turn].state, samples[turn].rule, samples[turn].reason) for turn in turns}
    sentence = "shop@v1 learned from it; people judged that version, and it was undone"
    assert dropped == {(SampleState.DROPPED, SampleRule.ROLLED_BACK, sentence)}
    assert {row.batch_id for row in await harness.all(Feedback)} == {None}


async def test_every_version_that_leaves_the_line_gives_its_samples_back(harness: Harness) -> None:
    first = await rate(harness, "+-+-+-+-")
    await release(harness, await train(harness))
    second = await rate(harness, "+-+-+-+-")
    await train(harness)  # not released yet
    await roll_back(harness, 0)
    samples = await samples_by_turn(harness)
    assert {samples[turn].rule for turn in first} == {SampleRule.ROLLED_BACK}, "it was judged by the second votes"
    assert {samples[turn].state for turn in second} == {SampleState.OPEN}


async def test_an_aborted_canary_gives_its_samples_back(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    version = await release(harness, await train(harness))
    await deploy(harness, 0)
    assert await states(harness) == OPEN, "training continues from v0"
    body = {"version": version.number, "share": 0.2}
    assert (await harness.api.post("/v1/policies/shop/deploy", json=body)).status_code == 200
    await harness.api.post("/v1/policies/shop/canary/abort", json={})
    assert await states(harness) == OPEN and await num_returns(harness) == {1}


async def test_a_version_live_again_takes_its_samples_back(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+-")
    version = await release(harness, await train(harness))
    await roll_back(harness)
    await deploy(harness, 1)
    assert await states(harness) == {(SampleState.TRAINED, None, version.batch_id)}
    assert await feedback_batches(harness) == {version.batch_id}
    assert await assemble(harness.db, harness.settings) == 0, "nothing is used twice"
    await rate(harness, "-", version)
    await roll_back(harness)
    samples = await samples_by_turn(harness)
    assert {samples[turn].rule for turn in turns} == {SampleRule.ROLLED_BACK}
    await deploy(harness, 1)
    samples = await samples_by_turn(harness)
    assert {(samples[turn].state, samples[turn].rule) for turn in turns} == {(SampleState.TRAINED, None)}


async def test_a_batch_with_samples_of_a_version_live_again_is_broken_up(harness: Harness) -> None:
    first = await rate(harness, "+-+-+-+-")
    version = await release(harness, await train(harness))
    await roll_back(harness)
    async with harness.db.write() as session:
        await session.execute(update(Sample).where(Sample.turn_id.in_(first[:2])).values(ready_at=4e9))
    second = await rate(harness, "+-+-")
    claimed = await claim_next_batch(harness, batch_size=8)
    in_batch = {sample.turn_id for sample in claimed.batch.samples}
    await deploy(harness, 1)
    assert (await harness.get(Batch, claimed.row.id)).state == BatchState.FAILED
    with pytest.raises(LeaseLost):
        await batches.commit(harness.db, claimed, TRAINED)
    samples = await samples_by_turn(harness)
    assert {(samples[turn].state, samples[turn].batch_id) for turn in first} == {
        (SampleState.TRAINED, version.batch_id)
    }
    assert in_batch <= {*first, *second}
    assert {samples[turn].state for turn in second} == {SampleState.OPEN}


async def test_samples_trained_in_another_line_return_before_the_old_version_takes_them(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    first = await release(harness, await train(harness))
    await roll_back(harness)
    await forget_undone(harness)
    second = await release(harness, await train(harness))
    assert await states(harness) == {(SampleState.TRAINED, None, second.batch_id)}
    await deploy(harness, first.number)
    assert await states(harness) == {(SampleState.TRAINED, None, first.batch_id)}
    await deploy(harness, second.number)
    assert await states(harness) == {(SampleState.TRAINED, None, second.batch_id)}


async def test_samples_return_if_the_head_moved_during_the_update(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    claimed = await claim_next_batch(harness)
    await harness.version()
    assert not await batches.commit(harness.db, claimed, TRAINED)
    assert (await harness.get(Batch, claimed.row.id)).state == BatchState.FAILED
    assert await states(harness) == OPEN and await num_returns(harness) == {0}, "the samples did not fail"


async def fail_batches_with(harness: Harness, poison: str, *, crash: bool) -> list[int]:
    """Train until no full batch is left; batches with the poisoned turn fail. Return the sizes of the failed ones."""
    sizes: list[int] = []
    for _ in range(30):
        await curate(harness.db, harness.settings)
        if not await assemble(harness.db, harness.settings):
            return sizes
        claimed = await batch_claims.claim(harness.db, "trainer", harness.settings)
        assert claimed is not None
        if poison not in {sample.turn_id for sample in claimed.batch.samples}:
            assert await batches.commit(harness.db, claimed, TRAINED)
            batch = await harness.get(Batch, claimed.row.id)
            await release(harness, await harness.get(Version, batch.version_id))
            continue
        sizes.append(len(claimed.batch.samples))
        if crash:
            async with harness.db.write() as session:
                values = {"attempt": harness.settings.workers.max_attempts, "lease_until": 0.0}
                await session.execute(update(Batch).where(Batch.id == claimed.row.id).values(values))
            assert await batches.quarantine_poisoned(harness.db, harness.settings) == 1
        else:
            await batches.quarantine(harness.db, claimed, "NonFiniteUpdate: the gradient is not finite")
    raise AssertionError("training never ended")


@pytest.mark.parametrize("crash", [False, True])
async def test_a_poisoned_sample_is_isolated(harness: Harness, crash: bool) -> None:
    turns = [(await harness.turn()).id for _ in range(16)]
    for number, turn in enumerate(turns):  # different rewards, so that any two samples have contrast
        body = {"completion_id": turn, "kind": "score", "value": number / 16, "source": {"id": turn}}
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    sizes = await fail_batches_with(harness, turns[3], crash=crash)
    assert sizes == [8, 4, 2, 2], "half as large after each failure"
    samples = await samples_by_turn(harness)
    assert (samples[turns[3]].state, samples[turns[3]].rule) == (SampleState.DROPPED, SampleRule.UNTRAINABLE)
    states = [sample.state for sample in samples.values()]
    assert states.count(SampleState.DROPPED) == 2, "the poisoned sample, and the one that was always with it"
    assert states.count(SampleState.TRAINED) == 14
    await rate(harness, "+-+-+-+-")
    assert len((await claim_next_batch(harness)).batch.samples) == 8, "then batches are full again"


async def test_failed_samples_do_not_hold_up_others(harness: Harness) -> None:
    """The samples that failed are all alike, so that no batch of them can be formed; others go on at full size."""
    await rate(harness, "+-+-+-+-")
    claimed = await claim_next_batch(harness)
    await batches.quarantine(harness.db, claimed, "NonFiniteUpdate: the gradient is not finite")
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(ready_at=4e9))
    await rate(harness, "+-+-+-+-")
    async with harness.db.write() as session:
        returned = Sample.num_returns > 0
        await session.execute(update(Feedback).values(processed=True))
        await session.execute(update(Sample).where(returned).values(ready_at=4e9))
    assert await assemble(harness.db, harness.settings) == 1
    open_batch = next(row for row in await harness.all(Batch) if row.state == BatchState.OPEN)
    assert open_batch.num_samples == 8


async def test_samples_of_a_version_that_was_trained_are_not_suspected(harness: Harness) -> None:
    """A rejected version was trained without a failure, so the next batch of its samples is full."""
    await rate(harness, "+-+-+-+-")
    await reject(harness, await train(harness))
    assert len((await claim_next_batch(harness)).batch.samples) == 8


async def test_samples_without_contrast_wait_for_new_ones(harness: Harness) -> None:
    """The trainer found no group to compare: the same batch is not trained again, and nothing is dropped."""
    turns = await rate(harness, "+-+-+-+-")
    claimed = await claim_next_batch(harness)
    await batches.refuse(harness.db, claimed, "NothingToCompare: no group has two different rewards")
    row = await harness.get(Batch, claimed.row.id)
    assert (row.state, row.reason) == (BatchState.REFUSED, "NothingToCompare: no group has two different rewards")
    assert await states(harness) == OPEN and await num_returns(harness) == {0}
    assert {sample.reason for sample in await harness.all(Sample)} == {NO_CONTRAST}
    await curate(harness.db, harness.settings)
    assert await assemble(harness.db, harness.settings) == 0, "no endless loop"
    status = (await harness.api.get("/v1/policies/shop/training")).json()
    assert status["waiting_for"] == (
        "1 more new ready samples: 8 of the 8 were in a batch without contrast, or in a version that was undone before "
        "anybody judged it, and are at most half of the next batch."
    )
    await rate(harness, "+-+")
    assert await assemble(harness.db, harness.settings) == 0, "at most half of a batch comes from refused ones"
    new = await rate(harness, "-")
    again = await claim_next_batch(harness)
    assert {sample.turn_id for sample in again.batch.samples} >= set(new)
    assert len({sample.turn_id for sample in again.batch.samples} & set(turns)) == 4


async def test_samples_of_a_batch_broken_up_by_an_erasure_return_uncounted(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+-")
    await claim_next_batch(harness)
    await harness.api.delete(f"/v1/chat/completions/{turns[0]}")
    samples = await samples_by_turn(harness)
    assert samples[turns[0]].rule == SampleRule.ERASED
    assert {(samples[turn].state, samples[turn].num_returns) for turn in turns[1:]} == {(SampleState.OPEN, 0)}
    assert await feedback_batches(harness) == {None}


async def test_dropped_samples_of_a_trained_batch_free_their_feedback(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+-")
    claimed = await claim_next_batch(harness)
    assert await batches.commit(harness.db, claimed, trained_without(unused_turn_ids=turns[:1]))
    used: Mapping[str | None, str | None] = {row.turn_id: row.batch_id for row in await harness.all(Feedback)}
    assert used == {turn: None if turn == turns[0] else claimed.row.id for turn in turns}
    assert turns[0] not in {row.turn_id for row in await harness.all(BatchTurn)}, "no version learned from it"


@pytest.mark.parametrize(
    ("why", "waiting_for"), [(ReturnReason.NO_CONTRAST, "new_feedback"), (ReturnReason.STOPPED, "batch")]
)
async def test_samples_that_an_update_has_not_learned_from_return(
    harness: Harness, why: ReturnReason, waiting_for: str
) -> None:
    turns = await rate(harness, "+-+-+-+-")
    claimed = await claim_next_batch(harness)
    await harness.vote(turns[0], "down")  # while it is trained
    returned = dict.fromkeys(turns[:2], why)
    assert await batches.commit(harness.db, claimed, trained_without(returned_turns=returned))
    samples = await samples_by_turn(harness)
    assert {turn: samples[turn].state for turn in turns} == {
        turn: SampleState.OPEN if turn in returned else SampleState.TRAINED for turn in turns
    }
    assert {(samples[turn].batch_id, samples[turn].reason, samples[turn].num_returns) for turn in returned} == {
        (None, batches.RETURN_REASONS[why], 0)
    }
    used = {row.turn_id: row.batch_id for row in await harness.all(Feedback) if row.turn_id != turns[0]}
    assert used == {turn: None if turn in returned else claimed.row.id for turn in turns[1:]}
    assert {row.turn_id for row in await harness.all(BatchTurn)} == set(turns[2:]), "no version learned from them"
    await curate(harness.db, harness.settings)
    assert (await samples_by_turn(harness))[turns[0]].reward == -1.0, "feedback that came meanwhile counts"
    [row] = (await harness.api.get("/v1/feedback", params={"completion_id": turns[1]})).json()["data"]
    assert (row["outcome"]["state"], row["outcome"]["waiting_for"]) == ("waiting", waiting_for)


async def test_a_batch_whose_leases_expire_is_claimed_again_with_its_samples(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    first = await claim_next_batch(harness)
    await expire_leases(harness)
    again = await batch_claims.claim(harness.db, "trainer-b", harness.settings)
    assert again is not None and again.batch == first.batch


async def test_lineage_finds_every_version_that_ever_learned_from_a_turn(harness: Harness) -> None:
    turns = await rate(harness, "+-+-+-+-")
    feedback_id = next(row.id for row in await harness.all(Feedback) if row.turn_id == turns[0])
    await release(harness, await train(harness))
    await roll_back(harness)
    await forget_undone(harness)
    await reject(harness, await train(harness))
    for path in (f"chat/completions/{turns[0]}", f"feedback/{feedback_id}"):
        rows = (await harness.api.get(f"/v1/{path}/lineage")).json()["data"]
        assert [row["version"] for row in rows] == ["shop@v1", "shop@v2"], path
    rows = (await harness.api.get("/v1/policies/shop/versions/1/lineage")).json()["data"]
    assert {row["turn_id"] for row in rows} == set(turns)
    await harness.api.delete(f"/v1/chat/completions/{turns[0]}")
    rows = (await harness.api.get(f"/v1/chat/completions/{turns[0]}/lineage")).json()["data"]
    assert [row["version"] for row in rows] == ["shop@v1", "shop@v2"]
