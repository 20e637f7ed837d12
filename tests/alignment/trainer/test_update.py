"""One update, looked at step by step: what must not matter does not, and what must hold holds exactly."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignment.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CustomConfig,
    DAPOConfig,
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    KTOConfig,
    LengthAwarePPOConfig,
    OnlineDPOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import Scored
from alignment.errors import ForeignSamples, NoVariance
from alignment.trainer.scoring import score_alone
from alignment.trainer.trainer import Trainer
from alignment.trainer.update import Update
from alignment.types import Batch

Draw = Callable[..., Batch]
EVERY: list[AlgorithmConfig] = [
    PPOConfig(),
    PPOConfig(estimator="gae"),
    PPOConfig(loss="gspo", aggregation="seq-mean-token-mean"),
    PPOConfig(correction=CorrectionConfig(level="sequence", mode="reject", low=0.5, high=2.0)),
    LengthAwarePPOConfig(shortest=4, longest=8),
    GRPOConfig(),
    DrGRPOConfig(),
    DAPOConfig(),
    RLOOConfig(),
    ReinforcePlusPlusConfig(),
    DPOConfig(),
    DPOConfig(kind="ipo"),
    OnlineDPOConfig(),
    KTOConfig(),
]


def label(config: AlgorithmConfig) -> str:
    told = config.model_dump(exclude_defaults=True, exclude={"type"})
    return "-".join([config.type, *(str(value) for value in told.values() if not isinstance(value, dict))])


def in_groups(batch: Batch, size: int = 3) -> Batch:
    """As candidates of one prompt: the same prompt for each, rewards that differ."""
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
    from alignment.trainer.recompute_logprobs import recompute_logprobs

    batch = in_groups(draw(9))
    logprobs = recompute_logprobs(base_model, None, batch.samples, device="cpu")
    samples = [replace(s, logprobs=tuple(p.tolist())) for s, p in zip(batch.samples, logprobs, strict=True)]
    return replace(batch, samples=tuple(samples))


def moved(base_model: Path, config: TrainerConfig, batch: Batch) -> Trainer:
    """A learner that has left the base model behind, so that nothing is zero."""
    learner = Trainer(base_model, config.model_copy(update={"algorithm": PPOConfig(), "packing": "off"}))
    learner.update(batch)
    other = Trainer(base_model, config)
    other.policy.wear({name: tensor.detach() for name, tensor in learner.policy.tensors("actor").items()})
    return other


def first_step(learner: Trainer, batch: Batch) -> tuple[dict[str, float], Tensor]:
    """Its metrics, and its gradient."""
    update = Update(learner, batch)
    epochs = update._epochs(torch.Generator().manual_seed(0))
    update._score([group for _, groups in epochs[0] for group in groups])
    learner.algorithm.before_train_step(0, update.data)
    minibatch, groups = epochs[0][0]
    figures = update._learn(minibatch, groups)
    hats = ("actor", "critic") if learner.critic_optimizer else ("actor",)
    tensors = [tensor for hat in hats for tensor in learner.policy.tensors(hat).values()]
    return figures, torch.cat([tensor.grad.flatten() for tensor in tensors if tensor.grad is not None])


@pytest.mark.parametrize("algorithm", EVERY, ids=label)
def test_how_a_minibatch_is_cut_and_packed_changes_nothing(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig
) -> None:
    found = []
    for microbatch_tokens, packing in ((1, "off"), (64, "chain"), (64, "tree"), (10_000, "tree")):
        fields = {"microbatch_tokens": microbatch_tokens, "packing": packing, "algorithm": algorithm}
        found.append(first_step(moved(base_model, config.model_copy(update=fields), grouped), grouped))
    figures, gradient = found[0]
    assert gradient.abs().max() > 1e-4
    for others, other in found[1:]:
        torch.testing.assert_close(other, gradient, atol=2e-5, rtol=1e-3)
        assert others == pytest.approx(figures, abs=2e-5)


@pytest.mark.parametrize("algorithm", EVERY, ids=label)
def test_every_algorithm_learns_and_reports(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig
) -> None:
    learner = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    before = {name: tensor.detach().clone() for name, tensor in learner.policy.tensors("actor").items()}
    report = learner.update(grouped)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in learner.policy.tensors("actor").items())
    assert {"actor/pg_loss", "actor/grad_norm", "actor/lr", "perf/throughput"} <= report.metrics.keys()
    assert all(isinstance(value, (int, float)) for value in report.metrics.values())


@pytest.mark.parametrize("packing", ["tree", "chain", "off"])
def test_at_the_first_step_the_policy_is_its_parent_to_the_bit(
    base_model: Path, config: TrainerConfig, grouped: Batch, packing: str
) -> None:
    recipe = GRPOConfig(minibatches=2, epochs=2, kl_coef=0.0)
    learner = moved(base_model, config.model_copy(update={"algorithm": recipe, "packing": packing}), grouped)
    figures, _ = first_step(learner, grouped)
    assert figures["actor/ppo_kl"] == 0.0
    assert figures["actor/ppo_kl_k3"] == 0.0
    assert figures["actor/pg_clipfrac"] == 0.0


def test_a_single_step_needs_no_scoring_of_its_parent_and_is_the_same(
    base_model: Path, config: TrainerConfig, grouped: Batch
) -> None:
    alone = GRPOConfig(minibatches=1)
    learner = moved(base_model, config.model_copy(update={"algorithm": alone}), grouped)
    assert not learner.algorithm.needs_parent
    _, gradient = first_step(learner, grouped)
    learner.optimizer.forget()
    learner.algorithm.needs_parent = True
    _, scored = first_step(learner, grouped)
    torch.testing.assert_close(scored, gradient, atol=1e-7, rtol=1e-5)


def test_without_staleness_decoupled_ppo_is_plain_ppo(base_model: Path, config: TrainerConfig, grouped: Batch) -> None:
    """η = 0: what was recorded is what the parent says, so correcting for the difference changes nothing."""
    plain = PPOConfig(proximal="rollout", correction=CorrectionConfig(mode="off"))
    adapters = []
    for recipe in (PPOConfig(), PPOConfig(proximal="loglinear"), plain):
        learner = Trainer(base_model, config.model_copy(update={"algorithm": recipe}))
        learner.update(grouped)
        adapters.append(learner.policy.tensors("actor"))
    for other in adapters[1:]:
        for name, tensor in adapters[0].items():
            torch.testing.assert_close(other[name], tensor, atol=2e-5, rtol=0)


def test_without_staleness_the_asynchronous_run_is_the_synchronous_one_to_the_bit(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    """Through bytes, export and restore, as the trainer behind the queue does it; against a plain loop."""
    together, apart = Trainer(base_model, config), Trainer(base_model, config)
    version: Path | None = None
    for number in range(3):
        batch = draw(8, seed=number, adapter=version)
        together.update(batch)
        apart.restore(version)
        apart.update(Batch.from_bytes(batch.to_bytes()))
        version = apart.export(tmp_path / f"v{number + 1}", {}).path
        apart.restore(None)
    apart.restore(version)
    for name, tensor in together.policy.tensors("actor").items():
        assert torch.equal(apart.policy.tensors("actor")[name], tensor)


@pytest.mark.parametrize(
    "algorithm",
    [PPOConfig(estimator="gae"), LengthAwarePPOConfig(shortest=3, longest=5, drift_patience=1)],
    ids=["critic", "drift"],
)
def test_all_that_an_algorithm_remembers_goes_with_the_version(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path, algorithm: AlgorithmConfig
) -> None:
    settings = config.model_copy(update={"algorithm": algorithm})
    learner, resumed = Trainer(base_model, settings), Trainer(base_model, settings)
    learner.update(draw(8, seed=1))
    learner.export(tmp_path / "v1", {})
    straight = learner.update(draw(8, seed=2)).metrics
    resumed.restore(tmp_path / "v1")
    again = resumed.update(draw(8, seed=2)).metrics
    same = {name for name in straight if not name.startswith(("timing_s", "perf"))}
    assert {name: again[name] for name in same} == {name: straight[name] for name in same}
    for hat in ("actor", "critic") if learner.critic_optimizer else ("actor",):
        for name, tensor in learner.policy.tensors(hat).items():
            assert torch.equal(resumed.policy.tensors(hat)[name], tensor)


def test_a_critic_can_take_over_a_policy_that_learned_without_one(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    first = Trainer(base_model, config)
    first.update(draw(8))
    first.export(tmp_path / "v1", {})
    second = Trainer(base_model, config.model_copy(update={"algorithm": PPOConfig(estimator="gae")}))
    second.restore(tmp_path / "v1")
    assert second.update(draw(8, seed=1)).metrics["critic/values/mean"] == 0.0
    assert second.optimizer.steps > first.optimizer.steps


def test_full_weights_learn_behind_the_same_interface(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    settings = config.model_copy(update={"lora": None})
    learner = Trainer(base_model, settings)
    report = learner.update(draw(8, seed=1))
    assert report.reference_kl > 0
    done = learner.export(tmp_path / "v1", {})
    straight = learner.update(draw(8, seed=2)).metrics["actor/pg_loss"]
    resumed = Trainer(base_model, settings)
    resumed.restore(done.path)
    assert resumed.update(draw(8, seed=2)).metrics["actor/pg_loss"] == straight

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(done.path).state_dict()
    begun = AutoModelForCausalLM.from_pretrained(base_model).state_dict()
    assert exported.keys() == begun.keys()
    assert any(not torch.equal(exported[name], begun[name]) for name in begun)


def test_the_algorithm_of_the_documentation_learns(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    (tmp_path / "shop_rl.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = CustomConfig(name="shop_rl:Brave", options={"courage": 2.0}, epochs=2)
    learner = Trainer(base_model, config.model_copy(update={"algorithm": mine}))
    before = score_alone(learner.policy, [Scored.of(s) for s in draw(16).samples], budget=64)
    metrics = learner.update(draw(16)).metrics
    after = score_alone(learner.policy, [Scored.of(s) for s in draw(16).samples], budget=64)
    liked = torch.tensor([sample.reward > 0 for sample in draw(16).samples])
    assert (after - before)[liked, 0].mean() > 0 > (after - before)[~liked, 0].mean()
    assert metrics["brave/courage"] == 2.0
    assert metrics["training/steps"] == 8


def foreign(batch: Batch, distance: float, count: int) -> Batch:
    """As if other weights had given the first `count` turns their log-probs."""
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
def test_log_probs_of_other_weights_are_refused_whether_or_not_the_parent_is_scored(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig
) -> None:
    learner = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    with pytest.raises(ForeignSamples, match="other weights"):
        learner.update(foreign(grouped, 0.9, len(grouped.samples)))


def test_one_foreign_turn_among_many_is_found_and_named(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    learner = Trainer(base_model, config)
    with pytest.raises(ForeignSamples, match="turn-0"):
        learner.update(foreign(draw(16), 2.1, 1))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_batch_whose_every_token_is_rejected_is_refused_by_any_number_of_steps(
    base_model: Path, config: TrainerConfig, grouped: Batch, minibatches: int
) -> None:
    rejecting = CorrectionConfig(mode="reject", low=0.9, high=1.1)
    recipe = PPOConfig(minibatches=minibatches, correction=rejecting, kl_coef=0.0)
    learner = Trainer(base_model, config.model_copy(update={"algorithm": recipe}))
    with pytest.raises((ForeignSamples, NoVariance)):
        learner.update(foreign(grouped, 0.3, len(grouped.samples)))
    assert learner.optimizer.steps == 0


@pytest.mark.parametrize(
    "algorithm", [KTOConfig(max_kl=1e-6), DPOConfig(max_kl=1e-6), PPOConfig(max_kl=1e-6)], ids=label
)
def test_every_algorithm_stops_where_it_is_told_to(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig
) -> None:
    recipe = algorithm.model_copy(update={"epochs": 4, "minibatches": 1})
    learner = Trainer(base_model, config.model_copy(update={"algorithm": recipe}))
    metrics = learner.update(grouped).metrics
    assert (metrics["training/steps"], metrics["training/stopped_early"]) == (1, 1.0)


def test_whatever_goes_wrong_the_policy_is_what_it_was(
    base_model: Path, config: TrainerConfig, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = PPOConfig(estimator="gae")
    learner = Trainer(base_model, config.model_copy(update={"algorithm": recipe}))
    learner.update(draw(8))

    def state() -> list[Tensor]:
        return [tensor.detach().clone() for tensor in learner._own_tensors()]

    def fails(step: int, report: object) -> None:
        raise RuntimeError("somebody's hook")

    before, progress = state(), learner.progress
    monkeypatch.setattr(learner.algorithm, "after_train_step", fails)
    with pytest.raises(RuntimeError, match="hook"):
        learner.update(draw(8, seed=1))
    assert all(torch.equal(one, other) for one, other in zip(before, state(), strict=True))
    assert learner.progress == progress


@pytest.mark.parametrize("algorithm", [PPOConfig(), DPOConfig(max_kl=None)], ids=label)
def test_the_guards_distance_is_that_of_the_policy_that_came_out(
    base_model: Path, config: TrainerConfig, grouped: Batch, algorithm: AlgorithmConfig
) -> None:
    """By the parent's own log-probs or, where it was not scored, by those on record; on its own replies alone."""
    learner = Trainer(base_model, config.model_copy(update={"algorithm": algorithm}))
    older = replace(grouped, samples=tuple(replace(s, lag=i % 2) for i, s in enumerate(grouped.samples)))
    metrics = learner.update(older).metrics
    own = [sample for sample in older.samples if sample.lag == 0]
    after_BT = score_alone(learner.policy, [Scored.of(sample) for sample in own], budget=4096)
    gaps = [
        float(now) - was
        for sample, row in zip(own, after_BT, strict=True)
        for was, now in zip(sample.logprobs, row, strict=False)
    ]
    expected = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps)
    assert metrics["guard/tokens"] == len(gaps)
    assert metrics["guard/kl"] == pytest.approx(expected, rel=1e-3, abs=1e-9) and expected > 0
