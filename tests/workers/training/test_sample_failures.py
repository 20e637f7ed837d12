"""How often samples have failed: the same as their batches say, and the others that wait are not read."""

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

import pytest
from sqlalchemy import func, select, update

from alignment.config.algorithm import UpdateConfig
from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from app.models import ApiKey, Batch, BatchState, BatchTurn, Policy, Project, Sample, SampleRule, SampleState, new_id
from app.policies.locks import LockedPolicy, lock_policy
from app.training import batch_samples
from app.training.sample_failures import count_failures, max_failures
from tests.support.deployment import Harness
from tests.support.statement_work import count_work
from tests.support.waiting_samples import add_samples, add_turns, analyze, forget_statistics

FEW, MANY, STEP = 300, 1500, 500


async def work_of(harness: Harness, act: Callable[[], Awaitable[object]]) -> int:
    async with count_work(harness.db) as work:
        await act()
    return work.amount


async def count_all(harness: Harness, step: int = STEP) -> None:
    policy, num_counted = await harness.policy(), step
    while num_counted == step:
        async with harness.db.write() as session:
            num_counted = await count_failures(session, policy.id, step)


async def read_max(harness: Harness) -> int:
    async with harness.db.read() as session:
        policy = await session.get_one(Policy, (await harness.policy()).id)
        return await max_failures(session, policy, harness.settings)


async def add_batch(harness: Harness, state: BatchState, *turn_ids: str) -> Batch:
    policy, version = await harness.policy(), await harness.serving()
    row = {"policy_id": policy.id, "parent_id": version.id, "num_samples": len(turn_ids)}
    batch = Batch(id=new_id("bat"), state=state, **row)
    async with harness.db.write() as session:
        session.add(batch)
        await session.flush()
        session.add_all([BatchTurn(batch_id=batch.id, turn_id=turn_id) for turn_id in turn_ids])
    return batch


@pytest.mark.parametrize("has_statistics", [True, False], ids=["statistics", "no statistics"])
@pytest.mark.parametrize("algorithm", [PPOConfig(), GRPOConfig()], ids=["ppo", "grpo"])
async def test_the_samples_that_returned_without_a_failure_are_not_read(
    harness: Harness, algorithm: UpdateConfig, has_statistics: bool
) -> None:
    """All samples have returned, and three of them from quarantined batches. They are in groups of ten."""
    harness.settings = harness.settings.replace({"algorithm": algorithm})
    amounts = []
    for number, count in enumerate((FEW, MANY - FEW)):
        await add_samples(harness, count, lambda number: (-1.0) ** number, prefix=f"t{number}")
        ids = [f"chatcmpl-t{number}-{index:06}" for index in range(count)]
        await add_batch(harness, BatchState.TRAINED, *ids[3:])
        if number == 0:
            await add_batch(harness, BatchState.QUARANTINED, *ids[:3])
        async with harness.db.write() as session:
            group = func.substr(Sample.turn_id, 1, len(ids[0]) - 1)
            await session.execute(update(Sample).values(num_returns=1, group_id=group, origin="chat"))
        await count_all(harness)
        await analyze(harness)
        if not has_statistics:
            await forget_statistics(harness)
        amounts.append(await work_of(harness, lambda: read_max(harness)))
        assert await read_max(harness) == 1
    assert amounts[1] < 1.2 * amounts[0] + 10


@pytest.mark.parametrize("has_statistics", [True, False], ids=["statistics", "no statistics"])
async def test_failures_are_counted_where_samples_have_changed(harness: Harness, has_statistics: bool) -> None:
    """In each round ten other samples have returned since all were counted, and the policy has more trained batches."""
    amounts = []
    for number, count in enumerate((FEW, MANY - FEW)):
        await add_samples(harness, count, lambda number: 1.0, prefix=f"t{number}")
        ids = [f"chatcmpl-t{number}-{index:06}" for index in range(count)]
        for start in range(0, count, 10):
            await add_batch(harness, BatchState.TRAINED, *ids[start : start + 10])
        async with harness.db.write() as session:
            await session.execute(update(Sample).values(num_returns=1))
        await count_all(harness)
        async with harness.db.write() as session:
            await session.execute(update(Sample).where(Sample.turn_id.in_(ids[:10])).values(num_returns=2))
        await analyze(harness)
        if not has_statistics:
            await forget_statistics(harness)
        amounts.append(await work_of(harness, lambda: count_all(harness)))
    assert amounts[1] < 1.2 * amounts[0] + 20


@pytest.mark.parametrize("algorithm", [PPOConfig(), GRPOConfig()], ids=["ppo", "grpo"])
async def test_failures_are_those_that_the_batches_say(harness: Harness, algorithm: UpdateConfig) -> None:
    """Random batches fail, are trained, refused or undone, and samples are voted on again, dropped and come back."""
    harness.settings = harness.settings.replace({"algorithm": algorithm})
    rng, policy = random.Random(3), await harness.policy()
    refusing = ApiKey(id="key-1", project_id=policy.project_id, prefix="a", sha256="a", scopes=["chat"], train=False)
    async with harness.db.write() as session:
        session.add(refusing)
    acts = [settle_batch, settle_batch, settle_batch, undo_batch, vote_again, drop_and_return]
    most = 0
    for number in range(30):
        await add_random_samples(harness, rng, f"s{number}", refusing.id)
        has_consent = rng.random() < 0.8
        async with harness.db.write() as session:
            await session.execute(update(Project).values(train=has_consent))
            await rng.choice(acts)(await lock_policy(session, policy.id), rng)
        await count_all(harness, step=3)
        expected = await read_failures(harness)
        samples = [row for row in await harness.all(Sample) if row.state == SampleState.OPEN]
        assert {row.turn_id: row.num_failures for row in samples} == {
            row.turn_id: expected[row.turn_id] for row in samples
        }
        usable = find_usable(samples, refusing.id, algorithm) if has_consent else ()
        assert await read_max(harness) == max((expected[turn_id] for turn_id in usable), default=0)
        most = max(most, *expected.values())
    assert most > 1


async def add_random_samples(harness: Harness, rng: random.Random, prefix: str, refusing_id: str) -> None:
    turns = await add_turns(harness, 3, prefix)
    async with harness.db.write() as session:
        for turn in turns:
            values = {
                "group_id": rng.choice([None, turns[0].id, f"{prefix[:2]}-{rng.randrange(3)}"]),
                "episode_id": rng.choice([None, None, "ep-1", "ep-2"]),
                "key_id": rng.choice([None, None, None, refusing_id]),
                "ready_at": rng.choice([0.0, 0.0, 0.0, 4e9]),
                "origin": rng.choice(["chat", "chat", "chat", "prompt_set"]),
            }
            owner = {"policy_id": turn.policy_id, "version_id": turn.version_id}
            session.add(Sample(turn_id=turn.id, reward=1.0, **owner, **values))


async def settle_batch(locked: LockedPolicy, rng: random.Random) -> None:
    session, policy = locked
    query = select(Sample).where(Sample.policy_id == policy.id, Sample.state == SampleState.OPEN)
    rows = list(await session.scalars(query.order_by(-Sample.num_failures, Sample.turn_id)))
    samples = rows[: rng.randint(0, len(rows))]
    batch = Batch(id=new_id("bat"), policy_id=policy.id, parent_id=policy.head_version_id, num_samples=len(samples))
    session.add(batch)
    await session.flush()
    await batch_samples.freeze(locked, batch, samples)
    batch.state = rng.choice([BatchState.QUARANTINED] * 3 + [BatchState.TRAINED, BatchState.REFUSED])
    await session.flush()
    if batch.state == BatchState.TRAINED:
        await batch_samples.mark_trained(locked, batch.id)
    else:
        exhausted = SampleRule.UNTRAINABLE if batch.state == BatchState.QUARANTINED else None
        await batch_samples.return_samples(locked, [batch.id], "it was settled", exhausted)


async def undo_batch(locked: LockedPolicy, rng: random.Random) -> None:
    trained = select(Batch.id).where(Batch.state == BatchState.TRAINED).order_by(Batch.created_at, Batch.id)
    batch_ids = list(await locked.session.scalars(trained))
    if batch_ids:
        await batch_samples.return_samples(locked, [rng.choice(batch_ids)], "undone", SampleRule.ROLLED_BACK)


async def vote_again(locked: LockedPolicy, rng: random.Random) -> None:
    """A person's vote replaces an automated reward that was learned from."""
    trained = select(Sample).where(Sample.state == SampleState.TRAINED).order_by(Sample.turn_id)
    for sample in await locked.session.scalars(trained.limit(2)):
        sample.state, sample.automated_batch_id, sample.batch_id = SampleState.OPEN, sample.batch_id, None


async def drop_and_return(locked: LockedPolicy, rng: random.Random) -> None:
    """A rater is blocked, and others are no more."""
    for sample in await locked.session.scalars(select(Sample).order_by(Sample.turn_id)):
        if sample.state == SampleState.OPEN and rng.random() < 0.1:
            sample.state = SampleState.DROPPED
        elif sample.state == SampleState.DROPPED and rng.random() < 0.3:
            sample.state = SampleState.OPEN


async def read_failures(harness: Harness) -> dict[str, int]:
    """Return in how many quarantined batches each sample was, by its batches; 0 where one was trained."""
    states = {batch.id: batch.state for batch in await harness.all(Batch)}
    by_turn: defaultdict[str, list[str]] = defaultdict(list)
    for row in await harness.all(BatchTurn):
        by_turn[row.turn_id].append(states[row.batch_id])
    failures: dict[str, int] = {}
    for sample in await harness.all(Sample):
        found = by_turn[sample.turn_id]
        is_suspected = sample.num_returns > 0 and BatchState.TRAINED not in found
        failures[sample.turn_id] = found.count(BatchState.QUARANTINED) if is_suspected else 0
    return failures


def find_usable(samples: Sequence[Sample], refusing_id: str, algorithm: UpdateConfig) -> set[str]:
    """Return the ready samples that training may use and the algorithm can learn from, by looking at all of them."""
    ready = [sample for sample in samples if sample.ready_at < 4e9 and sample.key_id != refusing_id]
    compared: defaultdict[str, set[str]] = defaultdict(set)
    for sample in ready:
        compared[sample.group_id or sample.turn_id].add(sample.episode_id or sample.turn_id)
    return {
        sample.turn_id
        for sample in ready
        if not algorithm.needs_groups
        or sample.origin == "prompt_set"
        or len(compared[sample.group_id or sample.turn_id]) > 1
    }
