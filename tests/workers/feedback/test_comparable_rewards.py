"""Replies to one prompt are compared by the reward sources that all of them have."""

import pytest

from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from alignment.config.rewards import RewardsConfig
from app.core.settings import Settings
from app.models import Feedback, Sample, Turn
from tests.support.deployment import Harness
from workers.curate import curate
from workers.feedback.rewards import record_reward, update_turn_samples


@pytest.fixture
def grpo(harness: Harness) -> Settings:
    """Return settings of an algorithm that compares the replies of a group, with a judge beside people's feedback."""
    sources = [{"type": "explicit"}, {"type": "judge", "url": "http://127.0.0.1:9", "model": "m"}]
    rewards = RewardsConfig.model_validate({"sources": sources})
    return harness.settings.replace({"rewards": rewards, "algorithm": GRPOConfig()})


async def make_choices(harness: Harness, number: int) -> list[Turn]:
    """Create the choices of one completion."""
    first = await harness.turn()
    others = [await harness.turn(completion_id=first.id, choice_index=index) for index in range(1, number)]
    return [first, *others]


async def judge(harness: Harness, settings: Settings, verdicts: dict[Turn, float]) -> None:
    async with harness.db.write() as session:
        for turn, value in verdicts.items():
            await record_reward(session, turn.id, "judge", value)
        await update_turn_samples(session, {turn.id for turn in verdicts}, settings)


async def read_samples(harness: Harness) -> dict[str, tuple[float, str | None]]:
    return {sample.turn_id: (sample.reward, sample.group_id) for sample in await harness.all(Sample)}


async def test_a_vote_that_one_of_the_judged_replies_got_does_not_decide(harness: Harness, grpo: Settings) -> None:
    a, b = await make_choices(harness, 2)
    await judge(harness, grpo, {a: 0.2, b: 0.4})
    await harness.vote(a.id)
    await curate(harness.db, grpo)
    assert await read_samples(harness) == {a.id: (0.2, a.id), b.id: (0.4, a.id)}, "the judge prefers the second"
    [vote] = await harness.all(Feedback)
    outcome = (await harness.api.get(f"/v1/feedback/{vote.id}")).json()["outcome"]
    assert (outcome["state"], outcome["rule"]) == ("not_learned", "not_used")


async def test_votes_on_all_replies_count_with_the_judge(harness: Harness, grpo: Settings) -> None:
    a, b = await make_choices(harness, 2)
    await judge(harness, grpo, {a: 0.0, b: 0.0})
    await harness.vote(a.id)
    await harness.vote(a.id, "down", choice_index=1)
    await curate(harness.db, grpo)
    samples = await read_samples(harness)
    assert samples[a.id][0] > 0.5 and samples[b.id][0] < -0.5


async def test_a_reply_that_only_a_person_judged_leaves_the_group(harness: Harness, grpo: Settings) -> None:
    a, b, c = await make_choices(harness, 3)
    await harness.vote(a.id)
    await curate(harness.db, grpo)
    await judge(harness, grpo, {b: 0.2, c: 0.4})
    expected = {a.id: (1.0, f"turn/{a.id}"), b.id: (0.2, a.id), c.id: (0.4, a.id)}
    assert await read_samples(harness) == expected


async def test_algorithms_that_compare_no_replies_use_every_source(harness: Harness, grpo: Settings) -> None:
    a, b = await make_choices(harness, 2)
    settings = grpo.model_copy(update={"algorithm": PPOConfig()})
    await judge(harness, settings, {a: 0.2, b: 0.4})
    await harness.vote(a.id)
    await curate(harness.db, settings)
    assert (await read_samples(harness))[a.id][0] > 0.9
