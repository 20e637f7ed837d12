"""Episodes count once, worked out by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignment.algorithms.base import prepare_step
from alignment.algorithms.baselines import compare_with_others
from alignment.algorithms.ppo import PPO
from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import (
    DrGRPOConfig,
    GiGPOConfig,
    GRPOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.config.trainer import TrainerConfig
from alignment.data.episodes import count_episodes, share_within_episodes
from alignment.functional import whiten
from alignment.trainer.loss_part import LossPart
from alignment.trainer.trainer import Trainer
from alignment.trainer.update import Update
from alignment.types import Batch, Sample
from tests.support.worked_batches import make_train_data, reply

Draw = Callable[..., Batch]
COUNTED_PER_EPISODE: list[AlgorithmConfig] = [
    PPOConfig(),
    PPOConfig(whiten="full"),
    PPOConfig(aggregation="seq-mean-token-mean"),
    ReinforcePlusPlusConfig(),
]


def test_turns_of_an_episode_share_its_weight() -> None:
    samples = [
        reply(1.0, episode="a"),
        reply(-1.0),
        reply(1.0, episode="a", weight=0.5),
        reply(0.0, episode="b"),
        reply(1.0, episode="a"),
    ]
    weights = [sample.weight for sample in share_within_episodes(samples)]
    assert weights == pytest.approx([1 / 3, 1.0, 0.5 / 3, 1.0, 1 / 3])
    assert count_episodes([replace(sample, turn_id=str(index)) for index, sample in enumerate(samples)]) == 3


def test_an_outcome_is_compared_with_those_of_other_episodes() -> None:
    samples = [reply(1.0, episode="a"), reply(1.0, episode="a"), reply(0.0, episode="b"), reply(-1.0)]
    shared = share_within_episodes(samples)
    rewards_B = torch.tensor([sample.reward for sample in shared])
    # a: the mean of 0 and −1. b: the mean of 1 and −1. The reply: the mean of 1 and 0, not of 1, 1 and 0.
    assert compare_with_others(rewards_B, shared).tolist() == pytest.approx([1.5, 1.5, 0.0, -1.5])
    assert compare_with_others(rewards_B[:2], shared[:2]).tolist() == [0.0, 0.0]


def test_the_baseline_of_later_updates_counts_an_episode_once() -> None:
    ppo = PPO(PPOConfig(whiten="off"))
    turns = [reply(1.0, episode="a")] * 3 + [reply(0.0)]
    prepare_step(ppo, 0, make_train_data(share_within_episodes(turns)))
    assert ppo.baseline.value == pytest.approx(0.5)


def test_whitening_with_weights_is_that_of_repeated_rows() -> None:
    x_BT, mask_BT = torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    weighted_BT = whiten(x_BT, mask_BT, centre=False, weights_B=torch.tensor([2.0, 1.0]))
    repeated_BT = whiten(x_BT[[0, 0, 1]], mask_BT[[0, 0, 1]], centre=False)
    torch.testing.assert_close(weighted_BT, repeated_BT[1:])
    full_BT = whiten(x_BT, mask_BT, weights_B=torch.tensor([2.0, 1.0]))
    # Tokens 1 and 2 twice, 4 once: the mean is 2, the variance 6/5 · 3/2.
    expected_BT = torch.tensor([[-1.0, 0.0], [2.0, 0.0]]) / (1.8**0.5)
    torch.testing.assert_close(full_BT, expected_BT)


def first_gradient(base_model: Path, config: TrainerConfig, samples: list[Sample]) -> Tensor:
    """Return the direction of the policy's first step from a batch."""
    trainer = Trainer(base_model, config)
    update = Update(trainer.context, Batch("b", "shop", tuple(samples)), step=0)
    part = LossPart(update.algorithm, update.samples, update.sequences, update.data)
    update._plan(part)
    update._score(part.first_epoch)
    prepare_step(trainer.algorithm, 0, update.data)
    update.gradient_accumulator.accumulate([part], [part.epochs[0][0]])
    tensors = trainer.policy.role_parameters("actor").values()
    flat = torch.cat([tensor.grad.flatten() for tensor in tensors if tensor.grad is not None])
    return flat / flat.norm()


@pytest.mark.parametrize("algorithm", COUNTED_PER_EPISODE, ids=lambda config: f"{config.type}-{config.aggregation}")
def test_number_of_turns_of_an_episode_does_not_change_the_direction_of_the_update(
    base_model: Path, config: TrainerConfig, draw: Draw, algorithm: AlgorithmConfig
) -> None:
    settings = config.model_copy(
        update={"algorithm": algorithm.model_copy(update={"epochs": 1, "minibatches": 1}), "micro_batch_tokens": 10_000}
    )
    samples = list(draw(8).samples)
    turns = [replace(sample, reward=1.0, episode="e") for sample in samples[:2]]
    again = [replace(sample, turn_id=f"{sample.turn_id}-again-{n}") for sample in turns for n in range(3)]
    once = first_gradient(base_model, settings, [*turns, *samples[2:]])
    often = first_gradient(base_model, settings, [*turns, *again, *samples[2:]])
    torch.testing.assert_close(often, once, atol=2e-4, rtol=1e-3)
    apart = [replace(sample, episode=None) for sample in [*turns, *again]]
    assert (first_gradient(base_model, settings, [*apart, *samples[2:]]) - once).norm() > 0.02


COMPARED: list[AlgorithmConfig] = [GRPOConfig(), DrGRPOConfig(), RLOOConfig(), GiGPOConfig()]


@pytest.mark.parametrize("algorithm", COMPARED, ids=lambda config: config.type)
def test_number_of_turns_does_not_change_what_a_group_of_episodes_is_compared_with(
    base_model: Path, config: TrainerConfig, draw: Draw, algorithm: AlgorithmConfig
) -> None:
    settings = config.model_copy(
        update={"algorithm": algorithm.model_copy(update={"epochs": 1, "minibatches": 1}), "micro_batch_tokens": 10_000}
    )
    samples = [replace(sample, group="task", episode=sample.turn_id) for sample in draw(8).samples]
    turns = [replace(sample, reward=1.0, episode="e") for sample in samples[:2]]
    again = [replace(sample, turn_id=f"{sample.turn_id}-again-{n}") for sample in turns for n in range(3)]
    once = first_gradient(base_model, settings, [*turns, *samples[2:]])
    often = first_gradient(base_model, settings, [*turns, *again, *samples[2:]])
    torch.testing.assert_close(often, once, atol=2e-4, rtol=1e-3)
    apart = [replace(sample, episode=sample.turn_id) for sample in [*turns, *again]]
    assert (first_gradient(base_model, settings, [*apart, *samples[2:]]) - once).norm() > 0.02
