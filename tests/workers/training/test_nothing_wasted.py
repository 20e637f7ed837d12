"""Over a run with rejections, rollbacks, failed and one-sided batches, no sample is lost or learned from twice."""

import random
from collections import Counter

import pytest
from sqlalchemy import select, update

from app.models import Batch, BatchState, BatchTurn, Feedback, Reward, Sample, SampleState, Turn, Version, VersionState
from tests.support.deployment import Harness
from tests.support.updates import TRAINED, deploy, rate, reject, release, roll_back
from workers.curate import curate
from workers.training import batch_claims, batches
from workers.training.assemble import assemble

OUTCOMES = ("release", "release", "reject", "roll back", "roll forward", "refuse", "quarantine", "crash", "head moves")


async def run_update(harness: Harness, outcome: str, rng: random.Random) -> str | None:
    """Assemble and claim a batch, and let the update end so. Return the outcome, or None without a batch."""
    await curate(harness.db, harness.settings)
    if not await assemble(harness.db, harness.settings):
        return None
    claimed = await batch_claims.claim(harness.db, "trainer", harness.settings)
    assert claimed is not None
    if outcome == "refuse":
        await batches.refuse(harness.db, claimed, "NothingToCompare: no pair")
    elif outcome == "quarantine":
        await batches.quarantine(harness.db, claimed, "NonFiniteUpdate: not finite")
    elif outcome == "crash":
        async with harness.db.write() as session:
            lost = {"attempt": harness.settings.workers.max_attempts, "lease_until": 0.0}
            await session.execute(update(Batch).where(Batch.id == claimed.row.id).values(lost))
        assert await batches.quarantine_poisoned(harness.db, harness.settings) == 1
    elif outcome == "head moves" and claimed.parent.number > 0:
        await roll_back(harness, 0)
    else:
        assert await batches.commit(harness.db, claimed, TRAINED)
        version = await harness.get(Version, (await harness.get(Batch, claimed.row.id)).version_id)
        await settle(harness, version, outcome, rng)
    return outcome


async def settle(harness: Harness, version: Version, outcome: str, rng: random.Random) -> None:
    """Reject or release a version; then perhaps roll it back, and make another one live."""
    if outcome == "reject":
        await reject(harness, version)
        return
    await release(harness, version)
    if outcome == "roll back":
        if rng.random() < 0.5:
            await rate(harness, "-", version)
        await roll_back(harness)
    elif outcome == "roll forward":
        served = [row.number for row in await harness.all(Version) if row.state != VersionState.REJECTED]
        await deploy(harness, rng.choice(served))


async def check(harness: Harness, turns: set[str]) -> Counter[str]:
    """Check every sample against the line of the head. Return the number of samples by state."""
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    assert samples.keys() == turns, "no sample is lost, and none is added"
    versions = {version.id: version for version in await harness.all(Version)}
    by_batch = {version.batch_id: version for version in versions.values() if version.batch_id is not None}
    state_of_batch = {batch.id: batch.state for batch in await harness.all(Batch)}
    line: list[str] = []
    head: str | None = (await harness.policy()).head_version_id
    while head is not None:
        line.append(head)
        head = versions[head].parent_id
    learned: Counter[str] = Counter()
    for row in await harness.all(BatchTurn):
        if row.batch_id in by_batch and by_batch[row.batch_id].id in line:
            learned[row.turn_id] += 1
    assert max(learned.values(), default=0) <= 1, "no turn is learned from twice in one line"
    for sample in samples.values():
        match sample.state:
            case SampleState.TRAINED:
                assert sample.batch_id in by_batch and by_batch[sample.batch_id].id in line
                assert learned[sample.turn_id] == 1
            case SampleState.BATCHED:
                assert state_of_batch[sample.batch_id] == BatchState.OPEN
            case SampleState.OPEN | SampleState.QUARANTINED:
                assert (sample.batch_id, sample.rule) == (None, None) and not learned[sample.turn_id]
            case _:
                assert sample.state == SampleState.DROPPED and sample.batch_id is None
                assert sample.rule is not None and sample.reason
                assert not learned[sample.turn_id]
    async with harness.db.read() as session:
        rows = await session.execute(
            select(Feedback.batch_id, Sample.batch_id)
            .join(Reward, Reward.feedback_seq == Feedback.seq)
            .join(Sample, Sample.turn_id == Reward.turn_id)
        )
        for feedback_batch, sample_batch in rows:
            assert feedback_batch == sample_batch, "feedback is where its sample is"
    return Counter(sample.state for sample in samples.values())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_every_sample_ends_in_one_state(harness: Harness, seed: int) -> None:
    rng = random.Random(seed)
    turns: set[str] = set()
    ended: Counter[str | None] = Counter()
    for step in range(24):
        thumbs = "".join(rng.choice("+-") for _ in range(6)) if step % 4 else "+" * 6  # one-sided
        turns |= set(await rate(harness, thumbs))
        outcome = OUTCOMES[step % len(OUTCOMES)] if step < len(OUTCOMES) else rng.choice(OUTCOMES)
        ended[await run_update(harness, outcome, rng)] += 1
        turns |= {turn.id for turn in await harness.all(Turn)}
        await check(harness, turns)
    assert len(ended) >= 6, ended
    for _ in range(30):  # then every update succeeds
        if await run_update(harness, "release", rng) is None:
            break
    counts = await check(harness, turns)
    assert counts[SampleState.BATCHED] == counts[SampleState.QUARANTINED] == 0
    assert counts[SampleState.TRAINED] > 0 and counts.total() == len(turns)
