"""A person's vote on a reply whose score has been learned from already is learned from too, once."""

import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from sqlalchemy import select

from app.core.settings import Settings
from app.models import ONCE_LIVE, Batch, BatchTurn, Feedback, Sample, SampleState, Version
from tests.support.deployment import Harness
from tests.support.judgements import settings_with_sources
from tests.support.updates import TRAINED, claim_next_batch, deploy, rate, reject, release, roll_back, train
from workers.curate import curate
from workers.feedback.rewards import record_reward, update_turn_samples
from workers.training import batches


@pytest.fixture(autouse=True)
def scoring(harness: Harness) -> Settings:
    """Give the policy a reward model as a source."""
    harness.settings = settings_with_sources(harness, {"type": "learned", "window_seconds": 0})
    return harness.settings


async def score(harness: Harness, signs: str) -> list[str]:
    """Create one reply per character, + or -, with that score of a reward model."""
    turns = [(await harness.turn()).id for _ in signs]
    async with harness.db.write() as session:
        for turn, sign in zip(turns, signs, strict=True):
            await record_reward(session, turn, "learned", 0.5 if sign == "+" else -0.5, weight=0.6)
        await update_turn_samples(session, turns, harness.settings)
    return turns


async def vote(harness: Harness, turn: str, value: str = "down", **fields: Any) -> str:
    id: str = (await harness.vote(turn, value, **fields)).json()["id"]
    await curate(harness.db, harness.settings)
    return id


async def read_outcome(harness: Harness, vote_id: str) -> tuple[str, str | None]:
    outcome = (await harness.api.get(f"/v1/feedback/{vote_id}")).json()["outcome"]
    return outcome["state"], outcome["waiting_for"] or outcome["rule"] or outcome["version"]


async def batches_of(harness: Harness, turn: str) -> list[tuple[str, bool]]:
    """Return the batches that the turn was frozen into, and whether its reward was automated, the oldest first."""
    async with harness.db.read() as session:
        rows = select(BatchTurn.batch_id, BatchTurn.automated).join(Batch, Batch.id == BatchTurn.batch_id)
        ordered = rows.where(BatchTurn.turn_id == turn).order_by(Batch.created_at, Batch.id)
        return [(row.batch_id, row.automated) for row in await session.execute(ordered)]


async def train_on_scores(harness: Harness, signs: str = "+-+-+-+-") -> tuple[list[str], Version]:
    """Let a released version learn from scored replies."""
    turns = await score(harness, signs)
    return turns, await release(harness, await train(harness))


async def test_a_vote_replaces_a_score_that_was_learned_from_once(harness: Harness) -> None:
    turns, first = await train_on_scores(harness)
    late = await vote(harness, turns[0], "down")
    sample = await harness.get(Sample, turns[0])
    assert (sample.state, sample.reward, sample.automated_batch_id) == (SampleState.OPEN, -1.0, first.batch_id)
    assert await read_outcome(harness, late) == ("waiting", "batch")
    await rate(harness, "+-+-+-+")
    second = await release(harness, await train(harness))
    assert await batches_of(harness, turns[0]) == [(first.batch_id, True), (second.batch_id, False)]
    assert await read_outcome(harness, late) == ("learned", "shop@v2")
    too_late = await vote(harness, turns[0], "up", source={"id": "eve"})
    assert await read_outcome(harness, too_late) == ("not_learned", "too_late")
    assert (await harness.get(Sample, turns[0])).batch_id == second.batch_id


async def test_the_number_of_replaced_scores_of_an_update_is_known(harness: Harness) -> None:
    turns, _ = await train_on_scores(harness)
    for turn in turns[:3]:
        await vote(harness, turn)
    await rate(harness, "+-+++")
    assert (await claim_next_batch(harness)).num_replaced_scores == 3


async def test_a_vote_that_comes_during_the_update_counts_after_it(harness: Harness) -> None:
    turns = await score(harness, "+-+-+-+-")
    claimed = await claim_next_batch(harness)
    late = await vote(harness, turns[0])
    by_program = await vote(harness, turns[1], source={"kind": "CODE", "id": "check"})
    assert await read_outcome(harness, late) == ("waiting", "score_in_training")
    assert await read_outcome(harness, by_program) == ("not_learned", "too_late")
    assert await batches.commit(harness.db, claimed, TRAINED)
    await curate(harness.db, harness.settings)
    states = {sample.turn_id: sample.state for sample in await harness.all(Sample)}
    assert [turn for turn, state in states.items() if state == SampleState.OPEN] == [turns[0]]
    assert await read_outcome(harness, late) == ("waiting", "batch")


async def test_only_a_persons_vote_on_the_same_reply_replaces_a_score(harness: Harness) -> None:
    turns, _ = await train_on_scores(harness)
    by_program = await vote(harness, turns[0], source={"kind": "CODE", "id": "check"})
    await vote(harness, (await harness.turn()).id)
    assert await read_outcome(harness, by_program) == ("not_learned", "too_late")
    assert {(await harness.get(Sample, turn)).state for turn in turns} == {SampleState.TRAINED}


async def test_the_score_holds_again_when_the_vote_is_withdrawn_in_time(harness: Harness) -> None:
    turns, version = await train_on_scores(harness)
    late = await vote(harness, turns[0])
    await harness.api.delete(f"/v1/feedback/{late}")
    await curate(harness.db, harness.settings)
    sample = await harness.get(Sample, turns[0])
    assert (sample.state, sample.batch_id, sample.automated_batch_id) == (SampleState.TRAINED, version.batch_id, None)
    await vote(harness, turns[0], source={"id": "eve"})
    assert (await harness.get(Sample, turns[0])).state == SampleState.OPEN


async def test_a_vote_stays_when_the_version_that_learned_the_score_goes_and_comes_back(harness: Harness) -> None:
    turns, first = await train_on_scores(harness)
    await roll_back(harness)
    late = await vote(harness, turns[0])
    await deploy(harness, 1)
    sample = await harness.get(Sample, turns[0])
    assert (sample.state, sample.automated_batch_id) == (SampleState.OPEN, first.batch_id)
    assert {(await harness.get(Sample, turn)).batch_id for turn in turns[1:]} == {first.batch_id}
    assert await read_outcome(harness, late) == ("waiting", "batch")
    await roll_back(harness)
    assert (await harness.get(Sample, turns[0])).automated_batch_id is None


async def check_line(harness: Harness, voted: Collection[str]) -> None:
    """Check that the line of the head has learned at most once from each score and from each vote."""
    versions = {version.id: version for version in await harness.all(Version)}
    line: set[str | None] = set()
    head: str | None = (await harness.policy()).head_version_id
    while head is not None:
        line.add(versions[head].batch_id)
        head = versions[head].parent_id
    uses = Counter((row.turn_id, row.automated) for row in await harness.all(BatchTurn) if row.batch_id in line)
    assert max(uses.values(), default=0) <= 1
    for sample in await harness.all(Sample):
        has_learned_score, has_learned_vote = uses[sample.turn_id, True] == 1, uses[sample.turn_id, False] == 1
        is_trained = sample.state == SampleState.TRAINED
        assert has_learned_vote == (is_trained and sample.turn_id in voted), sample.state
        assert has_learned_score == (sample.automated_batch_id is not None or (is_trained and not has_learned_vote))
        assert sample.automated_batch_id is None or sample.automated_batch_id in line


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_no_vote_is_lost_or_used_twice_whatever_becomes_of_the_versions(harness: Harness, seed: int) -> None:
    rng = random.Random(seed)
    turns: list[str] = []
    for step in range(14):
        turns += await score(harness, "+-+-+-")
        rated = {row.turn_id for row in await harness.all(Feedback)}
        for turn in rng.sample([turn for turn in turns if turn not in rated], 3):
            await vote(harness, turn, rng.choice(("up", "down")))
        version = await train(harness, trainer__min_batch_size=4, trainer__max_wait_seconds=0)
        if step % 4 == 1:
            await reject(harness, version)
        else:
            await release(harness, version)
        if step % 4 == 3:
            await roll_back(harness)
        elif step % 5 == 0:
            served = [row.number for row in await harness.all(Version) if row.state in ONCE_LIVE and row.number]
            await deploy(harness, rng.choice(served))
        await curate(harness.db, harness.settings)
        await check_line(harness, {row.turn_id for row in await harness.all(Feedback)})
    outcomes = Counter([await read_outcome(harness, row.id) for row in await harness.all(Feedback)])
    assert not [outcome for outcome in outcomes if outcome[1] == "too_late"], outcomes
