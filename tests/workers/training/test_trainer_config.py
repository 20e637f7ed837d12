"""The trainer's configuration, derived from the settings."""

from typing import Any

import pytest

from alignment.algorithms import build
from alignment.config.algorithm import KTOConfig, LengthAwarePPOConfig, PPOConfig
from app.core.settings import Settings
from workers.training.ranks import trainer_config


def algorithm_for(monkeypatch: pytest.MonkeyPatch, **settings: str) -> Any:
    for name, value in settings.items():
        monkeypatch.setenv(f"ATTUNE_{name.upper()}", value)
    return trainer_config(Settings()).algorithm


def test_general_settings_fill_in_unset_algorithm_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = algorithm_for(monkeypatch, kl_coef="0.03", length_range="20,60", algorithm="length_aware_ppo")
    assert config == LengthAwarePPOConfig(kl_coef=0.03, shortest=20, longest=60, max_kl=0.05, epochs=3)


def test_algorithm_settings_override_general_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = '{"type": "length_aware_ppo", "kl_coef": 0.5, "longest": 90}'
    config = algorithm_for(monkeypatch, kl_coef="0.03", length_range="20,60", algorithm=algorithm)
    assert config == LengthAwarePPOConfig(kl_coef=0.5, shortest=20, longest=90, max_kl=0.05, epochs=3)


def test_algorithm_without_these_settings_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert algorithm_for(monkeypatch, kl_coef="0.03", algorithm="kto") == KTOConfig(max_kl=0.05, epochs=3)


def test_the_default_is_ppo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert algorithm_for(monkeypatch, kl_coef="0.03") == PPOConfig(kl_coef=0.03, max_kl=0.05, epochs=3)


def test_max_kl_is_at_most_the_kl_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = '{"type": "ppo", "max_kl": 0.005}'
    assert algorithm_for(monkeypatch, algorithm=algorithm).max_kl == 0.005, "the algorithm's own limit is tighter"
    assert algorithm_for(monkeypatch, algorithm="ppo", kl_guard="0.001").max_kl == 0.001
    custom = build(algorithm_for(monkeypatch, algorithm="alignment.algorithms.dpo_and_kto:DPO", kl_guard="0.5"))
    assert custom.config.max_kl == 0.5, "a class without a limit of its own gets the guard's"


def test_kl_target_above_the_guard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = '{"type": "ppo", "kl_control": {"target": 0.05}}'
    with pytest.raises(ValueError, match="ATTUNE_KL_GUARD"):
        algorithm_for(monkeypatch, algorithm=algorithm)


def test_default_learning_rate_of_full_weights_is_a_tenth() -> None:
    config = trainer_config(Settings())
    assert config.lora is not None and config.optim.lr == 3e-4
    full = trainer_config(Settings(adaptation="full"))
    assert full.lora is None and full.optim.lr == pytest.approx(3e-5)
    assert trainer_config(Settings(adaptation="full", learning_rate=3e-4)).optim.lr == 3e-4


@pytest.mark.parametrize(
    ("settings", "target"),
    [({}, 0.01), ({"kl_guard": 0.002}, 0.001), ({"kl_guard": 1.0}, 0.01), ({"kl_target": 0.005}, 0.005)],
)
def test_updates_are_fitted_to_a_target_below_the_kl_guard(settings: dict[str, Any], target: float) -> None:
    assert trainer_config(Settings(**settings)).kl_target == target


def test_kl_target_of_updates_must_be_below_the_guard() -> None:
    with pytest.raises(ValueError, match=r"kl_target \(0.06\) must be below kl_guard \(0.05\)"):
        Settings(kl_target=0.06)


def test_epochs_of_the_deployment_leave_those_of_an_algorithm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert algorithm_for(monkeypatch, algorithm="kto", epochs="2").epochs == 2
    assert algorithm_for(monkeypatch, algorithm='{"type": "kto", "epochs": 1}', epochs="2").epochs == 1
    custom = algorithm_for(monkeypatch, algorithm="alignment.algorithms.dpo_and_kto:DPO", epochs="2")
    assert "epochs" not in custom.model_fields_set, "a class of a user's own has its own default"
