"""PPO on two replies, worked out by hand."""

import math

import pytest
import torch

from alignment.algorithms.ppo import PPO, explained_variance
from alignment.config.algorithm import AdaptiveKLConfig, CorrectionConfig, PPOConfig
from alignment.errors import ForeignSamples, NoVariance
from alignment.trainer.metrics import UpdateReport
from tests.support.worked_batches import gradient, lay, reply, whole

TWO = [reply(1.0, 2), reply(-1.0, 1)]


def test_every_token_of_a_reply_gets_its_reward_less_the_baseline_which_moves_afterwards() -> None:
    ppo, data = PPO(PPOConfig(whiten="off", baseline_decay=0.5)), lay([reply(1.0, 2), reply(0.0, 1)])
    ppo.load_state_dict({"baseline": 0.5})
    ppo.before_train_step(0, data)
    assert data.advantages_BT is not None
    assert data.advantages_BT.tolist() == [[0.5, 0.5], [-0.5, 0.0]]
    assert ppo.state_dict() == {"baseline": 0.5}  # 0.5 · 0.5 + 0.5 · mean(1, 0)


def test_scaling_leaves_the_centre_to_the_baseline() -> None:
    data = lay(TWO)
    PPO(PPOConfig()).before_train_step(0, data)
    # advantages 1, 1, −1 over three tokens: variance (2·(2/3)² + (4/3)²) / 2 = 4/3
    assert data.advantages_BT is not None
    expected = torch.tensor([[1.0, 1.0], [-1.0, 0.0]]) / math.sqrt(4 / 3)
    torch.testing.assert_close(data.advantages_BT, expected)


def test_a_critic_s_credit_is_what_came_less_what_was_expected() -> None:
    values_BT = torch.tensor([[0.2, 0.6], [0.0, 0.0]])
    ppo, data = PPO(PPOConfig(estimator="gae", lam=0.5, whiten="off")), lay(TWO, values_BT=values_BT)
    ppo.before_train_step(0, data)
    # last token: 1 − 0.6 = 0.4;  first: (0 + 0.6 − 0.2) + 0.5 · 0.4 = 0.6;  the other reply: −1 − 0
    assert data.advantages_BT is not None and data.returns_BT is not None
    torch.testing.assert_close(data.advantages_BT, torch.tensor([[0.6, 0.4], [-1.0, 0.0]]))
    torch.testing.assert_close(data.returns_BT[0], torch.tensor([0.8, 1.0]))


def test_the_critic_learns_its_returns() -> None:
    zero_BT = torch.zeros(2, 2)
    ppo, data = PPO(PPOConfig(estimator="gae", whiten="off", value_clip=None)), lay(TWO, values_BT=zero_BT)
    ppo.before_train_step(0, data)
    told = ppo.compute_value_loss(whole(data, zero_BT))
    assert told["loss"].item() == pytest.approx(0.5)  # ½ · mean of (0 ∓ 1)² over three tokens


def test_explained_variance_by_hand() -> None:
    mask_BT, returns_BT = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[0.0, 2.0, 9.0]])
    assert explained_variance(returns_BT, returns_BT, mask_BT) == 1.0
    assert explained_variance(torch.tensor([[0.5, 1.5, 9.0]]), returns_BT, mask_BT) == pytest.approx(0.75)
    assert explained_variance(returns_BT, torch.ones(1, 3), mask_BT) == 0.0


def test_at_the_first_step_the_gradient_is_that_of_reinforce() -> None:
    ppo, data = PPO(PPOConfig(whiten="off", kl_coef=0.0)), lay(TWO)
    ppo.before_train_step(0, data)
    # −A / (three tokens)
    torch.testing.assert_close(gradient(ppo, data), torch.tensor([[-1.0, -1.0], [1.0, 0.0]]) / 3)
    told = ppo.compute_loss(whole(data))
    assert told["actor/ppo_kl"].item() == 0.0
    assert told["actor/pg_clipfrac"].item() == 0.0


def test_stale_samples_weigh_less_and_never_more_than_the_cap() -> None:
    rollout_BT = torch.tensor([[-1.0 + math.log(2), -6.0], [-1.0, 0.0]])
    ppo, data = PPO(PPOConfig(whiten="off", kl_coef=0.0)), lay(TWO, rollout_BT=rollout_BT)
    ppo.before_train_step(0, data)
    # weights parent / rollout: ½, e⁵ cut at 2, 1
    torch.testing.assert_close(gradient(ppo, data), torch.tensor([[-0.5, -2.0], [1.0, 0.0]]) / 3)


def test_plain_ppo_takes_ratios_to_what_was_recorded() -> None:
    recorded_BT = torch.tensor([[-1.0 - math.log(1.5), -1.0], [-1.0, 0.0]])
    recipe = PPOConfig(whiten="off", kl_coef=0.0, proximal="rollout", correction=CorrectionConfig(mode="off"))
    ppo, data = PPO(recipe), lay(TWO, rollout_BT=recorded_BT)
    assert not ppo.needs_parent
    ppo.before_train_step(0, data)
    # the first token's ratio is 1.5 already: beyond the clip, it has no gradient left
    torch.testing.assert_close(gradient(ppo, data), torch.tensor([[0.0, -1.0], [1.0, 0.0]]) / 3)


def test_the_interpolated_parent_of_fresh_samples_is_what_was_recorded() -> None:
    ppo = PPO(PPOConfig(whiten="off", kl_coef=0.0, proximal="loglinear"))
    stale = [reply(1.0, 2, lag=1), reply(-1.0, 1)]
    data = lay(stale)
    ppo.before_train_step(0, data)
    assert not ppo.needs_parent
    now_BT = torch.tensor([[-1.0 + math.log(1.1), -1.0], [-1.0 + math.log(1.1), 0.0]])
    # lag 1: half way, so old = −1 + ½ ln 1.1, ratio √1.1, weight √1.1; lag 0: old = −1, ratio 1.1, weight 1
    torch.testing.assert_close(gradient(ppo, data, now_BT), torch.tensor([[-1.1, -1.0], [1.1, 0.0]]) / 3)


def test_the_kl_to_the_base_model_pulls_back() -> None:
    ppo, data = PPO(PPOConfig(whiten="off", kl_coef=0.1, kl_kind="k1")), lay(TWO)
    ppo.before_train_step(0, data)
    told = ppo.compute_loss(whole(data, torch.tensor([[-0.4, -1.0], [-1.0, 0.0]])))
    assert told["actor/kl_loss"].item() == pytest.approx(0.6 / 3)
    assert told["loss"].item() == pytest.approx(told["actor/pg_loss"].item() + 0.1 * 0.2)


def test_the_kl_as_part_of_the_reward_falls_on_its_token() -> None:
    reference_BT = torch.tensor([[-1.5, -1.0], [-1.0, 0.0]])
    recipe = PPOConfig(estimator="gae", kl_in="reward", kl_kind="k1", kl_coef=0.2, whiten="off")
    data = lay(TWO, reference_BT=reference_BT, values_BT=torch.zeros(2, 2))
    ppo = PPO(recipe)
    ppo.before_train_step(0, data)
    # −0.2 · 0.5 on the first token, 1 on the last; undiscounted returns
    assert data.returns_BT is not None
    torch.testing.assert_close(data.returns_BT[0], torch.tensor([0.9, 1.0]))
    told = ppo.compute_loss(whole(data))
    assert told["loss"].item() == pytest.approx(told["actor/pg_loss"].item())


def test_a_later_turn_shares_its_reward_with_the_earlier_one() -> None:
    turns = [reply(0.0, 1, conversation="c", turn=0), reply(1.0, 1, conversation="c", turn=1), reply(-1.0, 1)]
    data = lay(turns)
    PPO(PPOConfig(whiten="off", turn_discount=0.5)).before_train_step(0, data)
    assert data.advantages_BT is not None
    assert data.advantages_BT[:, 0].tolist() == [0.5, 1.0, -1.0]


def test_the_adaptive_coefficient_follows_the_kl_and_is_remembered() -> None:
    recipe = PPOConfig(kl_coef=0.001, kl_control=AdaptiveKLConfig(target=0.1, horizon=10_000))
    ppo = PPO(recipe)
    ppo.after_train_step(0, UpdateReport("b", 1, {"reference_kl": 0.02, "training/samples": 256.0}))
    assert ppo.kl_coef == pytest.approx(0.00099488)
    other = PPO(recipe)
    other.load_state_dict(ppo.state_dict())
    assert other.kl_coef == ppo.kl_coef


def test_replies_that_are_all_as_good_as_expected_teach_nothing() -> None:
    ppo = PPO(PPOConfig(whiten="off"))
    ppo.load_state_dict({"baseline": 1.0})
    with pytest.raises(NoVariance):
        ppo.before_train_step(0, lay([reply(1.0), reply(1.0)]))


def test_a_batch_whose_every_token_is_rejected_is_refused() -> None:
    recipe = PPOConfig(correction=CorrectionConfig(mode="reject", low=0.5, high=2.0))
    with pytest.raises(ForeignSamples):
        PPO(recipe).before_train_step(0, lay(TWO, rollout_BT=torch.full((2, 2), -4.0)))


def test_of_several_candidates_none_is_taken_for_the_turn_that_went_on() -> None:
    rivals = [reply(-1.0, 1, conversation="c", turn=1), reply(1.0, 1, conversation="c", turn=1)]
    data = lay([reply(0.5, 1, conversation="c", turn=0), *rivals])
    PPO(PPOConfig(whiten="off", turn_discount=0.9)).before_train_step(0, data)
    assert data.advantages_BT is not None
    assert data.advantages_BT[:, 0].tolist() == [0.5, -1.0, 1.0]


def test_an_adaptive_coefficient_cannot_begin_at_nothing() -> None:
    with pytest.raises(ValueError, match="kl_coef"):
        PPOConfig(kl_coef=0.0, kl_control=AdaptiveKLConfig())
