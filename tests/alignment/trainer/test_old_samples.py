"""Samples of versions that are far from the policy: learned from with importance weights, and never foreign."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from alignment.config.preference_algorithms import DPOConfig, KTOConfig
from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.trainer.scoring import score_sequences
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample
from tests.alignment.trainer.test_update import in_groups

Draw = Callable[..., Batch]
FAR = 3.0  # nats by which each recorded log-prob of a far sample differs


def far(sample: Sample, lag: int = 5) -> Sample:
    """Return the sample as if a very different version had generated it."""
    return replace(sample, lag=lag, logprobs=tuple(logprob - FAR for logprob in sample.logprobs))


@pytest.mark.parametrize(
    "algorithm",
    [
        PPOConfig(),
        PPOConfig(kl_coef=0.0),
        PPOConfig(estimator="gae"),
        PPOConfig(proximal="rollout", loss="cispo", epochs=1, minibatches=1),  # scores no parent
        GRPOConfig(),
    ],
    ids=["ppo", "no KL", "gae", "rollout", "grpo"],
)
@pytest.mark.parametrize("num_far", [3, 8])
def test_a_policy_gradient_learns_from_samples_of_any_version(
    base_model: Path, config: TrainerConfig, draw: Draw, algorithm: AlgorithmConfig, num_far: int
) -> None:
    samples = [
        replace(far(sample) if index < num_far else sample, reward=1.0 if index % 2 else -1.0, group="g")
        for index, sample in enumerate(draw(8).samples)
    ]
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm, "kl_target": 0.01}))
    sequences = [ScoredSequence.from_sample(sample) for sample in samples[:num_far]]
    before_B = score_sequences(trainer.policy, sequences, max_tokens=512).sum(-1)
    report = trainer.update(Batch("b", "p", tuple(samples)))
    gain_B = score_sequences(trainer.policy, sequences, max_tokens=512).sum(-1) - before_B
    assert (report.unused_turn_ids, report.returned_turns, report.foreign_turns) == ((), {}, {})
    assert 0 < report.metrics["guard/kl"] <= 0.01
    assert gain_B[1::2].mean() > gain_B[::2].mean()


@pytest.mark.parametrize("algorithm", [KTOConfig(), DPOConfig()], ids=lambda algorithm: algorithm.type)
def test_losses_without_importance_weights_take_far_samples_too(
    base_model: Path, config: TrainerConfig, draw: Draw, algorithm: AlgorithmConfig
) -> None:
    batch = in_groups(draw(8), 2)
    stale = replace(batch, samples=tuple(far(sample, lag=40) for sample in batch.samples))
    report = Trainer(base_model, config.model_copy(update={"algorithm": algorithm})).update(stale)
    assert (report.returned_turns, report.foreign_turns) == ({}, {})


def test_replies_of_the_policy_are_checked_when_others_are_far(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    samples = [far(sample, lag=0 if index < 1 else 5) for index, sample in enumerate(draw(8).samples)]
    report = Trainer(base_model, config).update(Batch("b", "p", tuple(samples)))
    assert report.foreign_turns.keys() == {samples[0].turn_id}
