"""One update, step by step: invariances, exact identities and error handling."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from alignment.algorithms.base import prepare_step
from alignment.algorithms.ppo import PPO
from alignment.artifacts.manifest import write_manifest
from alignment.config.algorithm import CorrectionConfig
from alignment.config.algorithm_choice import AlgorithmConfig, CustomConfig
from alignment.config.policy_gradient_algorithms import (
    DAPOConfig,
    DrGRPOConfig,
    GiGPOConfig,
    GRPOConfig,
    LengthAwarePPOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.config.preference_algorithms import DPOConfig, KTOConfig, OnlineDPOConfig
from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.errors import ForeignSamples, NoVariance
from alignment.models.base_model import ModelRole
from alignment.trainer.checkpoint import optimizer_file
from alignment.trainer.loss_part import LossPart
from alignment.trainer.optimizer import MOMENTS
from alignment.trainer.scoring import score_sequences
from alignment.trainer.trainer import Trainer
from alignment.trainer.update import Update
from alignment.types import Batch, LossOutput, MicroBatch, ReturnReason

Draw = Callable[..., Batch]
EVERY: list[AlgorithmConfig] = [
    PPOConfig(),
    PPOConfig(estimator="gae"),
    PPOConfig(estimator="turn_gae"),
    PPOConfig(loss="gspo", aggregation="seq-mean-token-mean"),
    PPOConfig(correction=CorrectionConfig(level="sequence", mode="reject", low=0.5, high=2.0)),
    PPOConfig(entropy_coef=0.01),
    LengthAwarePPOConfig(shortest=4, longest=8),
    GRPOConfig(),
    DrGRPOConfig(),
    DAPOConfig(),
    GiGPOConfig(),
    RLOOConfig(),
    ReinforcePlusPlusConfig(),
    DPOConfig(),
    DPOConfig(kind="ipo"),
    OnlineDPOConfig(),
    KTOConfig(),
]


def label(config: AlgorithmConfig) -> str:
    fields = config.model_dump(exclude_defaults=True, exclude={"type"})
    return "-".join([config.type, *(str(value) for value in fields.values() if not isinstance(value, dict))])


def in_groups(batch: Batch, size: int = 3) -> Batch:
    """Return the batch with its samples grouped: one prompt per group and different rewards."""
    samples = [
        replace(
            sample,
            prompt_ids=batch.samples[index - index % size].prompt_ids,
            group=f"g{index // size}",
            reward=float((index * 7) % 5),
        )
        for index, sample in enumerate(batch.samples)
    ]
    return replace(batch, samples=tuple(samples))


@pytest.fixture
def grouped(draw: Draw, base_model: Path) -> Batch:
    from alignment.trainer.scoring import recompute_logprobs

    batch = in_groups(draw(9))
    logprobs = recompute_logprobs(base_model, None, batch.samples, device="cpu")
    samples = [replace(s, logprobs=tuple(p.tolist())) for s, p in zip(batch.samples, logprobs, strict=True)]
    return replace(batch, samples=tuple(samples))


def updated_trainer(base_model: Path, config: TrainerConfig, batch: Batch) -> Trainer:
    """Return a trainer whose policy differs from the base model, so that no metric is zero."""
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": PPOConfig(), "packing": "off"}))
    trainer.update(batch)
    other_gradient = Trainer(base_model, config)
    other_gradient.policy.load_adapter(
        {name: tensor.detach() for name, tensor in trainer.policy.role_parameters("actor").items()}
    )
    return other_gradient


def first_step(trainer: Trainer, batch: Batch) -> tuple[dict[str, float], Tensor]:
    """Return the metrics and the gradient of the first step."""
    update = Update(trainer.context, batch, step=0)
    part = LossPart(update.algorithm, update.samples, update.sequences, update.data)
    update._plan(part)
    update._score(part.first_epoch)
    prepare_step(trainer.algorithm, 0, update.data)
    metrics = update.gradient_accumulator.accumulate([part], [part.epochs[0][0]])
    roles: tuple[ModelRole, ...] = ("actor", "critic") if "critic" in trainer.optimizers else ("actor",)
    tensors = [tensor for role in roles for tensor in trainer.policy.role_parameters(role).values()]
    return metrics, torch.cat([tensor.grad.flatten() for tensor in tensors if tensor.grad is not None])


@pytest.mark.parametrize("algorithm", EVERY, ids=label)
def test_micro_batch_size_and_packing_do_not_change_the_gradient(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig
) -> None:
    results = []
    for micro_batch_tokens, packing in ((1, "off"), (64, "chain"), (64, "tree"), (10_000, "tree")):
        fields = {"micro_batch_tokens": micro_batch_tokens, "packing": packing, "algorithm": algorithm}
        results.append(first_step(updated_trainer(base_model, config.model_copy(update=fields), grouped), grouped))
    metrics, gradient = results[0]
    assert gradient.abs().max() > 1e-4
    for other_metrics, other_gradient in results[1:]:
        torch.testing.assert_close(other_gradient, gradient, atol=2e-5, rtol=1e-3)
        assert other_metrics == pytest.approx(metrics, abs=2e-5)


@pytest.mark.parametrize("algorithm", EVERY, ids=label)
def test_every_algorithm_updates_and_reports(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig
) -> None:
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    before = {name: tensor.detach().clone() for name, tensor in trainer.policy.role_parameters("actor").items()}
    report = trainer.update(grouped)
    assert any(
        not torch.equal(tensor, before[name]) for name, tensor in trainer.policy.role_parameters("actor").items()
    )
    assert {"actor/pg_loss", "actor/grad_norm", "actor/lr", "perf/throughput"} <= report.metrics.keys()
    assert all(isinstance(value, (int, float)) for value in report.metrics.values())


@pytest.mark.parametrize("packing", ["tree", "chain", "off"])
def test_first_step_logprobs_equal_old_logprobs_bit_for_bit(
    base_model: Path, config: TrainerConfig, grouped: Batch, packing: str
) -> None:
    algorithm_config = GRPOConfig(minibatches=2, epochs=2, kl_coef=0.0)
    trainer = updated_trainer(
        base_model, config.model_copy(update={"algorithm": algorithm_config, "packing": packing}), grouped
    )
    metrics, _ = first_step(trainer, grouped)
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/ppo_kl_k3"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_single_step_needs_no_old_logprobs_and_gives_the_same_gradient(
    base_model: Path, config: TrainerConfig, grouped: Batch
) -> None:
    one_step = GRPOConfig(minibatches=1)
    trainer = updated_trainer(base_model, config.model_copy(update={"algorithm": one_step}), grouped)
    assert not trainer.algorithm.needs_old_logprobs
    _, gradient = first_step(trainer, grouped)
    trainer.optimizers["actor"].zero_grad()
    trainer.algorithm.needs_old_logprobs = True
    _, scored = first_step(trainer, grouped)
    torch.testing.assert_close(scored, gradient, atol=1e-7, rtol=1e-5)


def test_decoupled_ppo_equals_plain_ppo_without_staleness(
    base_model: Path, config: TrainerConfig, grouped: Batch
) -> None:
    """With η = 0 the recorded and the recomputed log-probs are equal, so the correction has no effect."""
    uncorrected = PPOConfig(proximal="rollout", correction=CorrectionConfig(mode="off"))
    adapters = []
    for algorithm_config in (PPOConfig(), PPOConfig(proximal="loglinear"), uncorrected):
        trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm_config}))
        trainer.update(grouped)
        adapters.append(trainer.policy.role_parameters("actor"))
    for adapter in adapters[1:]:
        for name, tensor in adapters[0].items():
            torch.testing.assert_close(adapter[name], tensor, atol=2e-5, rtol=0)


def test_asynchronous_run_without_staleness_equals_synchronous_run_bit_for_bit(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    """Compare pickling, export and restore, as the worker uses them, with a plain loop."""
    synchronous, asynchronous = Trainer(base_model, config), Trainer(base_model, config)
    version: Path | None = None
    for number in range(3):
        batch = draw(8, seed=number, adapter=version)
        synchronous.update(batch)
        asynchronous.restore(version)
        asynchronous.update(pickle.loads(pickle.dumps(batch)))
        version = asynchronous.export(tmp_path / f"v{number + 1}", {}).path
        asynchronous.restore(None)
    asynchronous.restore(version)
    for name, tensor in synchronous.policy.role_parameters("actor").items():
        assert torch.equal(asynchronous.policy.role_parameters("actor")[name], tensor)


@pytest.mark.parametrize(
    "algorithm",
    [PPOConfig(estimator="gae"), LengthAwarePPOConfig(shortest=3, longest=5, drift_patience=1)],
    ids=["critic", "drift"],
)
def test_algorithm_state_is_restored_with_the_version(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path, algorithm: AlgorithmConfig
) -> None:
    settings = config.model_copy(update={"algorithm": algorithm})
    trainer, resumed = Trainer(base_model, settings), Trainer(base_model, settings)
    trainer.update(draw(8, seed=1))
    trainer.export(tmp_path / "v1", {})
    expected = trainer.update(draw(8, seed=2)).metrics
    resumed.restore(tmp_path / "v1")
    resumed_metrics = resumed.update(draw(8, seed=2)).metrics
    names = {name for name in expected if not name.startswith(("timing_s", "perf"))}
    assert {name: resumed_metrics[name] for name in names} == {name: expected[name] for name in names}
    for role in ("actor", "critic") if "critic" in trainer.optimizers else ("actor",):
        for name, tensor in trainer.policy.role_parameters(role).items():
            assert torch.equal(resumed.policy.role_parameters(role)[name], tensor)


def test_version_of_an_earlier_release_is_restored_with_its_moments(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    """There, one file has both moments."""
    trainer, resumed = Trainer(base_model, config), Trainer(base_model, config)
    trainer.update(draw(8, seed=1))
    export = trainer.export(tmp_path / "v1", {})
    files = [export.path / optimizer_file(moment) for moment in MOMENTS]
    moments = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(moments) == 2 * len(trainer.optimizers["actor"].parameters)
    save_file(moments, files[0].with_name("optimizer.safetensors"))
    for file in files:
        file.unlink()
    resumed.restore(export.path, write_manifest(export.path, {}))
    expected = trainer.update(draw(8, seed=2)).metrics["actor/grad_norm"]
    assert resumed.update(draw(8, seed=2)).metrics["actor/grad_norm"] == expected
    for name, tensor in trainer.policy.role_parameters("actor").items():
        assert torch.equal(resumed.policy.role_parameters("actor")[name], tensor)


def test_critic_can_be_added_to_a_policy_trained_without_one(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    first = Trainer(base_model, config)
    first.update(draw(8))
    first.export(tmp_path / "v1", {})
    second = Trainer(base_model, config.model_copy(update={"algorithm": PPOConfig(estimator="gae")}))
    second.restore(tmp_path / "v1")
    assert second.update(draw(8, seed=1)).metrics["critic/values/mean"] == 0.0
    assert second.optimizers["actor"].steps > first.optimizers["actor"].steps


def test_full_weights_use_the_same_interface(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    settings = config.model_copy(update={"lora": None})
    trainer = Trainer(base_model, settings)
    report = trainer.update(draw(8, seed=1))
    assert report.metrics["reference_kl"] > 0
    export = trainer.export(tmp_path / "v1", {})
    expected = trainer.update(draw(8, seed=2)).metrics["actor/pg_loss"]
    resumed = Trainer(base_model, settings)
    resumed.restore(export.path)
    assert resumed.update(draw(8, seed=2)).metrics["actor/pg_loss"] == expected

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(export.path).state_dict()
    base = AutoModelForCausalLM.from_pretrained(base_model).state_dict()
    assert exported.keys() == base.keys()
    assert any(not torch.equal(exported[name], base[name]) for name in base)


def test_documented_custom_algorithm_learns(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text().partition("### An algorithm\n")[2]
    (tmp_path / "shop_rl.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    algorithm = CustomConfig(name="shop_rl:Brave", options={"courage": 2.0}, epochs=2)
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    before = score_sequences(trainer.policy, [ScoredSequence.from_sample(s) for s in draw(16).samples], max_tokens=64)
    metrics = trainer.update(draw(16)).metrics
    after = score_sequences(trainer.policy, [ScoredSequence.from_sample(s) for s in draw(16).samples], max_tokens=64)
    is_rewarded = torch.tensor([sample.reward > 0 for sample in draw(16).samples])
    assert (after - before)[is_rewarded, 0].mean() > 0 > (after - before)[~is_rewarded, 0].mean()
    assert metrics["brave/courage"] == 2.0
    assert metrics["brave/ratio"] == pytest.approx(1.0, abs=0.5) and metrics["brave/ratio"] != 1.0
    assert metrics["training/steps"] == 8


def test_entropy_bonus_raises_the_entropy(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    """The advantages of all replies but two are 0, so the bonus decides."""
    batch = draw(12)
    samples = tuple(replace(s, reward=float(index < 1) - float(index == 1)) for index, s in enumerate(batch.samples))
    algorithm = PPOConfig(entropy_coef=1.0, whiten="off", kl_coef=0.0, epochs=4, minibatches=1, max_kl=None)
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    metrics = [trainer.update(replace(batch, samples=samples)).metrics for _ in range(2)]
    assert metrics[0]["actor/entropy"] == pytest.approx(-metrics[0]["actor/entropy_loss"])
    assert metrics[1]["actor/entropy"] > metrics[0]["actor/entropy"] > 1.0


def test_entropy_is_not_computed_unless_asked_for(
    base_model: Path, config: TrainerConfig, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the entropy was computed")

    monkeypatch.setattr("alignment.models.base_model.compute_logprobs_and_entropy", fail)
    Trainer(base_model, config).update(draw(8))
    with_bonus = config.model_copy(update={"algorithm": PPOConfig(entropy_coef=0.01)})
    with pytest.raises(AssertionError, match="entropy was computed"):
        Trainer(base_model, with_bonus).update(draw(8))


def foreign(batch: Batch, distance: float, count: int) -> Batch:
    """Return the batch with the log-probs of the first `count` turns shifted, as if they came from other weights."""
    samples = [
        replace(sample, logprobs=tuple(p - distance * (index < count) for p in sample.logprobs))
        for index, sample in enumerate(batch.samples)
    ]
    return replace(batch, samples=tuple(samples))


@pytest.mark.parametrize(
    "algorithm",
    [PPOConfig(), PPOConfig(minibatches=1), PPOConfig(proximal="loglinear"), GRPOConfig(minibatches=1), DPOConfig()],
    ids=label,
)
def test_foreign_logprobs_are_rejected_with_and_without_old_logprobs(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig
) -> None:
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    with pytest.raises(ForeignSamples, match="other weights"):
        trainer.update(foreign(grouped, 0.9, len(grouped.samples)))


def with_token(batch: Batch, index: int, id: int) -> Batch:
    """Return the batch with another last output token in one turn."""
    samples = list(batch.samples)
    samples[index] = replace(samples[index], output_ids=(*samples[index].output_ids[:-1], id))
    return replace(batch, samples=tuple(samples))


@pytest.mark.parametrize("algorithm", [PPOConfig(), PPOConfig(minibatches=1), DPOConfig()], ids=label)
@pytest.mark.parametrize("kind", ["log-probs", "token ids"])
def test_a_foreign_turn_is_left_out_and_the_rest_is_trained_on(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig, kind: str
) -> None:
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    id = grouped.samples[0].turn_id
    batch = foreign(grouped, 60.0, 1) if kind == "log-probs" else with_token(grouped, 0, 10**6)
    report = trainer.update(batch)
    assert report.foreign_turns.keys() == {id} and report.metrics["training/samples_foreign"] == 1
    assert ("other weights" if kind == "log-probs" else "another tokenizer") in report.foreign_turns[id]
    clean = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    clean.update(replace(grouped, samples=grouped.samples[1:]))
    for name, tensor in trainer.policy.role_parameters("actor").items():
        assert torch.equal(tensor, clean.policy.role_parameters("actor")[name]), name


@pytest.mark.parametrize("num_foreign", [1, 2, 4])
def test_late_turns_do_not_hide_that_the_engine_serves_other_weights(
    base_model: Path, config: TrainerConfig, grouped: Batch, num_foreign: int
) -> None:
    """Four of nine turns are of this policy: late turns cannot be foreign, so they say nothing about the others."""
    batch = foreign(grouped, 60.0, num_foreign)
    late = [replace(sample, lag=1) for sample in batch.samples[4:]]
    batch = replace(batch, samples=(*batch.samples[:4], *late))
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": PPOConfig()}))
    if num_foreign <= 2:
        report = trainer.update(batch)
        assert report.foreign_turns.keys() == {sample.turn_id for sample in batch.samples[:num_foreign]}
    else:
        with pytest.raises(ForeignSamples, match="4 of 4 replies") as raised:
            trainer.update(batch)
        assert raised.value.turns == {}


def test_only_turn_of_this_policy_is_left_out(base_model: Path, config: TrainerConfig, grouped: Batch) -> None:
    batch = foreign(grouped, 60.0, 1)
    late = [replace(sample, lag=1) for sample in batch.samples[1:]]
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": PPOConfig()}))
    report = trainer.update(replace(batch, samples=(batch.samples[0], *late)))
    assert report.foreign_turns.keys() == {batch.samples[0].turn_id}


def test_noise_of_one_token_does_not_make_a_short_reply_foreign(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    batch = draw(16)
    short = replace(
        batch.samples[0], output_ids=batch.samples[0].output_ids[:1], logprobs=batch.samples[0].logprobs[:1]
    )
    noisy = replace(short, logprobs=(short.logprobs[0] - 3.0,))
    trainer = Trainer(base_model, config)
    assert trainer.update(replace(batch, samples=(noisy, *batch.samples[1:]))).foreign_turns == {}


def test_what_is_left_of_a_batch_without_its_foreign_turn_must_have_contrast(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    batch = draw(4)
    samples = tuple(replace(sample, reward=float(index == 0)) for index, sample in enumerate(batch.samples))
    trainer = Trainer(base_model, config)
    with pytest.raises(ForeignSamples, match="foreign turns") as raised:
        trainer.update(foreign(replace(batch, samples=samples), 30.0, 1))
    assert raised.value.turns.keys() == {batch.samples[0].turn_id}
    assert pickle.loads(pickle.dumps(raised.value)).turns == raised.value.turns


@pytest.mark.parametrize("minibatches", [1, 2])
def test_batch_with_all_tokens_rejected_raises_for_any_number_of_steps(
    base_model: Path, config: TrainerConfig, grouped: Batch, minibatches: int
) -> None:
    correction = CorrectionConfig(mode="reject", low=0.9, high=1.1)
    algorithm_config = PPOConfig(minibatches=minibatches, correction=correction, kl_coef=0.0)
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm_config}))
    with pytest.raises((ForeignSamples, NoVariance)):
        trainer.update(foreign(grouped, 0.3, len(grouped.samples)))
    assert trainer.optimizers["actor"].steps == 0


@pytest.mark.parametrize(
    "algorithm", [KTOConfig(max_kl=1e-6), DPOConfig(max_kl=1e-6), PPOConfig(max_kl=1e-6)], ids=label
)
def test_max_kl_stops_every_algorithm_early(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig
) -> None:
    algorithm_config = algorithm.model_copy(update={"epochs": 4, "minibatches": 1})
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm_config}))
    metrics = trainer.update(grouped).metrics
    assert (metrics["training/steps"], metrics["training/stopped_early"]) == (1, 1.0)


def test_samples_that_max_kl_leaves_without_a_step_return(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    """One of four steps is made, with two of eight samples; the other six are not learned from."""
    batch = draw(8)
    algorithm = PPOConfig(max_kl=1e-9, epochs=1, minibatches=4, kl_coef=0.0)
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    update = Update(trainer.context, batch, step=0)
    part = LossPart(update.algorithm, update.samples, update.sequences, update.data)
    update._plan(part)
    learned = {batch.samples[index].turn_id for index in part.epochs[0][0][0]}
    report = trainer.update(batch)
    assert report.returned_turns == {
        sample.turn_id: ReturnReason.STOPPED for sample in batch.samples if sample.turn_id not in learned
    }
    assert (len(learned), report.metrics["training/samples_returned"], report.metrics["training/steps"]) == (2, 6, 1)


@pytest.mark.parametrize("epochs", [1, 3])
def test_samples_of_complete_passes_do_not_return(
    base_model: Path, config: TrainerConfig, draw: Draw, epochs: int
) -> None:
    """The stop comes before the second step, when a pass of one step has used all samples, or never."""
    algorithm = PPOConfig(max_kl=1e-9, epochs=epochs, minibatches=1)
    report = Trainer(base_model, config.model_copy(update={"algorithm": algorithm})).update(draw(8))
    assert report.returned_turns == {}
    assert report.metrics["training/stopped_early"] == float(epochs > 1)


def test_samples_of_other_versions_do_not_stop_an_update(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    """k3 of the parent to the new policy is a KL on the parent's replies alone; its bound is that of the KL target."""
    batch = draw(8)
    stale = replace(batch, samples=tuple(replace(sample, lag=8) for sample in batch.samples))
    fields = {"algorithm": PPOConfig(max_kl=1e-9, epochs=3, minibatches=4), "kl_target": 0.01}
    report = Trainer(base_model, config.model_copy(update=fields)).update(stale)
    assert (report.metrics["training/steps"], report.metrics["training/stopped_early"]) == (12, 0)
    assert report.returned_turns == {} and report.metrics["guard/kl"] <= 0.01


class PolicyGradientWithoutKL(PPO):
    """A policy gradient whose loss reports no KL."""

    Config = PPOConfig

    def compute_loss(self, inputs: MicroBatch) -> LossOutput:
        return LossOutput(super().compute_loss(inputs).loss)


def test_max_kl_is_enforced_for_an_algorithm_that_reports_no_kl(
    base_model: Path, config: TrainerConfig, grouped: Batch
) -> None:
    algorithm = CustomConfig(
        name=f"{__name__}:PolicyGradientWithoutKL",
        epochs=4,
        minibatches=1,
        max_kl=1e-6,
        options={"proximal": "rollout"},
    )
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    metrics = trainer.update(grouped).metrics
    assert (metrics["training/steps"], metrics["training/stopped_early"]) == (1, 1.0)
    unbounded = algorithm.model_copy(update={"max_kl": None})
    metrics = Trainer(base_model, config.model_copy(update={"algorithm": unbounded})).update(grouped).metrics
    assert (metrics["training/steps"], metrics["training/stopped_early"]) == (4, 0.0)


def test_failed_update_restores_the_policy(
    base_model: Path, config: TrainerConfig, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm_config = PPOConfig(estimator="gae")
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm_config}))
    trainer.update(draw(8))

    def state() -> list[Tensor]:
        return [tensor.detach().clone() for tensor in trainer._trained_tensors()]

    def raise_error(step: int, report: object) -> None:
        raise RuntimeError("error in a hook")

    before, progress = state(), trainer.progress
    monkeypatch.setattr(trainer.algorithm, "after_train_step", raise_error)
    with pytest.raises(RuntimeError, match="hook"):
        trainer.update(draw(8, seed=1))
    assert all(torch.equal(before_tensor, after) for before_tensor, after in zip(before, state(), strict=True))
    assert trainer.progress == progress
