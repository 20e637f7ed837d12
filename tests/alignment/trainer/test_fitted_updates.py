"""Updates of a trainer with a KL target: they fit at any learning rate, and the rate is adapted and remembered."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from alignment.config.preference_algorithms import DPOConfig, KTOConfig
from alignment.config.trainer import OptimConfig, TrainerConfig
from alignment.errors import NonFiniteUpdate
from alignment.trainer.trainer import RETRY_LR_FACTOR, Trainer
from alignment.trainer.update_kl import UpdateKL
from alignment.types import Batch
from tests.alignment.trainer.test_update import in_groups

TARGET = 0.01
Draw = Callable[..., Batch]
ALGORITHMS: list[AlgorithmConfig] = [PPOConfig(), PPOConfig(estimator="gae"), GRPOConfig(), KTOConfig(), DPOConfig()]


def make_trainer(base_model: Path, config: TrainerConfig, lr: float, **fields: object) -> Trainer:
    return Trainer(base_model, config.model_copy(update={"optim": OptimConfig(lr=lr), "kl_target": TARGET} | fields))


@pytest.mark.parametrize("lr", [1e-5, 1e-3, 1e-2, 1.0])
@pytest.mark.parametrize(
    "algorithm", ALGORITHMS, ids=lambda config: f"{config.type}-{getattr(config, 'estimator', '')}"
)
def test_update_fits_the_target_at_any_rate(
    base_model: Path, config: TrainerConfig, draw: Draw, algorithm: AlgorithmConfig, lr: float
) -> None:
    # Grouping changes the prompts, so the recorded log-probs no longer fit.
    trainer = make_trainer(base_model, config, lr, algorithm=algorithm, max_mismatch=100.0)
    batch = in_groups(draw(8), 2) if algorithm.type in ("dpo", "grpo") else draw(8)
    before = trainer.probe()
    metrics = trainer.update(batch).metrics
    assert 0.0 < metrics["guard/kl"] <= TARGET
    assert trainer.probe() != before
    assert metrics["actor/lr_scale"] == trainer.optimizers["actor"].lr_scale == trainer.progress.lr_scale
    assert (metrics["actor/lr_scale"] < 1) == (metrics["actor/step_scale"] < 1)


def test_rate_that_is_too_large_shrinks_and_one_that_is_too_small_grows(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    large, small = make_trainer(base_model, config, 1.0), make_trainer(base_model, config, 1e-6)
    large.update(draw(8))
    small.update(draw(8))
    assert large.optimizers["actor"].lr <= 0.1 and small.optimizers["actor"].lr > 5e-6


def test_adapted_rate_is_restored_with_the_version(
    base_model: Path, config: TrainerConfig, draw: Draw, tmp_path: Path
) -> None:
    trainer = make_trainer(base_model, config, 1.0)
    trainer.update(draw(8))
    lr_scale = trainer.optimizers["actor"].lr_scale
    trainer.export(tmp_path / "shop-v1", {})
    trainer.restore(None)
    assert trainer.optimizers["actor"].lr_scale == 1.0
    trainer.restore(tmp_path / "shop-v1")
    assert trainer.optimizers["actor"].lr_scale == lr_scale < 1.0


def test_smaller_target_makes_a_smaller_update(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    trainer = make_trainer(base_model, config, 1e-2)
    assert trainer.update(draw(8), kl_target_factor=0.25).metrics["guard/kl"] <= 0.25 * TARGET


def test_without_a_target_the_update_is_not_scaled(base_model: Path, config: TrainerConfig, draw: Draw) -> None:
    trainer = make_trainer(base_model, config, 1e-2, kl_target=None)
    metrics = trainer.update(draw(8)).metrics
    assert metrics["guard/kl"] > TARGET and "actor/step_scale" not in metrics


def test_update_that_diverges_is_repeated_with_a_smaller_rate(
    base_model: Path, config: TrainerConfig, draw: Draw
) -> None:
    trainer = make_trainer(base_model, config, 1e6, algorithm=PPOConfig(epochs=1, minibatches=1))
    metrics = trainer.update(draw(8)).metrics
    weights = torch.cat([tensor.flatten() for tensor in trainer.policy.role_parameters("actor").values()])
    assert bool(weights.isfinite().all()) and 0 < metrics["guard/kl"] <= TARGET
    assert trainer.optimizers["actor"].lr < 1e6 * RETRY_LR_FACTOR


def test_update_of_which_no_fraction_fits_is_refused(
    base_model: Path, config: TrainerConfig, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise become a version that equals its parent."""
    trainer = make_trainer(base_model, config, 1e-3)
    before = trainer.probe()
    monkeypatch.setattr(UpdateKL, "measure", lambda _: 1.0)
    with pytest.raises(NonFiniteUpdate, match="No fraction of the update"):
        trainer.update(draw(8))
    assert trainer.probe() == before and trainer.optimizers["actor"].lr_scale == 1.0
