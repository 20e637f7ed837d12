"""Comparisons have a bound, however many replies and votes there are. Work is counted, not time.

The bound on a canary's turns: tests/workers/training/test_assembly_cost.py.
"""

from typing import Any

import pytest
from sqlalchemy import insert, update

from alignment.config.rewards import RewardsConfig
from alignment.release.shadow import PairCounts, ShadowConfig
from app.core.database import now
from app.deployments import comparison
from app.models import Origin, Reward, Rollout, RolloutState, Turn, Version, VersionState
from tests.support.deployment import Harness
from tests.support.statement_work import count_work
from tests.support.turns import make_turn
from tests.support.waiting_samples import add_turns, analyze

FEW, MANY = 500, 2000
SOURCE = "ended"
REWARDS = RewardsConfig.model_validate({"sources": [{"type": "rule", "name": SOURCE, "function": "ended"}]})


async def add_pairs(harness: Harness, version: Version, first: int, count: int, gain: int, **columns: Any) -> None:
    """Insert served replies with a shadow reply each, `columns` being those of the latter, and rewards of both."""
    prefix = f"p{first}"
    served = await add_turns(harness, count, prefix)
    policy = await harness.policy()
    shadows = [
        make_turn(policy, version, f"chatcmpl-s{prefix}-{n:06}", origin=Origin.SHADOW, shadow_of_id=turn.id, **columns)
        for n, turn in enumerate(served)
    ]
    times = [
        {"id": turn.id, "created_at": float(first + n)} for turns in (served, shadows) for n, turn in enumerate(turns)
    ]
    rewards = [
        {"id": f"rew-{turn.id}", "turn_id": turn.id, "source": SOURCE, "reward_source": SOURCE, "value": value}
        for turns, value in ((served, 0.0), (shadows, float(gain)))
        for turn in turns
    ]
    rollout: dict[str, Any] = {"policy_id": policy.id, "origin": Origin.SHADOW, "choice_index": 0, "tokens": 2}
    rollout |= {"state": RolloutState.DONE, "due_at": 0.0, "expires_at": 0.0, "duration_seconds": 1.0}
    async with harness.db.write() as session:
        session.add_all(shadows)
        await session.flush()
        await session.execute(update(Turn), times)
        await session.execute(insert(Reward), rewards)
        await session.execute(insert(Rollout), [{"id": turn.id, **rollout} for turn in shadows])
    await analyze(harness)


async def compare(harness: Harness, version: Version) -> tuple[int, PairCounts]:
    """Return the work of a comparison, and its pairs."""
    serving, version = await harness.serving(), await harness.get(Version, version.id)
    async with count_work(harness.db) as work, harness.db.read() as session:
        _, _, pairs, _ = await comparison.evaluate_shadow(session, version, serving.id, ShadowConfig(), REWARDS)
    return work.amount, pairs


@pytest.fixture
async def shadow(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Version:
    monkeypatch.setattr(comparison, "MAX_ARM_TURNS", FEW)
    monkeypatch.setattr(comparison, "MAX_READ_TURNS", FEW)
    return await harness.version(VersionState.SHADOW, shadow_since=now())


async def test_the_comparison_of_a_version_in_shadow_has_a_bound(harness: Harness, shadow: Version) -> None:
    """The newest pairs count."""
    await add_pairs(harness, shadow, 0, FEW, gain=1)
    few, pairs = await compare(harness, shadow)
    assert pairs == PairCounts(better=FEW)
    await add_pairs(harness, shadow, FEW, MANY - FEW, gain=-1)
    many, pairs = await compare(harness, shadow)
    assert pairs == PairCounts(worse=FEW)
    assert many < 1.5 * few


async def test_shadow_replies_that_are_not_compared_are_read_up_to_a_bound(harness: Harness, shadow: Version) -> None:
    """Such as those of people who have withdrawn their consent, or of another version that served before."""
    await add_pairs(harness, shadow, 0, FEW, gain=1, deleted_at=1.0)
    few, pairs = await compare(harness, shadow)
    assert pairs == PairCounts()
    await add_pairs(harness, shadow, FEW, MANY - FEW, gain=1, deleted_at=1.0)
    many, _ = await compare(harness, shadow)
    assert many < 1.5 * few


async def test_the_comparison_of_a_canary_reads_no_votes_but_those_on_its_turns(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large table: PostgreSQL may well read a few pages of votes as a whole (see `canary_totals`)."""
    monkeypatch.setattr(comparison, "MAX_ARM_TURNS", FEW)
    serving, amounts = await harness.serving(), list[int]()
    for prefix, count in (("a", FEW), ("b", MANY)):
        turns = await add_turns(harness, count, prefix)
        votes = [
            {
                "id": f"rew-{turn.id}",
                "turn_id": turn.id,
                "source": "default/HUMAN/ada",
                "reward_source": "explicit",
                "feedback_seq": number,
                "rater": "HUMAN/ada",
                "value": 1.0,
            }
            for number, turn in enumerate(turns)
        ]
        async with harness.db.write() as session:
            times = [{"id": turn.id, "created_at": float(MANY * len(amounts) + n)} for n, turn in enumerate(turns)]
            await session.execute(update(Turn), times)
            await session.execute(insert(Reward), votes)
        await analyze(harness)
        async with count_work(harness.db) as work, harness.db.read() as session:
            arm = await comparison.read_arm(session, serving.id, 0.0)
        assert (arm.turns, arm.rated) == (FEW, 1)
        amounts.append(work.amount)
    assert amounts[1] < 1.5 * amounts[0]
