"""The size of an update is fitted to its KL on replies that it has not seen, and the guard reads it on others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import PPOConfig
from alignment.config.preference_algorithms import DPOConfig
from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import ScoredSequence, make_model_inputs
from alignment.models.policy_model import PolicyModel
from alignment.trainer import update_kl
from alignment.trainer.trainer import Trainer
from alignment.trainer.update_kl import MIN_TOKENS, UpdateKL, split_held_out
from alignment.types import Batch, Sample
from tests.alignment.conftest import VOCABULARY
from tests.alignment.trainer.test_fitted_updates import TARGET, make_trainer
from tests.alignment.trainer.test_update import in_groups

Draw = Callable[..., Batch]


def num_output_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.output_ids) for sample in samples)


@torch.no_grad()
def log_distributions(policy: PolicyModel, samples: Sequence[Sample]) -> Tensor:
    """Return the log-probs of the whole vocabulary in the place of each output token."""
    rows = []
    for sample in samples:
        inputs = make_model_inputs([ScoredSequence.from_sample(sample)], policy.device)
        with policy.active_role.acting_as("actor"):
            hidden_ND = policy.base_lm.hidden_states(inputs)
        logits_NV = policy.base_lm.model.get_output_embeddings()(hidden_ND)
        rows.append((logits_NV / sample.temperature).double().log_softmax(-1))
    return torch.cat(rows)


def mean_kl(old_NV: Tensor, new_NV: Tensor) -> float:
    return float((old_NV.exp() * (old_NV - new_NV)).sum(-1).mean())


@pytest.fixture
def held_out(draw: Draw) -> tuple[Sample, ...]:
    samples = draw(160, seed=5, temperature=0.8).samples
    assert num_output_tokens(samples) > 2 * MIN_TOKENS
    return samples


@pytest.mark.parametrize("lora", ["adapter", "full weights"])
def test_size_is_fitted_on_one_part_of_the_held_out_replies_and_the_guard_reads_the_other(
    base_model: Path, config: TrainerConfig, draw: Draw, held_out: tuple[Sample, ...], lora: str
) -> None:
    fields = {} if lora == "adapter" else {"lora": None}
    trainer = make_trainer(base_model, config, 1e-2, **fields)
    parts = split_held_out(held_out, VOCABULARY)
    before = [log_distributions(trainer.policy, part) for part in parts]
    metrics = trainer.update(replace(draw(8), held_out=held_out)).metrics
    after = [log_distributions(trainer.policy, part) for part in parts]
    fitted, guard = (mean_kl(*pair) for pair in zip(before, after, strict=True))
    assert metrics["actor/fitted_kl"] == pytest.approx(fitted, rel=1e-3) and 0.3 * TARGET <= fitted <= TARGET
    assert metrics["guard/kl"] == pytest.approx(guard, rel=1e-3) and guard != fitted
    assert [metrics["actor/fitted_tokens"], metrics["guard/tokens"]] == [num_output_tokens(part) for part in parts]
    assert metrics["actor/fitted_is_held_out"] == metrics["guard/is_held_out"] == 1


def test_the_guards_replies_do_not_change_the_update(
    base_model: Path, config: TrainerConfig, draw: Draw, held_out: tuple[Sample, ...]
) -> None:
    others = draw(160, seed=6).samples
    probes = []
    for guard in (held_out[1::2], others[1::2]):
        trainer = make_trainer(base_model, config, 1e-2)
        pairs = zip(held_out[::2], guard, strict=True)
        trainer.update(replace(draw(8), held_out=tuple(sample for pair in pairs for sample in pair)))
        probes.append(trainer.probe())
    assert probes[0] == probes[1]


def test_a_batch_with_one_reply_of_the_parent_cannot_make_a_large_update(
    base_model: Path, config: TrainerConfig, draw: Draw, held_out: tuple[Sample, ...]
) -> None:
    """The number of the parent's replies in the batch, and their tokens, say nothing about the size of the update."""
    sampled = draw(24).samples
    first = replace(sampled[0], output_ids=sampled[0].output_ids[:2], logprobs=sampled[0].logprobs[:2])
    batch = replace(draw(24), samples=(first, *(replace(sample, lag=1) for sample in sampled[1:])))
    fresh = draw(96, seed=9).samples
    for lr in (1e-5, 1e-2):
        for replies in ((), held_out):
            trainer = make_trainer(base_model, config, lr, algorithm=PPOConfig(epochs=3))
            before = log_distributions(trainer.policy, fresh)
            trainer.update(replace(batch, held_out=replies))
            assert mean_kl(before, log_distributions(trainer.policy, fresh)) < 1.5 * TARGET


def test_an_update_is_enlarged_only_where_its_kl_is_measured_on_other_replies(
    base_model: Path, config: TrainerConfig, draw: Draw, held_out: tuple[Sample, ...]
) -> None:
    scales = []
    for replies in ((), held_out[:20], held_out):
        metrics = make_trainer(base_model, config, 1e-5).update(replace(draw(8), held_out=replies)).metrics
        assert metrics["actor/fitted_is_held_out"] == float(len(replies) == len(held_out))
        scales.append(metrics["actor/step_scale"])
    assert scales[0] == scales[1] == 1 < scales[2]


def test_guard_reads_the_fitted_kl_where_there_are_few_other_replies(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    foreign = replace(draw(1, seed=6).samples[0], output_ids=(10**6,) * MIN_TOKENS, logprobs=(-1.0,) * MIN_TOKENS)
    trainer: Trainer = make_trainer(base_model, config, 1e-2)
    metrics = trainer.update(replace(draw(8), held_out=(*draw(4, seed=5).samples, foreign))).metrics
    assert metrics["guard/kl"] == metrics["actor/fitted_kl"] and metrics["guard/is_held_out"] == 0


@pytest.mark.parametrize("algorithm", [PPOConfig(), DPOConfig()], ids=lambda config: config.type)
def test_without_other_replies_the_kl_is_measured_on_the_whole_batch(
    base_model: Path, config: TrainerConfig, draw: Draw, algorithm: AlgorithmConfig
) -> None:
    """Of whatever version its replies are."""
    trainer = make_trainer(base_model, config, 1e-3, algorithm=algorithm, kl_target=None, max_mismatch=100.0)
    sampled = in_groups(draw(8), 2)
    samples = tuple(replace(sample, lag=index % 2) for index, sample in enumerate(sampled.samples))
    before = log_distributions(trainer.policy, samples)
    metrics = trainer.update(replace(sampled, samples=samples)).metrics
    assert metrics["guard/kl"] == pytest.approx(mean_kl(before, log_distributions(trainer.policy, samples)), rel=1e-3)
    assert metrics["guard/tokens"] == metrics["actor/fitted_tokens"] == num_output_tokens(samples)


def test_parts_have_enough_tokens_or_none(held_out: tuple[Sample, ...]) -> None:
    search, guard = split_held_out(held_out, VOCABULARY)
    assert not {sample.turn_id for sample in search} & {sample.turn_id for sample in guard}
    assert len(search) == len(guard) == len(held_out) / 2
    few = held_out[:90]
    assert MIN_TOKENS <= num_output_tokens(few) < 2 * MIN_TOKENS
    assert split_held_out(few, VOCABULARY) == ([], list(few)), "enough for one part, which is the guard's"
    long = replace(held_out[0], output_ids=(1,) * MIN_TOKENS, logprobs=(-1.0,) * MIN_TOKENS)
    assert split_held_out([long], VOCABULARY) == ([], [long])
    assert split_held_out(held_out[:20], VOCABULARY) == split_held_out((), VOCABULARY) == ([], [])


def test_a_bounded_number_of_tokens_and_of_their_alternatives_is_kept(
    base_model: Path, config: TrainerConfig, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Trainer(base_model, config).policy
    samples = draw(8).samples
    monkeypatch.setattr(update_kl, "MAX_TOKENS", 11)
    monkeypatch.setattr(update_kl, "NUM_LIKELY_TOKENS", 5)
    measured = UpdateKL(policy, samples, 64)
    assert sum(old.ids_NK.shape[0] for old in measured.old) == measured.num_tokens == 11
    assert {old.logprobs_NK.shape[1] for old in measured.old} == {5}
    assert 0 <= measured.measure() < 1e-6
