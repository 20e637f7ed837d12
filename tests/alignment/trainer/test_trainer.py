"""The public interface of the trainer: learning, resuming, exporting and rejecting."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from alignment.artifacts.manifest import verify, write_manifest
from alignment.artifacts.specs import ADAPTER, check_adapter
from alignment.config.policy_gradient_algorithms import PPOConfig
from alignment.config.trainer import OptimConfig, TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.errors import DamagedAdapter, ForeignSamples, NonFiniteUpdate, NoVariance
from alignment.trainer.scoring import recompute_logprobs, score_sequences
from alignment.trainer.trainer import Trainer
from alignment.types import Batch
from tests.support.adapters import adapter_spec

Draw = Callable[..., Batch]


@pytest.fixture(scope="module")
def _shared(base_model: Path) -> dict[str, Trainer]:
    return {}


@pytest.fixture
def trainer(base_model: Path, config: TrainerConfig, _shared: dict[str, Trainer]) -> Trainer:
    """Return the module's trainer, reset for each test."""
    if "trainer" not in _shared:
        _shared["trainer"] = Trainer(base_model, config)
    _shared["trainer"].restore(None)
    return _shared["trainer"]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.policy.role_parameters("actor").items()}


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_rewarded_output_becomes_more_likely_and_penalised_output_less_likely(trainer: Trainer, draw: Draw) -> None:
    batch = draw(32)
    before = np.array([sample.logprobs[0] for sample in batch.samples])
    for _ in range(3):
        trainer.update(batch)
    scored = score_sequences(
        trainer.policy, [ScoredSequence.from_sample(sample) for sample in batch.samples], max_tokens=64
    )
    after = scored[:, 0].numpy()
    is_rewarded = np.array([sample.reward > 0 for sample in batch.samples])
    assert (after - before)[is_rewarded].mean() > 0.05
    assert (after - before)[~is_rewarded].mean() < -0.05


def test_untrained_trainer_equals_the_base_model(trainer: Trainer) -> None:
    probe = trainer.probe()
    assert len(probe.ids) == len(probe.logprobs) >= 5
    assert all(len(ids) == len(logprobs) + 1 for ids, logprobs in zip(probe.ids, probe.logprobs, strict=True))
    sequences = [ScoredSequence(ids, start=1) for ids in probe.ids]
    ref_logprobs_BT = score_sequences(trainer.policy, sequences, max_tokens=64, role="reference")
    for logprobs, row in zip(probe.logprobs, ref_logprobs_BT.tolist(), strict=True):
        assert list(logprobs) == row[: len(logprobs)]


def test_reference_stays_the_base_model_during_updates(trainer: Trainer, draw: Draw) -> None:
    sequences = [ScoredSequence.from_sample(sample) for sample in draw(8).samples]
    base_BT = score_sequences(trainer.policy, sequences, max_tokens=64)
    assert trainer.update(draw(8)).metrics["reference_kl"] > 0
    assert not torch.equal(score_sequences(trainer.policy, sequences, max_tokens=64), base_BT)
    assert torch.equal(score_sequences(trainer.policy, sequences, max_tokens=64, role="reference"), base_BT)


def test_same_seed_gives_identical_bits(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    batch, first, second = draw(8), Trainer(base_model, config), Trainer(base_model, config)
    first.update(batch)
    second.update(batch)
    assert are_equal(weights(first), weights(second))


def test_resuming_from_disk_equals_continuing_in_memory(trainer: Trainer, draw: Draw, tmp_path: Path) -> None:
    first, second = draw(8, seed=1), draw(8, seed=2)
    trainer.update(first)
    trainer.export(tmp_path / "shop-v1", {})
    expected_report = trainer.update(second)
    expected_weights = weights(trainer)

    trainer.restore(None)
    trainer.restore(tmp_path / "shop-v1")
    resumed_report = trainer.update(second)
    assert are_equal(weights(trainer), expected_weights)
    assert resumed_report.updates == expected_report.updates == 2
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/baseline"):
        assert resumed_report.metrics[name] == expected_report.metrics[name]


def test_peft_loads_the_exported_adapter(trainer: Trainer, base_model: Path, draw: Draw, tmp_path: Path) -> None:
    trainer.update(draw(8))
    trainer.export(tmp_path / "shop-v1", {})
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_model), tmp_path / "shop-v1")
    probe = trainer.probe()
    for ids, logprobs in zip(probe.ids, probe.logprobs, strict=True):
        with torch.no_grad():
            all_logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [all_logprobs[t, token].item() for t, token in enumerate(ids[1:])]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_export_has_a_manifest_and_passes_the_adapter_check(
    trainer: Trainer, base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    assert config.lora is not None
    trainer.update(draw(8))
    export = trainer.export(tmp_path / "versions" / "shop-v1", {"parent": "shop-v0"})
    assert verify(export.path, export.manifest_sha256) == {"parent": "shop-v0"}
    check_adapter(export.path, adapter_spec(base_model, config.lora))
    assert [path.name for path in export.path.parent.iterdir()] == ["shop-v1"]  # no temporary directory is left
    assert json.loads((export.path / "trainer" / "state.json").read_text())["updates"] == 1
    with pytest.raises(FileExistsError):
        trainer.export(export.path, {})
    assert [path.name for path in export.path.parent.iterdir()] == ["shop-v1"]


def test_equal_policies_export_equal_bytes(trainer: Trainer, draw: Draw, tmp_path: Path) -> None:
    trainer.update(draw(8))
    first, second = (trainer.export(tmp_path / name, {}) for name in ("once", "twice"))
    assert first.manifest_sha256 == second.manifest_sha256


def test_damaged_adapter_is_not_restored(trainer: Trainer, draw: Draw, tmp_path: Path) -> None:
    trainer.update(draw(8))
    trainer.export(tmp_path / "shop-v1", {})
    before = weights(trainer)
    raw = bytearray((tmp_path / "shop-v1" / ADAPTER).read_bytes())
    raw[-3] ^= 1
    (tmp_path / "shop-v1" / ADAPTER).write_bytes(raw)
    with pytest.raises(DamagedAdapter):
        trainer.restore(tmp_path / "shop-v1")
    assert are_equal(weights(trainer), before)


def test_batch_without_variance_is_rejected(trainer: Trainer, draw: Draw) -> None:
    batch = draw(4)
    batch_without_variance = replace(batch, samples=tuple(replace(sample, reward=1.0) for sample in batch.samples))
    with pytest.raises(NoVariance):
        trainer.update(batch_without_variance)


def test_logprobs_of_other_weights_are_rejected(trainer: Trainer, draw: Draw) -> None:
    batch, before = draw(8), weights(trainer)
    samples = tuple(replace(s, logprobs=tuple(p - 0.8 for p in s.logprobs)) for s in batch.samples)
    with pytest.raises(ForeignSamples, match=r"0\.8"):
        trainer.update(replace(batch, samples=samples))
    assert are_equal(weights(trainer), before)
    assert trainer.progress.algorithm == {}


def test_update_stops_early_at_max_kl(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    algorithm_config = PPOConfig(epochs=6, minibatches=2, max_kl=1e-3)
    trainer = Trainer(
        base_model, config.model_copy(update={"algorithm": algorithm_config, "optim": OptimConfig(lr=1e-2)})
    )
    metrics = trainer.update(draw(16)).metrics
    assert metrics["training/stopped_early"] == 1.0
    assert 1 <= metrics["training/steps"] < 12
    assert trainer.optimizers["actor"].steps == metrics["training/steps"]
    assert all(tensor.grad is None for tensor in trainer.policy.role_parameters("actor").values())


def test_non_finite_update_restores_the_policy(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    # A learning rate that makes the adapter infinite in the first step makes the gradient of the second step NaN.
    diverging_config = config.model_copy(update={"optim": OptimConfig(lr=1e30)})
    trainer = Trainer(base_model, diverging_config)
    before, probe = weights(trainer), trainer.probe()
    with pytest.raises(NonFiniteUpdate):
        trainer.update(draw(8))
    assert are_equal(weights(trainer), before)
    assert trainer.probe() == probe
    assert trainer.optimizers["actor"].steps == 0
    assert trainer.progress.updates == 0


def test_report_uses_verl_metric_names(trainer: Trainer, draw: Draw) -> None:
    report = trainer.update(draw(8))
    assert report.batch_id == "batch-0"
    assert report.metrics.keys() >= {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/ppo_kl",
        "actor/grad_norm",
        "critic/score/mean",
        "response_length/mean",
        "rollout_corr/kl",
        "rollout_corr/rollout_is_eff_sample_size",
        "timing_s/update_actor",
        "reference_kl",
    }
    assert report.metrics["critic/score/mean"] == 0.0
    assert report.metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-6)  # the samples are on-policy


def test_recomputed_logprobs_identify_the_version(
    trainer: Trainer, base_model: Path, draw: Draw, tmp_path: Path
) -> None:
    for _ in range(3):
        trainer.update(draw(8))
    trainer.export(tmp_path / "shop-v3", {})
    batch = draw(6, seed=4, adapter=tmp_path / "shop-v3")

    def distance(adapter: Path | None) -> float:
        recomputed = recompute_logprobs(base_model, adapter, batch.samples, device="cpu")
        return max(np.abs(a - s.logprobs).max() for a, s in zip(recomputed, batch.samples, strict=True))

    assert distance(tmp_path / "shop-v3") < 1e-5
    assert distance(None) > 0.05


def test_imported_adapter_starts_with_a_reset_optimizer(trainer: Trainer, draw: Draw, tmp_path: Path) -> None:
    trainer.update(draw(8))
    trainer.export(tmp_path / "shop-v1", {})
    rmtree(tmp_path / "shop-v1" / "trainer")
    write_manifest(tmp_path / "shop-v1", {})
    trainer.restore(tmp_path / "shop-v1")
    assert (trainer.progress.updates, trainer.optimizers["actor"].steps) == (0, 0)
    assert are_equal(load_file(tmp_path / "shop-v1" / ADAPTER), weights(trainer))
