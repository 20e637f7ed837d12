"""Sparse feedback: its measurement, and the reward model that it adds to a policy's rewards."""

from typing import Any

import pytest
from sqlalchemy import update

from alignment.config.rewards import SPARSE_REWARD_MODEL, RewardsConfig
from app.core.database import now
from app.models import Audit, Policy, Turn
from app.training import feedback_density
from app.training.policy_config import effective_rewards
from tests.support.deployment import Harness
from tests.support.human_feedback import add_rating
from tests.support.turns import make_turn


async def create_replies(harness: Harness, count: int, num_rated: int, *, person: str = "p", **values: Any) -> None:
    """Create replies that are old enough to be measured, the first of them rated."""
    policy, version = await harness.policy(), await harness.serving()
    prefix = f"{person}-{num_rated}-{count}"
    turns = [make_turn(policy, version, f"chatcmpl-{prefix}-{number}", **values) for number in range(count)]
    async with harness.db.write() as session:
        session.add_all(turns)
        await session.flush()
        age = {"created_at": now() - 2 * feedback_density.MIN_AGE_SECONDS}
        await session.execute(update(Turn).where(Turn.id.in_([turn.id for turn in turns])).values(age))
    for number, turn in enumerate(turns[:num_rated]):
        await add_rating(harness, turn, 1.0 if number % 2 else -1.0, f"{prefix}-{number}")


async def measure(harness: Harness) -> Policy:
    async with harness.db.write() as session:
        await session.execute(update(Policy).values(feedback_measured_at=None))
    await feedback_density.measure_feedback(harness.db, harness.settings)
    return await harness.policy()


async def test_few_rated_replies_make_feedback_sparse_and_many_make_it_dense(harness: Harness) -> None:
    await create_replies(harness, 200, 10)
    policy = await measure(harness)
    assert (policy.feedback_share, policy.sparse_feedback) == (0.05, True)
    assert effective_rewards(policy, harness.settings).sources[-1] == SPARSE_REWARD_MODEL
    rewards = (await harness.api.get("/v1/policies/shop/rewards")).json()["rewards"]
    assert [source["type"] for source in rewards["sources"]] == ["explicit", "learned"]
    view = (await harness.api.get("/v1/policies/shop")).json()
    assert (view["feedback_share"], view["sparse_feedback"]) == (0.05, True)

    await create_replies(harness, 50, 50, person="between")
    policy = await measure(harness)
    assert policy.feedback_share == pytest.approx(60 / 250) and policy.sparse_feedback, (
        "between the limits nothing changes"
    )
    await create_replies(harness, 100, 100, person="many")
    policy = await measure(harness)
    assert policy.feedback_share == pytest.approx(160 / 350) and not policy.sparse_feedback
    assert effective_rewards(policy, harness.settings).reward_model is None
    audits = [(row.action, row.reason) for row in await harness.all(Audit) if row.action.startswith("feedback.")]
    assert audits == [
        ("feedback.sparse", "people gave feedback on 5.0% of the newest replies"),
        ("feedback.dense", "people gave feedback on 45.7% of the newest replies"),
    ]


async def test_nothing_is_concluded_from_few_or_new_replies(harness: Harness) -> None:
    await create_replies(harness, 199, 0)
    policy = await harness.policy()
    async with harness.db.write() as session:
        session.add_all([make_turn(policy, await harness.serving(), f"chatcmpl-new-{number}") for number in range(50)])
    policy = await measure(harness)
    assert (policy.feedback_share, policy.sparse_feedback) == (None, False)


async def test_replies_that_nobody_may_train_on_and_votes_of_programs_do_not_count(harness: Harness) -> None:
    await create_replies(harness, 200, 100)
    await create_replies(harness, 200, 0, person="excluded", exclusion_reason="no consent")
    assert (await measure(harness)).feedback_share == 0.5
    await create_replies(harness, 200, 0, person="nobody")
    turn = (await harness.all(Turn))[-1]
    await add_rating(harness, turn, 1.0, "check", rater="CODE/check")
    assert (await measure(harness)).feedback_share == 0.25


async def test_the_share_is_measured_once_a_minute(harness: Harness) -> None:
    await create_replies(harness, 200, 10)
    await measure(harness)
    await create_replies(harness, 200, 200, person="later")
    await feedback_density.measure_feedback(harness.db, harness.settings)
    assert (await harness.policy()).feedback_share == 0.05


@pytest.mark.parametrize(("feedback", "measured", "has_model"), [("sparse", False, True), ("dense", True, False)])
async def test_a_setting_other_than_auto_overrules_the_measurement(
    harness: Harness, feedback: str, measured: bool, has_model: bool
) -> None:
    policy = await harness.policy()
    policy.sparse_feedback = measured
    settings = harness.settings.replace({"feedback": feedback})
    assert (effective_rewards(policy, settings).reward_model is not None) == has_model


async def test_a_policy_with_rewards_of_its_own_keeps_them(harness: Harness) -> None:
    policy = await harness.policy()
    policy.rewards = {"sources": [{"type": "explicit"}]}
    settings = harness.settings.replace({"feedback": "sparse"})
    assert effective_rewards(policy, settings).reward_model is None


def test_a_reply_waits_for_a_vote_before_its_score_is_learned_from() -> None:
    explicit, _ = feedback_density.add_reward_model(RewardsConfig()).sources
    assert explicit.window_seconds == feedback_density.VOTE_WINDOW_SECONDS
    patient = RewardsConfig.model_validate({"sources": [{"type": "explicit", "window_seconds": 600}]})
    assert feedback_density.add_reward_model(patient).sources[0].window_seconds == 600


@pytest.mark.parametrize(
    "sources",
    [
        [{"type": "explicit"}, {"type": "learned", "min_feedback": 500}],
        [{"type": "rule", "name": "ended", "function": "ended"}],
    ],
)
def test_rewards_with_a_model_or_without_feedback_stay_as_they_are(sources: list[dict[str, Any]]) -> None:
    config = RewardsConfig.model_validate({"sources": sources})
    assert feedback_density.add_reward_model(config) is config
