"""PPO on two replies, worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from alignment.algorithms import LossInputs
from alignment.algorithms.ppo import PPO
from alignment.config import PPOConfig

MASK_BT = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def inputs(logprobs_BT: Tensor, parent_BT: Tensor, **others: Tensor) -> LossInputs:
    given = {"reference_BT": parent_BT, "weights_BT": MASK_BT, "advantages_BT": MASK_BT} | others
    return LossInputs(
        logprobs_BT=logprobs_BT, parent_BT=parent_BT, mask_BT=MASK_BT, num_tokens=3, num_sequences=2, **given
    )


def test_credit_without_whitening_is_the_reward_over_the_baseline() -> None:
    ppo = PPO(PPOConfig(whiten="off", baseline_decay=0.5))
    advantages_BT, baseline = ppo.credit(torch.tensor([1.0, -1.0]), MASK_BT, 0.5)
    assert advantages_BT.tolist() == [[0.5, 0.5], [-1.5, 0.0]]
    assert baseline == 0.25  # 0.5 · 0.5 + 0.5 · 0


def test_scaled_credit_keeps_the_baseline_as_its_centre() -> None:
    advantages_BT, _ = PPO(PPOConfig()).credit(torch.tensor([1.0, -1.0]), MASK_BT, 0.5)
    # tokens 0.5, 0.5, −1.5: var = 4/3 whatever the centre;  0.5/√(4/3) = 0.433013, −1.5/… = −1.299038
    assert torch.allclose(advantages_BT, torch.tensor([[0.433013, 0.433013], [-1.299038, 0.0]]), atol=1e-5)


def test_fully_whitened_credit_balances_over_tokens() -> None:
    advantages_BT, _ = PPO(PPOConfig(whiten="full")).credit(torch.tensor([1.0, -1.0]), MASK_BT, 0.0)
    # tokens 1, 1, −1: mean ⅓, var = (4/9 + 4/9 + 16/9) / 2 = 4/3;  (1 − ⅓)/√(4/3) = 0.57735, (−4/3)/… = −1.1547
    assert torch.allclose(advantages_BT, torch.tensor([[0.57735, 0.57735], [-1.154701, 0.0]]), atol=1e-5)
    assert advantages_BT.sum().item() == pytest.approx(0.0, abs=1e-6)


def test_the_loss_by_hand() -> None:
    parent_BT = torch.tensor([[-1.0, -1.0], [-1.0, 0.0]])
    moved_BT = parent_BT + torch.tensor([[math.log(1.5), 0.0], [math.log(0.5), 0.0]])
    outputs = PPO(PPOConfig(kl_coef=0.1)).loss(
        inputs(moved_BT, parent_BT, advantages_BT=torch.tensor([[1.0, 1.0], [-1.0, 0.0]]))
    )
    # pg: (−1.2 − 1 + 0.8) / 3;  k3: (1/1.5 + ln 1.5 − 1) + 0 + (2 − ln 2 − 1) = 0.072132 + 0.306853, / 3
    assert outputs.metrics["actor/pg_loss"].item() == pytest.approx(-1.4 / 3)
    assert outputs.metrics["actor/kl_loss"].item() == pytest.approx(0.126328, abs=1e-5)
    assert outputs.loss.item() == pytest.approx(-1.4 / 3 + 0.0126328, abs=1e-5)
    assert outputs.metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 3)


def test_for_fresh_samples_it_is_plain_ppo_on_the_recorded_logprobs() -> None:
    ppo = PPO(PPOConfig(kl_coef=0.0))
    recorded_BT = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
    moved_BT = recorded_BT + torch.tensor([[0.05, -0.1], [0.1, 0.0]])
    weights_BT = ppo.correct(recorded_BT, recorded_BT, MASK_BT).weights_BT
    assert torch.equal(weights_BT, MASK_BT)
    loss = ppo.loss(inputs(moved_BT, recorded_BT, weights_BT=weights_BT)).loss
    # −(e^0.05 + e^−0.1 + e^0.1) / 3
    assert loss.item() == pytest.approx(-(math.exp(0.05) + math.exp(-0.1) + math.exp(0.1)) / 3)


def test_for_stale_samples_it_is_importance_sampling_from_the_engine() -> None:
    ppo = PPO(PPOConfig(kl_coef=0.0))
    rollout_BT = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
    parent_BT = rollout_BT + torch.tensor([[0.2, -0.3], [0.1, 0.0]])
    moved_BT = parent_BT + torch.tensor([[0.05, -0.1], [0.1, 0.0]])
    weights_BT = ppo.correct(parent_BT, rollout_BT, MASK_BT).weights_BT
    loss = ppo.loss(inputs(moved_BT, parent_BT, weights_BT=weights_BT)).loss
    # nothing is clipped or capped, so ratio · weight = policy over engine: −(e^0.25 + e^−0.4 + e^0.2) / 3
    assert loss.item() == pytest.approx(-(math.exp(0.25) + math.exp(-0.4) + math.exp(0.2)) / 3)
