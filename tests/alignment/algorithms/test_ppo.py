"""PPO on two replies, worked out by hand, and the length penalty of length-aware PPO."""

import json
import math
from typing import Any

import pytest
import torch

from alignment.algorithms.base import prepare_step
from alignment.algorithms.baselines import (
    MAX_AGENTS,
    MAX_VERSIONS,
    AgentBaselines,
    VersionBaseline,
    compare_with_others,
)
from alignment.algorithms.ppo import PPO, LengthAwarePPO, explained_variance
from alignment.config.algorithm import CorrectionConfig
from alignment.config.policy_gradient_algorithms import AdaptiveKLConfig, LengthAwarePPOConfig, PPOConfig
from alignment.errors import ForeignSamples, NoVariance
from alignment.json_values import as_list
from alignment.types import Sample, UpdateReport
from tests.support.worked_batches import gradient, make_train_data, reduce_loss, reduce_value_loss, reply

REPLIES = [reply(1.0, 2), reply(-1.0, 1)]


def later_ppo(config: PPOConfig) -> PPO:
    """Return PPO after updates whose rewards had the mean 0: advantages are rewards."""
    ppo = PPO(config)
    ppo.load_state_dict({"baseline": 0.0})
    return ppo


def test_running_baseline_advantages_and_update() -> None:
    ppo, data = PPO(PPOConfig(whiten="off", baseline_decay=0.5)), make_train_data([reply(1.0, 2), reply(0.0, 1)])
    ppo.load_state_dict({"baseline": 0.5})
    prepare_step(ppo, 0, data)
    assert data.advantages_BT is not None
    assert data.advantages_BT.tolist() == [[0.5, 0.5], [-0.5, 0.0]]
    assert ppo.state_dict() == {"version_rewards": [[0, 2.0, 1.0]]}


def test_replies_are_compared_with_those_of_versions_near_their_own() -> None:
    ppo = PPO(PPOConfig(whiten="off", baseline_decay=0.5))
    ppo.load_state_dict({"version_rewards": [[1, 2.0, 0.0], [2, 2.0, 2.0]]})  # the means are 0 and 1
    data = make_train_data([reply(1.0, 1, version=version) for version in (3, 2, 1, 0, 9)])
    prepare_step(ppo, 0, data)
    assert data.advantages_BT is not None
    # From v2 on v1 counts half: (2 + ½ · 0) / (2 + ½ · 2) = 2/3. Before v2 it is v2: (0 + ½ · 2) / 3 = 1/3.
    expected = [1 / 3, 1 / 3, 2 / 3, 2 / 3, 1 / 3]
    assert data.advantages_BT[:, 0].tolist() == pytest.approx(expected)
    rewards = [[0, 1.0, 1.0], [1, 3.0, 1.0], [2, 3.0, 3.0], [3, 1.0, 1.0], [9, 1.0, 1.0]]
    assert ppo.state_dict() == {"version_rewards": rewards}
    other = PPO(PPOConfig())
    other.load_state_dict(json.loads(json.dumps(ppo.state_dict())))
    assert other.state_dict() == ppo.state_dict()


@pytest.mark.parametrize("per_version", [True, False])
@pytest.mark.parametrize("num_fresh", [0, 2])
@pytest.mark.parametrize("lag", [0, 1, 5, 8, 64])
def test_baseline_stays_within_the_rewards_at_any_lag(lag: int, num_fresh: int, per_version: bool) -> None:
    """Approval rises from 25 to 75 % at v20. Votes come `lag` updates later, those on `num_fresh` replies at once."""
    ppo = PPO(PPOConfig(whiten="off", baseline_per_version=per_version))

    def vote(version: int, number: int) -> float:
        return 1.0 if number % 4 < (1 if version < 20 else 3) else -1.0

    for step in range(200):
        late = max(0, step - lag)
        replies = [reply(vote(late, number), 1, version=late) for number in range(4)]
        replies += [reply(vote(step, number), 1, version=step) for number in range(-num_fresh, 0)]
        data = make_train_data(replies)
        ppo.before_train_step(step, data)
        advantages_BT = ppo.compute_advantages(data)
        assert float(advantages_BT.abs().max()) <= 2.0 + 1e-6, step  # a reward is at most 2 from another
        assert -1.0 <= ppo.baseline.value <= 1.0
    assert num_fresh or ppo.baseline.value == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("per_version", [True, False])
def test_rewards_count_in_the_baseline_by_their_weight(per_version: bool) -> None:
    """A score of 1.0 that is right by chance moves the baseline by less than a vote does."""
    ppo = PPO(PPOConfig(whiten="off", baseline_decay=0.5, baseline_per_version=per_version))
    data = make_train_data([reply(1.0, 1), reply(-1.0, 1), reply(1.0, 1, weight=0.2)])
    prepare_step(ppo, 0, data)
    assert data.advantages_BT is not None
    # the others' means: (−1 + 0.2) / 1.2, (1 + 0.2) / 1.2 and 0 / 2
    assert data.advantages_BT[:, 0].tolist() == pytest.approx([1 + 0.8 / 1.2, -2.0, 1.0])
    # 0.2 / 2.2: the sum of the weighted rewards by that of the weights
    assert ppo.baseline.value == pytest.approx(0.2 / 2.2)


def test_a_reply_that_an_uncertain_model_calls_good_is_good() -> None:
    """24 votes, 85 % up, and 72 scores of 0.8 or −0.8 in which there is little confidence.

    With the confidence in the reward, 0.2 · 0.8, a good reply was worse than the mean of 0.7.
    """
    votes = [reply(1.0 if number < 20 else -1.0, 1) for number in range(24)]
    scores = [reply(0.8 if number < 61 else -0.8, 1, weight=0.2) for number in range(72)]
    data = make_train_data([*votes, *scores])
    prepare_step(PPO(PPOConfig(whiten="off")), 0, data)
    assert data.advantages_BT is not None and data.weights_B is not None
    good, bad = data.advantages_BT[24, 0], data.advantages_BT[-1, 0]
    assert good > 0 > bad
    assert float(data.weights_B[-1] / data.weights_B[0]) == pytest.approx(0.2)


def test_votes_of_another_day_are_compared_with_the_nearest_version() -> None:
    ppo = PPO(PPOConfig(whiten="off"))
    ppo.load_state_dict({"version_rewards": [[version, 4.0, 2.0] for version in range(3000, 3300)]})
    data = make_train_data([reply(1.0, 1, version=0), reply(-1.0, 1, version=0)])
    prepare_step(ppo, 0, data)
    assert data.advantages_BT is not None and data.advantages_BT[:, 0].tolist() == pytest.approx([0.5, -1.5])
    versions = [as_list(row)[0] for row in as_list(ppo.state_dict()["version_rewards"])]
    assert versions == list(range(3300 - MAX_VERSIONS, 3300)), "the newest are remembered"


def test_one_running_mean_for_all_versions_is_a_setting() -> None:
    ppo = PPO(PPOConfig(whiten="off", baseline_decay=0.5, baseline_per_version=False))
    ppo.load_state_dict({"baseline": 0.75})
    data = make_train_data([reply(1.0, 1), reply(1.0, 1, version=5), reply(-1.0, 1, version=9), reply(-1.0, 1)])
    prepare_step(ppo, 0, data)
    assert data.advantages_BT is not None
    assert data.advantages_BT[:, 0].tolist() == [0.25, 0.25, -1.75, -1.75]
    assert ppo.state_dict() == {"baseline": 0.375, "baseline_weight": 1.0}  # 0.5 · 0.75 + 0.5 · 0


def test_scale_whitening_does_not_centre() -> None:
    ppo, data = PPO(PPOConfig()), make_train_data(REPLIES)
    ppo.load_state_dict({"baseline": 0.5})
    prepare_step(ppo, 0, data)
    # advantages 0.5, 0.5, −1.5 over three tokens: root mean square √(2.75 / 3)
    assert data.advantages_BT is not None
    expected = torch.tensor([[0.5, 0.5], [-1.5, 0.0]]) / math.sqrt(2.75 / 3)
    torch.testing.assert_close(data.advantages_BT, expected)


def test_first_update_compares_each_reward_with_the_mean_of_the_others() -> None:
    ppo = PPO(PPOConfig(whiten="off", baseline_decay=0.5))
    data = make_train_data([reply(1.0, 1), reply(0.5, 1), reply(0.0, 1)])
    prepare_step(ppo, 0, data)
    assert data.advantages_BT is not None
    assert data.advantages_BT[:, 0].tolist() == [0.75, 0.0, -0.75]
    assert ppo.state_dict() == {"version_rewards": [[0, 3.0, 1.5]]}
    assert compare_with_others(torch.tensor([1.0]), [reply(1.0)]).tolist() == [0.0]


@pytest.mark.parametrize("per_version", [True, False])
def test_baseline_is_the_weighted_mean_of_the_batches_from_the_first_one_on(per_version: bool) -> None:
    ppo = PPO(PPOConfig(whiten="off", baseline_decay=0.5, baseline_per_version=per_version))
    for version, mean in enumerate((1.0, 0.0)):
        rewards = (mean + 0.5, mean - 0.5)
        prepare_step(ppo, version, make_train_data([reply(reward, 1, version=version) for reward in rewards]))
    # weights 1/4 and 1/2 of the two batches; with the initial value 0 it was 1/4
    assert ppo.baseline.value == pytest.approx(1 / 3)


def test_state_of_a_release_without_baselines_by_version_is_the_first_baseline() -> None:
    for per_version in (True, False):
        ppo = PPO(PPOConfig(whiten="off", baseline_per_version=per_version))
        ppo.load_state_dict({"baseline": 0.25, "baseline_weight": 0.75, "earlier_baselines": [0.0]})
        data = make_train_data([reply(1.0, 1), reply(-1.0, 1)])
        prepare_step(ppo, 0, data)
        assert data.advantages_BT is not None and data.advantages_BT[:, 0].tolist() == [0.75, -1.25]


@pytest.mark.parametrize("per_version", [True, False])
def test_each_agent_has_a_baseline_of_its_own(per_version: bool) -> None:
    """The planner's rewards are 1 and 0, then ½; the worker's −1, then −1. The reply has none to compare with."""
    config = PPOConfig(whiten="off", baseline_per_agent=True, baseline_per_version=per_version)
    ppo, named = PPO(config), ("planner", "planner", "worker", None)
    data = make_train_data([reply(r, 1, agent=agent) for r, agent in zip((1.0, 0.0, -1.0, 1.0), named, strict=True)])
    prepare_step(ppo, 0, data)
    assert data.advantages_BT is not None and data.advantages_BT[:, 0].tolist() == [1.0, -1.0, 0.0, 0.0]
    restored = PPO(config)
    restored.load_state_dict(json.loads(json.dumps(ppo.state_dict())))
    again = make_train_data([reply(0.5, 1, agent="planner"), reply(-1.0, 1, agent="worker"), reply(0.0, 1)])
    prepare_step(restored, 1, again)
    # Planner: ½ − ½. Worker: −1 + 1. The reply: 0 − 1.
    assert again.advantages_BT is not None
    assert again.advantages_BT[:, 0].tolist() == pytest.approx([0.0, 0.0, -1.0], abs=1e-6)
    assert {as_list(row)[0] for row in as_list(restored.state_dict()["agents"])} == {"planner", "worker", ""}


def test_agents_beyond_a_limit_are_forgotten() -> None:
    baselines = AgentBaselines(lambda: VersionBaseline(0.7))
    for number in range(MAX_AGENTS + 10):
        baselines.compare(torch.tensor([1.0]), [reply(1.0, 1, agent=f"run-{number}")])
    assert len(baselines.by_agent) == MAX_AGENTS and f"run-{MAX_AGENTS + 9}" in baselines.by_agent


def test_gae_advantages_by_hand() -> None:
    values_BT = torch.tensor([[0.2, 0.6], [0.0, 0.0]])
    ppo, data = PPO(PPOConfig(estimator="gae", lam=0.5, whiten="off")), make_train_data(REPLIES, values_BT=values_BT)
    prepare_step(ppo, 0, data)
    # last token: 1 − 0.6 = 0.4;  first: (0 + 0.6 − 0.2) + 0.5 · 0.4 = 0.6;  the other reply: −1 − 0
    assert data.advantages_BT is not None and data.returns_BT is not None
    torch.testing.assert_close(data.advantages_BT, torch.tensor([[0.6, 0.4], [-1.0, 0.0]]))
    torch.testing.assert_close(data.returns_BT[0], torch.tensor([0.8, 1.0]))


def test_turn_gae_by_hand() -> None:
    """Turns 1 – 2 – 3 of one line, each of two tokens; γ = λ = ½. Turn 2 was marked down, and the outcome is 1.

    With γ = ½ the returns are 1 for turn 3, −1 + ½ for 2 and −¼ for 1.
    """

    def turn(id: str, parent: str | None, turn_reward: float, value: float) -> Sample:
        num_next = 0 if id == "3" else 1
        return reply(value, 2, turn_id=id, parent=parent, num_next=num_next, turn_reward=turn_reward, episode="e")

    samples = [turn("3", "2", 1.0, 1.0), turn("1", None, 0.0, -0.25), turn("2", "1", -1.0, -0.5)]
    # The value before the first token of each turn; what follows in the turn does not matter.
    values_BT = torch.tensor([[0.5, 9.0], [0.25, 9.0], [-0.5, 9.0]])
    config = PPOConfig(estimator="turn_gae", gamma=0.5, lam=0.5, whiten="off")
    ppo, data = PPO(config), make_train_data(samples, values_BT=values_BT)
    prepare_step(ppo, 0, data)
    # 3: 1 − 0.5. 2: (−1 + ½ · 0.5 + 0.5) + ¼ · 0.5 = −0.125. 1: (0 − ½ · 0.5 − 0.25) − ¼ · 0.125 = −0.53125.
    expected_B1 = torch.tensor([[0.5], [-0.53125], [-0.125]])
    assert data.advantages_BT is not None and data.returns_BT is not None
    torch.testing.assert_close(data.advantages_BT, expected_B1.expand(3, 2))
    torch.testing.assert_close(data.returns_BT, (expected_B1 + values_BT[:, :1]).expand(3, 2))


def test_turn_gae_where_a_turn_branches_or_the_next_one_is_not_in_the_batch() -> None:
    samples = [
        reply(0.0, 1, turn_id="1", turn_reward=0.0, num_next=2),
        reply(1.0, 1, turn_id="2", parent="1", turn_reward=1.0),
        reply(-1.0, 1, turn_id="3", parent="1", turn_reward=-1.0),
        reply(0.5, 1, turn_id="8", parent="7", turn_reward=0.0, num_next=1),  # neither 7 nor 9, which went on from 8
        reply(1.0, 1, turn_id="no episode"),
        reply(0.75, 1, turn_id="10", turn_reward=0.0, num_next=2),
        reply(1.0, 1, turn_id="11", parent="10", turn_reward=1.0),  # without 12, which went on from 10, too
        reply(-1.0, 1, turn_id="13", parent="11"),  # the agent did not go on with this reply: it has no part in returns
    ]
    values_BT = torch.tensor([[0.0], [0.5], [0.5], [0.25], [0.5], [0.25], [0.5], [0.5]])
    config = PPOConfig(estimator="turn_gae", gamma=1.0, lam=0.5, whiten="off")
    ppo, data = PPO(config), make_train_data(samples, values_BT=values_BT)
    prepare_step(ppo, 0, data)
    # 1: 0 + mean(0.5, 0.5) − 0 + ½ · mean(0.5, −1.5). 8 and 10: their returns − V.
    assert data.advantages_BT is not None
    assert data.advantages_BT[:, 0].tolist() == pytest.approx([0.25, 0.5, -1.5, 0.25, 0.5, 0.5, 0.5, -1.5])


def test_value_loss_uses_the_returns() -> None:
    zero_BT = torch.zeros(2, 2)
    ppo, data = (
        PPO(PPOConfig(estimator="gae", whiten="off", value_clip=None)),
        make_train_data(REPLIES, values_BT=zero_BT),
    )
    prepare_step(ppo, 0, data)
    metrics = reduce_value_loss(ppo, data, zero_BT)
    assert metrics["loss"] == pytest.approx(0.5)  # ½ · mean of (0 ∓ 1)² over three tokens


def test_explained_variance_by_hand() -> None:
    mask_BT, returns_BT = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[0.0, 2.0, 9.0]])
    assert explained_variance(returns_BT, returns_BT, mask_BT) == 1.0
    assert explained_variance(torch.tensor([[0.5, 1.5, 9.0]]), returns_BT, mask_BT) == pytest.approx(0.75)
    assert explained_variance(returns_BT, torch.ones(1, 3), mask_BT) == 0.0


def test_first_step_gradient_is_reinforce() -> None:
    ppo, data = later_ppo(PPOConfig(whiten="off", kl_coef=0.0)), make_train_data(REPLIES)
    prepare_step(ppo, 0, data)
    # −A / (three tokens)
    torch.testing.assert_close(gradient(ppo, data), torch.tensor([[-1.0, -1.0], [1.0, 0.0]]) / 3)
    metrics = reduce_loss(ppo, data)[1]
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_temperatures_of_sapo_are_settings() -> None:
    ppo = later_ppo(PPOConfig(whiten="off", kl_coef=0.0, loss="sapo", tau_pos=2.0, tau_neg=4.0))
    data = make_train_data(REPLIES)
    prepare_step(ppo, 0, data)
    # at a ratio of 1 a token's loss is −A · 2/τ: −1 and −1 in the first reply, ½ in the second
    assert reduce_loss(ppo, data)[1]["actor/pg_loss"] == pytest.approx(-0.25)


def test_stale_samples_have_truncated_weights() -> None:
    rollout_logprobs_BT = torch.tensor([[-1.0 + math.log(2), -6.0], [-1.0, 0.0]])
    ppo, data = (
        later_ppo(PPOConfig(whiten="off", kl_coef=0.0)),
        make_train_data(REPLIES, rollout_logprobs_BT=rollout_logprobs_BT),
    )
    prepare_step(ppo, 0, data)
    # weights parent / rollout: ½, e⁵ truncated at 2, 1
    torch.testing.assert_close(gradient(ppo, data), torch.tensor([[-0.5, -2.0], [1.0, 0.0]]) / 3)


def test_proximal_rollout_uses_recorded_log_probs() -> None:
    recorded_BT = torch.tensor([[-1.0 - math.log(1.5), -1.0], [-1.0, 0.0]])
    algorithm_config = PPOConfig(whiten="off", kl_coef=0.0, proximal="rollout", correction=CorrectionConfig(mode="off"))
    ppo, data = later_ppo(algorithm_config), make_train_data(REPLIES, rollout_logprobs_BT=recorded_BT)
    assert not ppo.needs_old_logprobs
    prepare_step(ppo, 0, data)
    # the ratio of the first token is 1.5, which the clip excludes: its gradient is 0
    torch.testing.assert_close(gradient(ppo, data), torch.tensor([[0.0, -1.0], [1.0, 0.0]]) / 3)


def test_proximal_loglinear_interpolates_by_lag() -> None:
    ppo = later_ppo(PPOConfig(whiten="off", kl_coef=0.0, proximal="loglinear"))
    samples = [reply(1.0, 2, lag=1), reply(-1.0, 1)]
    data = make_train_data(samples)
    prepare_step(ppo, 0, data)
    assert not ppo.needs_old_logprobs
    logprobs_BT = torch.tensor([[-1.0 + math.log(1.1), -1.0], [-1.0 + math.log(1.1), 0.0]])
    # lag 1: α = ½, so old = −1 + ½ ln 1.1, ratio √1.1, weight √1.1; lag 0: old = −1, ratio 1.1, weight 1
    torch.testing.assert_close(gradient(ppo, data, logprobs_BT), torch.tensor([[-1.1, -1.0], [1.1, 0.0]]) / 3)


def test_kl_in_loss() -> None:
    ppo, data = PPO(PPOConfig(whiten="off", kl_coef=0.1, kl_kind="k1")), make_train_data(REPLIES)
    prepare_step(ppo, 0, data)
    metrics = reduce_loss(ppo, data, torch.tensor([[-0.4, -1.0], [-1.0, 0.0]]))[1]
    assert metrics["actor/kl_loss"] == pytest.approx(0.6 / 3)
    assert metrics["loss"] == pytest.approx(metrics["actor/pg_loss"] + 0.1 * 0.2)


def test_kl_in_reward_is_per_token() -> None:
    ref_logprobs_BT = torch.tensor([[-1.5, -1.0], [-1.0, 0.0]])
    algorithm_config = PPOConfig(estimator="gae", kl_in="reward", kl_kind="k1", kl_coef=0.2, whiten="off")
    data = make_train_data(REPLIES, ref_logprobs_BT=ref_logprobs_BT, values_BT=torch.zeros(2, 2))
    ppo = PPO(algorithm_config)
    prepare_step(ppo, 0, data)
    # −0.2 · 0.5 on the first token, 1 on the last; undiscounted returns
    assert data.returns_BT is not None
    torch.testing.assert_close(data.returns_BT[0], torch.tensor([0.9, 1.0]))
    metrics = reduce_loss(ppo, data)[1]
    assert metrics["loss"] == pytest.approx(metrics["actor/pg_loss"])


def test_turn_discount_passes_rewards_to_earlier_turns() -> None:
    turns = [
        reply(0.0, 1, conversation="c", turn_index=0),
        reply(1.0, 1, conversation="c", turn_index=1),
        reply(-1.0, 1),
    ]
    data = make_train_data(turns)
    prepare_step(later_ppo(PPOConfig(whiten="off", turn_discount=0.5)), 0, data)
    assert data.advantages_BT is not None
    assert data.advantages_BT[:, 0].tolist() == [0.5, 1.0, -1.0]


def test_adaptive_kl_coefficient_is_updated_and_restored() -> None:
    algorithm_config = PPOConfig(kl_coef=0.001, kl_control=AdaptiveKLConfig(target=0.1, horizon=10_000))
    ppo = PPO(algorithm_config)
    ppo.after_train_step(0, UpdateReport("b", 1, {"reference_kl": 0.02, "training/samples": 256.0}))
    assert ppo.kl_coef == pytest.approx(0.00099488)
    other = PPO(algorithm_config)
    other.load_state_dict(ppo.state_dict())
    assert other.kl_coef == ppo.kl_coef


def test_zero_advantages_are_rejected() -> None:
    ppo = PPO(PPOConfig(whiten="off"))
    ppo.load_state_dict({"baseline": 1.0})
    with pytest.raises(NoVariance):
        prepare_step(ppo, 0, make_train_data([reply(1.0), reply(1.0)]))


def test_fully_rejected_batch_raises() -> None:
    algorithm_config = PPOConfig(correction=CorrectionConfig(mode="reject", low=0.5, high=2.0))
    with pytest.raises(ForeignSamples):
        prepare_step(PPO(algorithm_config), 0, make_train_data(REPLIES, rollout_logprobs_BT=torch.full((2, 2), -4.0)))


def test_candidates_of_one_turn_get_no_later_rewards() -> None:
    candidates = [reply(-1.0, 1, conversation="c", turn_index=1), reply(1.0, 1, conversation="c", turn_index=1)]
    data = make_train_data([reply(0.5, 1, conversation="c", turn_index=0), *candidates])
    prepare_step(later_ppo(PPOConfig(whiten="off", turn_discount=0.9)), 0, data)
    assert data.advantages_BT is not None
    assert data.advantages_BT[:, 0].tolist() == [0.5, -1.0, 1.0]


def test_adaptive_kl_needs_a_positive_coefficient() -> None:
    with pytest.raises(ValueError, match="kl_coef"):
        PPOConfig(kl_coef=0.0, kl_control=AdaptiveKLConfig())


def length_aware_ppo(**settings: Any) -> LengthAwarePPO:
    return LengthAwarePPO(LengthAwarePPOConfig(whiten="off", **settings))


def test_shaping_is_at_most_a_tenth_of_the_mean_reward() -> None:
    data = make_train_data([reply(1.0, 50), reply(-1.0, 50), reply(1.0, 105), reply(-1.0, 400)])
    ppo = length_aware_ppo()
    shaped_B = ppo.shape_rewards(data)
    torch.testing.assert_close(shaped_B, torch.tensor([1.0, -1.0, 1.0 - 0.1 * 0.25, -1.0 - 0.1]))
    metrics = ppo.get_metrics()
    assert metrics["reward_shaping/penalty_mean"] == pytest.approx(1.25 / 4)
    assert metrics["reward_shaping/out_of_range_fraction"] == 0.5
    assert metrics["reward_shaping/ratio"] == pytest.approx(0.1 * 1.25 / 4)


def update_with_mean_lengths(ppo: LengthAwarePPO, *means: float) -> tuple[int, int]:
    for step, mean in enumerate(means):
        ppo.after_train_step(step, UpdateReport("b", step, {"response_length/mean": mean}))
    return ppo.shortest, ppo.longest


def test_drift_tightens_and_loosens_the_range() -> None:
    ppo = length_aware_ppo(drift_patience=3, drift_step=5)
    assert update_with_mean_lengths(ppo, 90, 90) == (30, 80)
    assert update_with_mean_lengths(ppo, 90) == (30, 75)
    assert update_with_mean_lengths(ppo, 90) == (30, 70)
    assert update_with_mean_lengths(ppo, 60) == (30, 75)
    assert update_with_mean_lengths(ppo, 20, 20, 20) == (35, 75)


def test_range_is_never_empty() -> None:
    shortest, longest = update_with_mean_lengths(
        length_aware_ppo(shortest=30, longest=36, drift_patience=1, drift_step=4), *[90.0] * 9
    )
    assert shortest < longest


def test_drift_state_is_restored() -> None:
    ppo, other = length_aware_ppo(drift_patience=1), length_aware_ppo(drift_patience=1)
    update_with_mean_lengths(ppo, 90)
    other.load_state_dict(ppo.state_dict())
    assert (other.shortest, other.longest, other.drift) == (30, 78, 1)
