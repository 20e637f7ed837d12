"""GRPO, Dr.GRPO, DAPO, RLOO and REINFORCE++ on groups of replies, worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from alignment.algorithms import RLAlgorithm
from alignment.algorithms.base import prepare_step
from alignment.algorithms.group_relative import DAPO, GRPO, RLOO, DrGRPO, GiGPO, ReinforcePlusPlus, overlong_penalty
from alignment.config.policy_gradient_algorithms import (
    DAPOConfig,
    DrGRPOConfig,
    GiGPOConfig,
    GRPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.config.preference_algorithms import DPOConfig, KTOConfig
from alignment.errors import NothingToCompare, NoVariance, SingletonGroup
from alignment.types import Sample
from tests.support.worked_batches import gradient, make_train_data, reply

# Group a: rewards 1, 0, 0 (mean 1/3, deviation √(1/3)); group b: 2 and 4 (mean 3, deviation √2).
GROUPS = [
    reply(1.0, 2, "a"),
    reply(0.0, 2, "a"),
    reply(0.0, 1, "a"),
    reply(2.0, 1, "b"),
    reply(4.0, 1, "b"),
]


def first_token_advantages(algorithm: RLAlgorithm, samples: list[Sample]) -> list[float]:
    data = make_train_data(samples)
    prepare_step(algorithm, 0, data)
    assert data.advantages_BT is not None
    return [round(value, 4) for value in data.advantages_BT[:, 0].tolist()]


def test_grpo_advantages_by_hand() -> None:
    scale_a, value = 1 / math.sqrt(3), 1 / math.sqrt(2)
    expected = [2 / 3 / scale_a, -1 / 3 / scale_a, -1 / 3 / scale_a, -value, value]
    assert first_token_advantages(GRPO(GRPOConfig()), GROUPS) == pytest.approx(expected, abs=2e-4)


def test_grpo_gives_replies_equal_weight() -> None:
    grpo, data = GRPO(GRPOConfig(kl_coef=0.0)), make_train_data(GROUPS)
    prepare_step(grpo, 0, data)
    assert data.advantages_BT is not None
    torch.testing.assert_close(gradient(grpo, data)[0], -data.advantages_BT[0] / 2 / 5)


def test_dr_grpo_centres_and_gives_tokens_equal_weight() -> None:
    assert first_token_advantages(DrGRPO(DrGRPOConfig()), GROUPS) == pytest.approx(
        [0.6667, -0.3333, -0.3333, -1.0, 1.0], abs=1e-4
    )
    dr_grpo, data = DrGRPO(DrGRPOConfig(horizon=100)), make_train_data(GROUPS)
    prepare_step(dr_grpo, 0, data)
    assert data.advantages_BT is not None
    torch.testing.assert_close(gradient(dr_grpo, data), -data.advantages_BT / 5 / 100)


def test_rloo_advantages_by_hand() -> None:
    # 1 − 0;  0 − ½;  0 − ½;  2 − 4;  4 − 2
    assert first_token_advantages(RLOO(RLOOConfig()), GROUPS) == [1.0, -0.5, -0.5, -2.0, 2.0]


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_batch() -> None:
    samples = [reply(1.0, 1), reply(0.0, 1), reply(-1.0, 1)]
    assert first_token_advantages(ReinforcePlusPlus(ReinforcePlusPlusConfig()), samples) == [1.0, 0.0, -1.0]


def test_reinforce_plus_plus_with_group_baseline() -> None:
    pairs = [reply(1.0, 1, "a"), reply(0.0, 1, "a"), reply(9.0, 1, "b"), reply(8.0, 1, "b")]
    # ±½ four times, deviation √(4 · ¼ / 3) = 0.57735
    assert first_token_advantages(ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline="group")), pairs) == [
        0.866,
        -0.866,
        0.866,
        -0.866,
    ]


def test_dapo_skips_groups_with_equal_rewards() -> None:
    dapo, samples = DAPO(DAPOConfig()), [reply(1.0, 1, "same"), *GROUPS, reply(1.0, 1, "same"), reply(0.0)]
    assert dapo.select(samples) == [1, 2, 3, 4, 5]
    with pytest.raises(NothingToCompare):
        dapo.select([reply(1.0, 1, "same"), reply(1.0, 1, "same"), reply(0.0)])


def test_dapo_clips_higher() -> None:
    dapo, data = DAPO(DAPOConfig()), make_train_data([reply(1.0, 1, "a"), reply(-1.0, 1, "a")])
    prepare_step(dapo, 0, data)
    raised_B = torch.tensor([[math.log(1.25)], [math.log(1.25)]]) - 1
    assert (gradient(dapo, data, raised_B) != 0).all()  # below 1.28
    clipped_B = torch.tensor([[math.log(1.3)], [math.log(1.3)]]) - 1
    assert gradient(dapo, data, clipped_B)[0].item() == 0.0


def test_dapo_applies_the_overlong_penalty() -> None:
    dapo = DAPO(DAPOConfig(overlong_longest=4, overlong_buffer=2))
    # rewards 1 (2 tokens), 1 − ½ (3), 1 − 1 (4)
    lengths = [reply(1.0, 2, "a"), reply(1.0, 3, "a"), reply(1.0, 4, "a")]
    assert dapo.select(lengths) == [0, 1, 2]
    assert first_token_advantages(dapo, lengths) == [1.0, 0.0, -1.0]


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO(GRPOConfig()),
        RLOO(RLOOConfig()),
        DrGRPO(DrGRPOConfig()),
        ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline="group")),
    ],
)
def test_singleton_groups_are_skipped(algorithm: RLAlgorithm) -> None:
    assert algorithm.select([reply(1.0, 1, "once"), *GROUPS, reply(1.0)]) == [1, 2, 3, 4, 5]
    with pytest.raises(NothingToCompare):
        algorithm.select([reply(1.0, 1, "once"), reply(0.0)])
    with pytest.raises(SingletonGroup):
        first_token_advantages(algorithm, [*GROUPS, reply(1.0)])


def test_groups_with_equal_rewards_are_rejected() -> None:
    with pytest.raises(NoVariance):
        first_token_advantages(
            GRPO(GRPOConfig()), [reply(1.0, 1, "a"), reply(1.0, 1, "a"), reply(0.0, 1, "b"), reply(0.0, 1, "b")]
        )


def test_group_baseline_needs_gamma_one() -> None:
    with pytest.raises(ValueError, match="gamma"):
        ReinforcePlusPlusConfig(baseline="group", gamma=0.9)


@pytest.mark.parametrize(("length", "penalty"), [(60, 0.0), (70, -0.5), (80, -1.0), (500, -1.0)])
def test_overlong_penalty_begins_in_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 80, 20) == penalty


def turns(episode: str, *rewards: float, is_return: bool = False, agent: str | None = None) -> list[Sample]:
    """Return the turns of an episode of the group "task"; the rewards of returns belong to a depth."""
    return [
        reply(reward, 1, "task", episode=episode, depth=depth if is_return else None, agent=agent)
        for depth, reward in enumerate(rewards)
    ]


def test_statistics_of_a_group_of_episodes_are_those_of_the_episodes() -> None:
    """Three turns of a failure are one attempt: over turns the mean would be −½."""
    samples = [*turns("a", 1.0), *turns("b", -1.0, -1.0, -1.0)]
    assert first_token_advantages(DrGRPO(DrGRPOConfig()), samples) == [1.0, -1.0, -1.0, -1.0]
    assert first_token_advantages(RLOO(RLOOConfig()), samples) == [2.0, -2.0, -2.0, -2.0]
    # The deviation of 1 and −1, with Bessel's correction, is √2.
    assert first_token_advantages(GRPO(GRPOConfig()), samples) == pytest.approx([0.7071] + 3 * [-0.7071])


def test_an_episode_has_the_mean_reward_of_its_turns() -> None:
    samples = [*turns("a", 1.0, 0.0), *turns("b", -1.0), *turns("c", 0.5)]
    # The mean of ½, −1 and ½ is 0.
    assert first_token_advantages(DrGRPO(DrGRPOConfig()), samples) == pytest.approx([1.0, 0.0, -1.0, 0.5])


def test_one_episode_of_many_turns_is_nothing_to_compare() -> None:
    grpo = GRPO(GRPOConfig())
    with pytest.raises(NothingToCompare, match="no group two attempts"):
        grpo.select(turns("a", 1.0, 0.0, -1.0))
    assert grpo.select([*turns("a", 1.0, 0.0), *GROUPS[:1], *turns("b", 0.0)]) == [0, 1, 3]


def test_returns_are_compared_at_the_same_depth() -> None:
    """With γ = ½. No other attempt has a third turn: that of b is compared with nothing."""
    samples = [*turns("a", 0.5, 1.0, is_return=True), *turns("b", -0.25, -0.5, -1.0, is_return=True)]
    expected = [0.5 - 0.125, 1.0 - 0.25, -0.25 - 0.125, -0.5 - 0.25, 0.0]
    for config in (DrGRPOConfig(), DrGRPOConfig(baseline_per_agent=True)):
        assert first_token_advantages(DrGRPO(config), samples) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("algorithm", [GRPO(GRPOConfig()), GiGPO(GiGPOConfig()), DAPO(DAPOConfig())])
def test_of_two_wins_the_longer_one_has_no_large_advantage_at_its_end(algorithm: RLAlgorithm) -> None:
    """With γ = ½. At both shared depths the shorter attempt is better, and by √½ of the deviation of two."""
    samples = [*turns("a", 0.5, 1.0, is_return=True), *turns("b", 0.25, 0.5, 1.0, is_return=True)]
    step = 0.5**0.5
    assert first_token_advantages(algorithm, samples) == pytest.approx([step, step, -step, -step, 0.0], abs=1e-4)


def test_returns_of_agents_that_no_other_attempt_has_are_compared_with_nothing() -> None:
    samples = [
        *turns("a", 0.5, 1.0, is_return=True, agent="worker-1"),
        *turns("b", 0.5, 1.0, is_return=True, agent="worker-2"),
    ]
    with pytest.raises(NoVariance):
        first_token_advantages(GRPO(GRPOConfig(baseline_per_agent=True)), samples)


def test_two_branches_of_one_attempt_are_in_the_deviation() -> None:
    """Second turns: branches of 1 and 0 in a, ½ in b. Both attempts have the mean ½; the variance is (¼ + ¼) / 2."""
    first = [reply(0.5, 1, "task", episode=episode, depth=0) for episode in "ab"]
    second = [
        reply(reward, 1, "task", episode=episode, depth=1) for episode, reward in (("a", 1), ("a", 0), ("b", 0.5))
    ]
    expected = [0.0, 0.0, 1.0, -1.0, 0.0]
    assert first_token_advantages(GRPO(GRPOConfig()), first + second) == pytest.approx(expected, abs=1e-4)
    # Each less the mean of the other attempt: 1 − ½, 0 − ½ and ½ − ½.
    assert first_token_advantages(RLOO(RLOOConfig()), first + second) == [0.0, 0.0, 0.5, -0.5, 0.0]


def test_dapo_skips_the_turns_whose_returns_are_equal() -> None:
    dapo = DAPO(DAPOConfig())
    with pytest.raises(NothingToCompare):
        dapo.select([*turns("a", 0.5, 1.0, is_return=True), *turns("b", 0.5, 1.0, is_return=True)])
    samples = [*turns("a", 0.5, 1.0, is_return=True), *turns("b", 0.5, -1.0, -2.0, is_return=True)]
    assert dapo.select(samples) == [1, 3]  # the first turns are equal, and the third of b has no other


def test_agents_are_compared_by_name_where_the_baseline_is_per_agent() -> None:
    """The planner of a is liked, its worker is not; b has both, c no worker. The reviewer of c has no other."""
    samples = [
        *turns("a", 1.0, agent="planner"),
        *turns("a", -1.0, -1.0, agent="worker"),
        *turns("b", 0.0, agent="planner"),
        *turns("b", 0.5, agent="worker"),
        *turns("c", -0.25, agent="planner"),
        *turns("c", 0.75, agent="reviewer"),
    ]
    # Planners: the mean of 1, 0 and −¼. Workers: of −1 and ½. The reviewer: the group's episodes −⅓, ¼ and ¼.
    expected = [1 - 0.25, -0.75, -0.75, -0.25, 0.75, -0.5, 0.75 - 1 / 18]
    config = DrGRPOConfig(baseline_per_agent=True)
    assert first_token_advantages(DrGRPO(config), samples) == pytest.approx(expected, abs=1e-4)
    together = [reward.reward - 1 / 18 for reward in samples]
    assert first_token_advantages(DrGRPO(DrGRPOConfig()), samples) == pytest.approx(together, abs=1e-4)


def test_returns_are_compared_at_the_same_depth_of_the_same_agent() -> None:
    samples = [
        *turns("a", 0.5, is_return=True, agent="planner"),
        *turns("a", 1.0, is_return=True, agent="worker"),
        *turns("b", -0.5, is_return=True, agent="planner"),
        *turns("b", 0.0, is_return=True, agent="worker"),
    ]
    assert first_token_advantages(DrGRPO(DrGRPOConfig()), samples) == [0.5, 0.5, -0.5, -0.5]


def test_gigpo_adds_the_comparison_of_turns_with_the_same_prompt() -> None:
    """Attempts a and b begin with the same prompt. a wins after two turns, b loses after three; c begins elsewhere.

    γ = ½. Outcomes 1, −1 and 0: mean 0, deviation 1. Returns at the shared prompt ½ and −¼: mean ⅛, deviation
    ⅜ · √2. The second turns have another prompt each.
    """

    def turn(episode: str, outcome: float, turn_return: float, *prompt: int) -> Sample:
        return reply(outcome, 1, "task", episode=episode, prompt_ids=prompt, turn_return=turn_return)

    samples = [
        *(turn("a", 1.0, 0.5, 1), turn("a", 1.0, 1.0, 1, 5)),
        *(turn("b", -1.0, -0.25, 1), turn("b", -1.0, -0.5, 1, 6), turn("b", -1.0, -1.0, 1, 6, 7)),
        turn("c", 0.0, 0.0, 2),
    ]
    step = 0.5**0.5
    assert first_token_advantages(GiGPO(GiGPOConfig()), samples) == pytest.approx(
        [1 + step, 1.0, -1 - step, -1.0, -1.0, 0.0], abs=1e-4
    )
    half = GiGPO(GiGPOConfig(step_weight=0.5, scale_by_std=False))
    assert first_token_advantages(half, samples) == pytest.approx([1.1875, 1.0, -1.1875, -1.0, -1.0, 0.0])
    assert half.get_metrics()["critic/shared_states"] == pytest.approx(1 / 3)
    # Attempt c, too, sees 6 after the reply 5, and there its return is 0: with −½ the mean is −¼, the deviation ¼ · √2.
    first, seen = replace(samples[3], prompt_ids=(1, 5, 6)), turn("c", 0.0, 0.0, 2, 5, 6)
    advantages = first_token_advantages(GiGPO(GiGPOConfig()), [*samples[:3], first, *samples[4:], seen])
    assert (advantages[3], advantages[6]) == pytest.approx((-1 - step, step), abs=1e-4)
    # Between groups no prompt is shared, and replies without an episode have no returns: GRPO.
    assert first_token_advantages(GiGPO(GiGPOConfig()), GROUPS) == first_token_advantages(GRPO(GRPOConfig()), GROUPS)


def test_pairs_are_of_one_prompt_and_never_of_episodes() -> None:
    assert not DPOConfig().compares_episodes and not KTOConfig().compares_episodes
    assert GRPOConfig().compares_episodes and not ReinforcePlusPlusConfig().compares_episodes
