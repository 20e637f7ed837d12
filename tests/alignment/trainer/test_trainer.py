"""The learner as its owner sees it: it learns, it forgets nothing, and it refuses cleanly."""

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

from alignment.artifacts import ADAPTER, AdapterSpec, check_adapter, seal, verify
from alignment.config.algorithm import PPOConfig
from alignment.config.trainer import OptimConfig, TrainerConfig
from alignment.data.micro_batches import Scored
from alignment.errors import DamagedAdapter, ForeignSamples, NonFiniteUpdate, NoVariance
from alignment.trainer.recompute_logprobs import recompute_logprobs
from alignment.trainer.scoring import score_alone
from alignment.trainer.trainer import Trainer
from alignment.types import Batch

Draw = Callable[..., Batch]


@pytest.fixture(scope="module")
def _shared(base_model: Path) -> dict[str, Trainer]:
    return {}


@pytest.fixture
def learner(base_model: Path, config: TrainerConfig, _shared: dict[str, Trainer]) -> Trainer:
    """One learner for the module, begun anew for each test, as a long-lived trainer does."""
    if "learner" not in _shared:
        _shared["learner"] = Trainer(base_model, config)
    _shared["learner"].restore(None)
    return _shared["learner"]


def weights(learner: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.policy.tensors("actor").items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_liked_answer_becomes_likelier_and_the_disliked_less_so(learner: Trainer, draw: Draw) -> None:
    batch = draw(32)
    before = np.array([sample.logprobs[0] for sample in batch.samples])
    for _ in range(3):
        learner.update(batch)
    scored = score_alone(learner.policy, [Scored.of(sample) for sample in batch.samples], budget=64)
    after = scored[:, 0].numpy()
    liked = np.array([sample.reward > 0 for sample in batch.samples])
    assert (after - before)[liked].mean() > 0.05
    assert (after - before)[~liked].mean() < -0.05


def test_a_fresh_learner_is_the_base_model(learner: Trainer) -> None:
    probe = learner.probe()
    assert len(probe.ids) == len(probe.logprobs) >= 5
    assert all(len(ids) == len(logprobs) + 1 for ids, logprobs in zip(probe.ids, probe.logprobs, strict=True))
    sequences = [Scored(ids, start=1) for ids in probe.ids]
    reference_BT = score_alone(learner.policy, sequences, budget=64, hat="reference")
    for logprobs, row in zip(probe.logprobs, reference_BT.tolist(), strict=True):
        assert list(logprobs) == row[: len(logprobs)]


def test_the_reference_stays_the_base_model_while_the_policy_moves(learner: Trainer, draw: Draw) -> None:
    sequences = [Scored.of(sample) for sample in draw(8).samples]
    base_BT = score_alone(learner.policy, sequences, budget=64)
    assert learner.update(draw(8)).reference_kl > 0
    assert not torch.equal(score_alone(learner.policy, sequences, budget=64), base_BT)
    assert torch.equal(score_alone(learner.policy, sequences, budget=64, hat="reference"), base_BT)


def test_the_same_seed_learns_the_same_bits(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    batch, first, second = draw(8), Trainer(base_model, config), Trainer(base_model, config)
    first.update(batch)
    second.update(batch)
    assert same(weights(first), weights(second))


def test_going_on_from_disk_is_going_on_in_memory(learner: Trainer, draw: Draw, tmp_path: Path) -> None:
    first, second = draw(8, seed=1), draw(8, seed=2)
    learner.update(first)
    learner.export(tmp_path / "shop-v1", {})
    straight_report = learner.update(second)
    straight = weights(learner)

    learner.restore(None)
    learner.restore(tmp_path / "shop-v1")
    resumed_report = learner.update(second)
    assert same(weights(learner), straight)
    assert resumed_report.updates == straight_report.updates == 2
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/baseline"):
        assert resumed_report.metrics[name] == straight_report.metrics[name]


def test_what_is_exported_is_what_peft_loads(learner: Trainer, base_model: Path, draw: Draw, tmp_path: Path) -> None:
    learner.update(draw(8))
    learner.export(tmp_path / "shop-v1", {})
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_model), tmp_path / "shop-v1")
    probe = learner.probe()
    for ids, logprobs in zip(probe.ids, probe.logprobs, strict=True):
        with torch.no_grad():
            everywhere = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = [everywhere[t, token].item() for t, token in enumerate(ids[1:])]
        np.testing.assert_allclose(logprobs, wanted, atol=1e-5)


def test_an_export_is_sealed_and_fit_for_an_engine(
    learner: Trainer, base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    learner.update(draw(8))
    export = learner.export(tmp_path / "versions" / "shop-v1", {"parent": "shop-v0"})
    assert verify(export.path, export.manifest_sha256) == {"parent": "shop-v0"}
    check_adapter(export.path, AdapterSpec.of(base_model, config.lora))
    assert [path.name for path in export.path.parent.iterdir()] == ["shop-v1"]  # nothing unfinished is left
    assert json.loads((export.path / "trainer" / "state.json").read_text())["updates"] == 1
    with pytest.raises(FileExistsError):
        learner.export(export.path, {})
    assert [path.name for path in export.path.parent.iterdir()] == ["shop-v1"]


def test_the_same_policy_is_exported_as_the_same_bytes(learner: Trainer, draw: Draw, tmp_path: Path) -> None:
    learner.update(draw(8))
    first, second = (learner.export(tmp_path / name, {}) for name in ("once", "twice"))
    assert first.manifest_sha256 == second.manifest_sha256


def test_a_damaged_adapter_is_not_restored(learner: Trainer, draw: Draw, tmp_path: Path) -> None:
    learner.update(draw(8))
    learner.export(tmp_path / "shop-v1", {})
    before = weights(learner)
    raw = bytearray((tmp_path / "shop-v1" / ADAPTER).read_bytes())
    raw[-3] ^= 1
    (tmp_path / "shop-v1" / ADAPTER).write_bytes(raw)
    with pytest.raises(DamagedAdapter):
        learner.restore(tmp_path / "shop-v1")
    assert same(weights(learner), before)


def test_a_batch_without_variance_is_refused(learner: Trainer, draw: Draw) -> None:
    batch = draw(4)
    content = replace(batch, samples=tuple(replace(sample, reward=1.0) for sample in batch.samples))
    with pytest.raises(NoVariance):
        learner.update(content)


def test_log_probs_that_other_weights_gave_are_refused(learner: Trainer, draw: Draw) -> None:
    batch, before = draw(8), weights(learner)
    samples = tuple(replace(s, logprobs=tuple(p - 0.8 for p in s.logprobs)) for s in batch.samples)
    with pytest.raises(ForeignSamples, match=r"0\.8"):
        learner.update(replace(batch, samples=samples))
    assert same(weights(learner), before)
    assert learner.progress.algorithm == {}


def test_an_update_stops_before_it_leaves_the_trust_region(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    recipe = PPOConfig(epochs=6, minibatches=2, max_kl=1e-3)
    learner = Trainer(base_model, config.model_copy(update={"algorithm": recipe, "optim": OptimConfig(lr=1e-2)}))
    metrics = learner.update(draw(16)).metrics
    assert metrics["training/stopped_early"] == 1.0
    assert 1 <= metrics["training/steps"] < 12
    assert learner.optimizer.steps == metrics["training/steps"]
    assert all(tensor.grad is None for tensor in learner.policy.tensors("actor").values())


def test_an_update_that_explodes_leaves_the_policy_as_it_was(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    # A rate that sends the adapter to infinity in the first step makes the second step's gradient not a number.
    wild = config.model_copy(update={"optim": OptimConfig(lr=1e30)})
    learner = Trainer(base_model, wild)
    before, probe = weights(learner), learner.probe()
    with pytest.raises(NonFiniteUpdate):
        learner.update(draw(8))
    assert same(weights(learner), before)
    assert learner.probe() == probe
    assert learner.optimizer.steps == 0
    assert learner.progress.updates == 0


def test_an_update_reports_in_the_field_s_vocabulary(learner: Trainer, draw: Draw) -> None:
    report = learner.update(draw(8))
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
    assert report.metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-6)  # the samples were fresh


def test_replies_attest_to_the_version_that_spoke(
    learner: Trainer, base_model: Path, draw: Draw, tmp_path: Path
) -> None:
    for _ in range(3):
        learner.update(draw(8))
    learner.export(tmp_path / "shop-v3", {})
    batch = draw(6, seed=4, adapter=tmp_path / "shop-v3")

    def distance(adapter: Path | None) -> float:
        again = recompute_logprobs(base_model, adapter, batch.samples, device="cpu")
        return max(np.abs(a - s.logprobs).max() for a, s in zip(again, batch.samples, strict=True))

    assert distance(tmp_path / "shop-v3") < 1e-5
    assert distance(None) > 0.05


def test_an_imported_adapter_begins_with_a_fresh_optimizer(learner: Trainer, draw: Draw, tmp_path: Path) -> None:
    learner.update(draw(8))
    learner.export(tmp_path / "shop-v1", {})
    rmtree(tmp_path / "shop-v1" / "trainer")
    seal(tmp_path / "shop-v1", {})
    learner.restore(tmp_path / "shop-v1")
    assert (learner.progress.updates, learner.optimizer.steps) == (0, 0)
    assert same(load_file(tmp_path / "shop-v1" / ADAPTER), weights(learner))
