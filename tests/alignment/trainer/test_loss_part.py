"""Late samples: which they are, how they share an update with the others, and that they are learned from."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from alignment.algorithms import build
from alignment.algorithms.base import prepare_step
from alignment.algorithms.dpo_and_kto import KTO
from alignment.config.algorithm import (
    AlgorithmConfig,
    DAPOConfig,
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    KTOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.config.trainer import LateConfig, LoRAConfig, TrainerConfig
from alignment.data.collate import collate
from alignment.data.micro_batches import ScoredSequence
from alignment.errors import ForeignSamples, NoVariance
from alignment.trainer.loss_part import LossPart, late_labels, late_samples, split_late
from alignment.trainer.scoring import score_sequences
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, ReturnReason, Sample
from tests.alignment.trainer.test_update import in_groups
from tests.support.worked_batches import gradient

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
    return split_late(part, late_samples(part, config), config)[0]


def with_rewards(batch: Batch, rewards: Sequence[float], num_late: int) -> list[Sample]:
    """Return the batch with these rewards, its first samples late. Late ones and the others are a group each."""
    samples = [replace(sample, reward=reward) for sample, reward in zip(batch.samples, rewards, strict=True)]
    return [
        replace(far(sample), group="late") if index < num_late else replace(sample, group="recent")
        for index, sample in enumerate(samples)
    ]


def test_a_sample_is_late_by_its_distance_and_not_by_its_version(draw: Draw) -> None:
    samples = list(draw(4).samples)
    samples[1], samples[2] = far(samples[1]), replace(far(samples[2]), lag=0)
    part = make_part(samples)
    assert late_samples(part, LateConfig()) == [1]
    part.data.old_logprobs_BT = part.data.rollout_logprobs_BT  # 5 versions behind, and still the same policy
    assert late_samples(part, LateConfig()) == []


def test_replies_to_one_prompt_are_late_together(draw: Draw) -> None:
    samples = [replace(sample, group="g") for sample in draw(3).samples]
    part = make_part([replace(samples[0], lag=5), far(samples[1]), replace(samples[2], lag=5)])
    part.data.old_logprobs_BT = part.data.rollout_logprobs_BT.clone()
    part.data.old_logprobs_BT[1] += FAR * part.data.response_mask_BT[1]
    assert late_samples(part, LateConfig()) == [0, 1, 2]


COMPARING = [GRPOConfig(), RLOOConfig(), DrGRPOConfig(), DAPOConfig(), ReinforcePlusPlusConfig(baseline="group")]


def ranked(samples: Sequence[Sample], lags: Sequence[int], rewards: Sequence[float], group: str) -> list[Sample]:
    """Return replies to one prompt that were ranked; those with a lag are far."""
    return [
        replace(far(sample, lag) if lag else sample, reward=reward, group=group)
        for sample, lag, reward in zip(samples, lags, rewards, strict=True)
    ]


@pytest.mark.parametrize("algorithm", COMPARING, ids=lambda config: config.type)
@pytest.mark.parametrize(
    ("lags", "rewards", "labels"),
    [
        ((4, 4, 4), (1.0, 0.0, -1.0), [1, 0, -1]),  # a ranking of three: the middle reply stayed alone
        ((4, 4, 4), (1.0, 0.0, 0.0), [1, -1, -1]),  # a verifier's
        ((4, 4, 4), (0.9, 0.5, 0.7), [1, -1, 0]),
        ((4, 4, 0), (1.0, 0.0, -1.0), None),  # a comparison with a reply of the parent
        ((0, 4, 4), (1.0, 1.0, -1.0), None),
        ((4, 4, 4), (0.5, 0.5, 0.5), None),
    ],
)
def test_algorithms_that_compare_replies_have_whole_groups_late_or_none(
    base_model: Path,
    config: TrainerConfig,
    draw: Draw,
    algorithm: AlgorithmConfig,
    lags: tuple[int, ...],
    rewards: tuple[float, ...],
    labels: list[int] | None,
) -> None:
    samples = list(draw(6).samples)
    batch = [*ranked(samples[:3], lags, rewards, "old"), *ranked(samples[3:], (0, 0, 0), (1.0, 0.0, -1.0), "new")]
    part = make_part(batch, algorithm)
    assert late_samples(part, LateConfig()) == ([] if labels is None else [0, 1, 2])
    if labels is not None:
        assert late_labels(part)[:3] == labels
        rest, late = split(part, LateConfig())
        assert [len(rest.samples), len(late.samples)] == [3, 3]
        assert late.data.rewards_B.tolist() == pytest.approx([reward - fmean(rewards) for reward in rewards], abs=1e-6)
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm, "max_mismatch": 1e9}))
    report = trainer.update(Batch("b", "p", tuple(batch)))
    assert report.metrics["training/samples_late"] == (0 if labels is None else 3)
    left_out = 3 if algorithm.type == "dapo" and len(set(rewards)) == 1 else 0
    assert (len(report.unused_turn_ids), report.returned_turns) == (left_out, {})


def test_kto_learns_nothing_from_the_middle_of_a_late_ranking(draw: Draw) -> None:
    """λ of the classes: one of two replies each. The middle one has a loss of 0."""
    part = make_part(ranked(draw(3).samples, (4, 4, 4), (1.0, 0.0, -1.0), "old"), GRPOConfig())
    [late] = split(part, LateConfig())
    prepare_step(late.algorithm, 0, late.data)
    metrics = late.algorithm.get_metrics()
    assert (metrics["kto/desirable_weight"], metrics["kto/undesirable_weight"]) == (1.0, 1.0)
    # the policy is the reference: −λ·β·σ'(0) / 3 replies = ∓0.1 / 4 / 3 for each token
    expected = torch.tensor([-0.1 / 12, 0.0, 0.1 / 12])[:, None] * late.data.response_mask_BT
    torch.testing.assert_close(gradient(late.algorithm, late.data), expected)


def test_share_of_late_samples_is_bounded(draw: Draw) -> None:
    samples = list(draw(10).samples)
    part = make_part([far(sample) if index < 8 else sample for index, sample in enumerate(samples)])
    rest, late = split(part, LateConfig(share=0.25))
    assert [len(rest.samples), len(late.samples)] == [2, 8] and isinstance(late.algorithm, KTO)
    mean_length = sum(len(sample.output_ids) for sample in samples[:8]) / 8
    assert rest.weight == 0.75 and late.weight == pytest.approx(0.25 * 4 / (0.1 * mean_length))
    few = make_part([far(sample) if index < 2 else sample for index, sample in enumerate(samples)])
    assert split(few, LateConfig())[0].weight == pytest.approx(0.8)
    assert late_samples(make_part(samples), LateConfig()) == []


@pytest.mark.parametrize("algorithm", [PPOConfig(), GRPOConfig()], ids=lambda config: config.type)
@pytest.mark.parametrize(
    ("late", "rest", "parts", "waiting"),
    [
        ([1.0, -1.0], [1.0, -1.0], [["ppo", 2], ["kto", 2]], []),
        ([1.0, -1.0], [1.0, 1.0, 1.0], [["kto", 2]], [2, 3, 4]),
        ([-1.0, -1.0], [1.0, -1.0], [["ppo", 2], ["kto", 2]], []),  # KTO compares each reply with the base model
        ([1.0, 1.0], [1.0, 1.0, -1.0], [["ppo", 3], ["kto", 2]], []),
    ],
)
def test_a_rest_without_contrast_waits(
    draw: Draw,
    algorithm: AlgorithmConfig,
    late: list[float],
    rest: list[float],
    parts: list[list[object]],
    waiting: list[int],
) -> None:
    part = make_part(with_rewards(draw(len(late + rest)), late + rest, len(late)), algorithm)
    split_parts, waiting_indices = split_late(part, list(range(len(late))), LateConfig())
    kinds = {"ppo": algorithm.type}
    found = [[one.algorithm.config.type, len(one.samples)] for one in split_parts]
    assert found == [[kinds.get(str(kind), kind), size] for kind, size in parts]
    assert waiting_indices == waiting
    if len(parts) == 1:
        mean_length = float(split_parts[0].data.length_B.mean())
        assert split_parts[0].weight == pytest.approx(4 / (0.1 * mean_length)), "the whole loss is theirs"


def test_late_votes_and_others_of_one_sign_each_are_learned_from_together(draw: Draw) -> None:
    part = make_part(with_rewards(draw(5), [-1.0, -1.0, 1.0, 1.0, 1.0], 2))
    [together], waiting = split_late(part, [0, 1], LateConfig())
    assert (together.algorithm.config.type, len(together.samples), waiting) == ("kto", 5, [])


def test_a_batch_without_contrast_in_any_part_is_refused(draw: Draw) -> None:
    part = make_part(with_rewards(draw(4), [0.5, 0.5, 0.9, 0.9], 2))
    with pytest.raises(NoVariance, match="neither"):
        split_late(part, [0, 1], LateConfig())


def test_votes_of_one_sign_return_and_late_ones_are_learned_from(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    """Twelve up votes of the parent are no gradient of their own: the late replies move as their votes say."""
    samples = with_rewards(draw(16), [1.0, -1.0] * 4 + [1.0] * 8, 8)
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": PPOConfig()}))
    trainer.algorithm.load_state_dict({"baseline": 0.5})
    state = trainer.algorithm.state_dict()
    sequences = [ScoredSequence.from_sample(sample) for sample in samples[:8]]
    before_B = score_sequences(trainer.policy, sequences, max_tokens=512).sum(-1)
    report = trainer.update(Batch("b", "p", tuple(samples)))
    gain_B = score_sequences(trainer.policy, sequences, max_tokens=512).sum(-1) - before_B
    assert report.returned_turns == {sample.turn_id: ReturnReason.NO_CONTRAST for sample in samples[8:]}
    assert report.metrics["training/samples_returned"] == report.metrics["training/samples_late"] == 8
    assert gain_B[::2].mean() > 0 > gain_B[1::2].mean()
    assert trainer.algorithm.state_dict() == state, "votes that return are not in the baseline"


def test_all_samples_of_a_batch_with_contrast_in_each_part_are_learned_from(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    samples = with_rewards(draw(8), [1.0, -1.0] * 4, 4)
    report = Trainer(base_model, config.model_copy(update={"algorithm": PPOConfig()})).update(
        Batch("b", "p", tuple(samples))
    )
    assert report.returned_turns == {} and report.metrics["training/samples_returned"] == 0


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
