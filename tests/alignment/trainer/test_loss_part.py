"""Late samples: which they are, how they share an update with the others, and that they are learned from."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alignment.algorithms import build
from alignment.algorithms.dpo_and_kto import KTO
from alignment.config.algorithm import AlgorithmConfig, DPOConfig, GRPOConfig, KTOConfig, PPOConfig
from alignment.config.trainer import LateConfig, LoRAConfig, TrainerConfig
from alignment.data.collate import collate
from alignment.data.micro_batches import ScoredSequence
from alignment.errors import ForeignSamples
from alignment.trainer.loss_part import LossPart, late_samples, split_late
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample
from tests.alignment.trainer.test_update import in_groups

Draw = Callable[..., Batch]
FAR = 3.0  # nats by which each recorded log-prob of a far sample differs


def far(sample: Sample, lag: int = 5) -> Sample:
    """Return the sample as if a very different version had generated it."""
    return replace(sample, lag=lag, logprobs=tuple(logprob - FAR for logprob in sample.logprobs))


def make_part(samples: list[Sample], algorithm: AlgorithmConfig | None = None) -> LossPart:
    """Return a part whose current policy has the log-probs that the samples had before `far`."""
    data = collate(samples, torch.device("cpu"))
    far_B = torch.tensor([float(sample.lag > 0) for sample in samples])
    data.old_logprobs_BT = (data.rollout_logprobs_BT + FAR * far_B[:, None]) * data.response_mask_BT
    data.ref_logprobs_BT = data.old_logprobs_BT.clone()
    sequences = [ScoredSequence.from_sample(sample) for sample in samples]
    return LossPart(build(algorithm or PPOConfig()), samples, sequences, data)


def split(part: LossPart, config: LateConfig) -> list[LossPart]:
    return split_late(part, late_samples(part.data, config), config)


def test_a_sample_is_late_by_its_distance_and_not_by_its_version(draw: Draw) -> None:
    samples = list(draw(4).samples)
    samples[1], samples[2] = far(samples[1]), replace(far(samples[2]), lag=0)
    part = make_part(samples)
    assert late_samples(part.data, LateConfig()) == [1]
    part.data.old_logprobs_BT = part.data.rollout_logprobs_BT  # 5 versions behind, and still the same policy
    assert late_samples(part.data, LateConfig()) == []


def test_replies_to_one_prompt_are_late_together(draw: Draw) -> None:
    samples = [replace(sample, group="g") for sample in draw(3).samples]
    part = make_part([replace(samples[0], lag=5), far(samples[1]), replace(samples[2], lag=5)])
    part.data.old_logprobs_BT = part.data.rollout_logprobs_BT.clone()
    part.data.old_logprobs_BT[1] += FAR * part.data.response_mask_BT[1]
    assert late_samples(part.data, LateConfig()) == [0, 1, 2]


def test_share_of_late_samples_is_bounded(draw: Draw) -> None:
    samples = list(draw(10).samples)
    part = make_part([far(sample) if index < 8 else sample for index, sample in enumerate(samples)])
    rest, late = split(part, LateConfig(share=0.25))
    assert [len(rest.samples), len(late.samples)] == [2, 8] and isinstance(late.algorithm, KTO)
    mean_length = sum(len(sample.output_ids) for sample in samples[:8]) / 8
    assert rest.weight == 0.75 and late.weight == pytest.approx(0.25 * 4 / (0.1 * mean_length))
    few = make_part([far(sample) if index < 2 else sample for index, sample in enumerate(samples)])
    assert split(few, LateConfig())[0].weight == pytest.approx(0.8)
    assert late_samples(make_part(samples).data, LateConfig()) == []


@pytest.mark.parametrize("algorithm", [PPOConfig(), PPOConfig(kl_coef=0.0), PPOConfig(estimator="gae"), GRPOConfig()])
@pytest.mark.parametrize("num_late", [3, 8])
def test_update_learns_from_late_samples(
    base_model: Path, config: TrainerConfig, draw: Draw, algorithm: AlgorithmConfig, num_late: int
) -> None:
    """The late replies alone are liked or disliked; the liked ones become more probable, the others less."""
    samples = list(draw(8).samples)
    rewards = [1.0, -1.0, 1.0, -1.0, 0.5, 0.5, 0.5, 0.4]
    batch = Batch(
        "b",
        "p",
        tuple(
            far(replace(sample, reward=reward, group="late"))
            if index < num_late
            else replace(sample, reward=reward, group="recent")
            for index, (sample, reward) in enumerate(zip(samples, rewards, strict=True))
        ),
    )
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm, "kl_target": 0.01}))
    metrics = trainer.update(batch).metrics
    assert metrics["training/samples_late"] == num_late
    assert 0 < metrics["guard/kl"] <= 0.01
    assert ("late/actor/pg_loss" in metrics) == (num_late < 8)
    assert metrics["training/samples_left_out"] == 0


def test_late_samples_are_foreign_to_an_update_that_cannot_learn_from_them(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    batch = draw(8)
    late = replace(batch, samples=tuple(far(sample) for sample in batch.samples))
    with pytest.raises(ForeignSamples, match="differ by"):
        Trainer(base_model, config.model_copy(update={"late": None})).update(late)
    assert Trainer(base_model, config).update(late).metrics["training/samples_late"] == 8


@pytest.mark.parametrize("algorithm", [KTOConfig(), DPOConfig()])
def test_losses_that_need_no_samples_of_the_policy_take_all_together(
    base_model: Path, config: TrainerConfig, draw: Draw, algorithm: AlgorithmConfig
) -> None:
    batch = in_groups(draw(8), 2)
    stale = replace(batch, samples=tuple(replace(sample, lag=40) for sample in batch.samples))
    fields = {"algorithm": algorithm, "max_mismatch": 100.0}
    metrics = Trainer(base_model, config.model_copy(update=fields)).update(stale).metrics
    assert metrics["training/samples_late"] == 0


def test_samples_of_other_versions_that_are_near_change_nothing(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    """The split computes the same as an update without it, bit for bit, where no sample is late."""
    batch = draw(8)
    stale = replace(batch, samples=tuple(replace(sample, lag=3) for sample in batch.samples))
    probes = []
    for late in (None, LateConfig()):
        trainer = Trainer(base_model, config.model_copy(update={"late": late, "lora": LoRAConfig(r=4)}))
        trainer.update(stale)
        probes.append(trainer.probe())
    assert probes[0] == probes[1]
