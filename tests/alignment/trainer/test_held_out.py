"""The KL guard reads the KL of an update on replies of the parent that the update has not seen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.functional import kl_estimate
from alignment.trainer.held_out import MIN_TOKENS
from alignment.trainer.scoring import score_sequences
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample
from tests.alignment.trainer.test_fitted_updates import TARGET, make_trainer

Draw = Callable[..., Batch]


def num_output_tokens(samples: tuple[Sample, ...]) -> int:
    return sum(len(sample.output_ids) for sample in samples)


def test_guard_reads_the_kl_of_the_new_policy_on_other_replies(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    trainer = make_trainer(base_model, config, 1e-2)
    held_out = draw(100, seed=5).samples
    assert num_output_tokens(held_out) >= MIN_TOKENS
    sequences = [ScoredSequence.from_sample(sample) for sample in held_out]

    before = score_sequences(trainer.policy, sequences, max_tokens=config.micro_batch_tokens)
    metrics = trainer.update(replace(draw(8), held_out=held_out)).metrics
    after = score_sequences(trainer.policy, sequences, max_tokens=config.micro_batch_tokens)
    expected = float(kl_estimate(before, after, "k3").sum()) / num_output_tokens(held_out)  # the padding is 0
    assert metrics["guard/kl"] == pytest.approx(expected, rel=1e-3)
    assert metrics["guard/tokens"] == num_output_tokens(held_out) and metrics["guard/is_held_out"] == 1
    assert 0 < metrics["actor/fitted_kl"] <= TARGET and metrics["guard/kl"] != metrics["actor/fitted_kl"]


def test_an_update_does_not_depend_on_the_held_out_replies(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    probes = []
    for held_out in ((), draw(100, seed=5).samples):
        trainer = make_trainer(base_model, config, 1e-2)
        trainer.update(replace(draw(8), held_out=held_out))
        probes.append(trainer.probe())
    assert probes[0] == probes[1]


def test_guard_reads_the_fitted_kl_where_there_are_few_other_replies(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    foreign = replace(draw(1, seed=6).samples[0], output_ids=(10**6,) * MIN_TOKENS, logprobs=(-1.0,) * MIN_TOKENS)
    trainer: Trainer = make_trainer(base_model, config, 1e-2)
    metrics = trainer.update(replace(draw(8), held_out=(*draw(4, seed=5).samples, foreign))).metrics
    assert metrics["guard/kl"] == metrics["actor/fitted_kl"] and metrics["guard/is_held_out"] == 0
