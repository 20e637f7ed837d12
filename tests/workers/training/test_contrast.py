"""Whether groups have different rewards: the same as when all are compared, and only what has changed is read."""

import random
from collections import defaultdict
from typing import Any

import pytest
from sqlalchemy import func, select, update

from alignment.config.algorithm import UpdateConfig
from alignment.config.policy_gradient_algorithms import GRPOConfig
from alignment.config.preference_algorithms import DPOConfig
from alignment.tolerance import exceeds
from app.models import Sample, SampleState
from tests.support.deployment import Harness
from tests.support.statement_work import count_work
from tests.support.waiting_samples import add_samples, add_turns, analyze, forget_statistics
from workers.training.contrast import Contrast, find_contrast

FEW, MANY, STEP = 300, 1500, 500


async def find(harness: Harness, algorithm: UpdateConfig, step: int = STEP) -> Contrast:
    policy = await harness.policy()
    while True:
        async with harness.db.write() as session:
            contrast = await find_contrast(session, policy.id, algorithm, step)
        if contrast != Contrast.UNKNOWN:
            return contrast


@pytest.mark.parametrize("has_statistics", [True, False], ids=["statistics", "no statistics"])
@pytest.mark.parametrize("groups", ["of one", "of ten", "one of all"])
async def test_the_groups_of_samples_that_have_not_changed_are_not_read(
    harness: Harness, groups: str, has_statistics: bool
) -> None:
    """Nothing else is carried from one look to the next: neither time nor settings let all be read again."""
    amounts = []
    for number, count in enumerate((FEW, MANY - FEW)):
        prefix, group = f"t{number}", "all" if groups == "one of all" else None
        await add_samples(harness, count, lambda number: 1.0, prefix, group_id=group)
        if groups == "of ten":
            of_ten = func.substr(Sample.turn_id, 1, len(f"chatcmpl-{prefix}-00000"))
            async with harness.db.write() as session:
                await session.execute(update(Sample).values(group_id=of_ten))
        assert await find(harness, GRPOConfig()) == Contrast.MISSING
        changed = Sample.turn_id.in_([f"chatcmpl-{prefix}-{index:06}" for index in range(5)])
        async with harness.db.write() as session:
            await session.execute(update(Sample).where(changed).values(reward=1.0))
        await analyze(harness)
        if not has_statistics:
            await forget_statistics(harness)
        async with count_work(harness.db) as work:
            assert await find(harness, GRPOConfig()) == Contrast.MISSING
        amounts.append(work.amount)
    assert amounts[1] < 1.2 * amounts[0] + 20


@pytest.mark.parametrize("has_statistics", [True, False], ids=["statistics", "no statistics"])
async def test_a_group_with_contrast_is_found_at_once(harness: Harness, has_statistics: bool) -> None:
    """Another one has lost it, since a sample of it was dropped."""
    amounts = []
    for number, count in enumerate((FEW, MANY - FEW)):
        prefix = f"t{number}"
        await add_samples(harness, count, lambda number: (-1.0) ** number, prefix)
        pairs = func.substr(Sample.turn_id, 1, len(f"chatcmpl-{prefix}-00000"))
        is_dropped = Sample.turn_id.in_([f"chatcmpl-{prefix}-{index:06}" for index in range(count - 9, count)])
        async with harness.db.write() as session:
            await session.execute(update(Sample).values(group_id=pairs))
        assert await find(harness, DPOConfig(min_margin=2.0)) == Contrast.MISSING
        async with harness.db.write() as session:
            await session.execute(update(Sample).where(is_dropped).values(state=SampleState.DROPPED))
        await analyze(harness)
        if not has_statistics:
            await forget_statistics(harness)
        async with count_work(harness.db) as work:
            assert await find(harness, GRPOConfig()) == Contrast.EXISTS
        amounts.append(work.amount)
    assert amounts[1] < 1.2 * amounts[0] + 20


@pytest.mark.parametrize("seed", [1, 2])
async def test_contrast_is_what_all_open_samples_say(harness: Harness, seed: int) -> None:
    """Random samples come, change, leave and return, also between the steps of a look. Contrast is rare."""
    rng, seen = random.Random(seed), set[Contrast]()
    algorithms: list[UpdateConfig] = [GRPOConfig(), DPOConfig(min_margin=0.5), DPOConfig(min_margin=0)]
    policy = await harness.policy()
    for number in range(40):
        algorithm = rng.choice(algorithms)
        await act(harness, rng, f"s{number}")
        async with harness.db.write() as session:
            await find_contrast(session, policy.id, algorithm, 2)
        await act(harness, rng, f"r{number}")
        contrast = await find(harness, algorithm, 2)
        assert contrast == await compare_all(harness, algorithm)
        seen.add(contrast)
    assert seen == {Contrast.EXISTS, Contrast.MISSING}


async def act(harness: Harness, rng: random.Random, prefix: str) -> None:
    kind = rng.choice(["add", "add", "reward", "group", "leave", "return"])
    if kind == "add":
        turns = await add_turns(harness, 3, prefix)
        async with harness.db.write() as session:
            for turn in turns:
                owner = {"policy_id": turn.policy_id, "version_id": turn.version_id}
                session.add(Sample(turn_id=turn.id, **owner, **random_values(rng, turns[0].id)))
        return
    async with harness.db.write() as session:
        rows = list(await session.scalars(select(Sample).order_by(Sample.turn_id)))
        for sample in rng.sample(rows, min(3, len(rows))):
            values = random_values(rng, rows[0].turn_id)
            if kind == "reward":
                sample.reward, sample.episode_reward = values["reward"], values["episode_reward"]
            elif kind == "group":
                sample.group_id = values["group_id"]
            else:
                sample.state = SampleState.OPEN if kind == "return" else rng.choice(list(SampleState))


def random_values(rng: random.Random, turn_id: str) -> dict[str, Any]:
    return {
        "reward": rng.choice([0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 1.0]),
        "episode_reward": rng.choice([None, None, None, 0.0, 0.3]),
        "group_id": rng.choice([None, None, turn_id, f"g{rng.randrange(12)}"]),
    }


async def compare_all(harness: Harness, algorithm: UpdateConfig) -> Contrast:
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for sample in await harness.all(Sample):
        if sample.state == SampleState.OPEN:
            compared = sample.reward if sample.episode_reward is None else sample.episode_reward
            rewards[sample.group_id or sample.turn_id].append(compared)
    is_found = any(exceeds(max(values), min(values), algorithm.min_contrast) for values in rewards.values())
    return Contrast.EXISTS if is_found else Contrast.MISSING
