"""What a deployment is told, as the trainer understands it."""

from typing import Any

import pytest

from alignment.config.algorithm import KTOConfig, LengthAwarePPOConfig, PPOConfig
from app.core.settings import Settings
from workers.training.ranks import trainer_config


def algorithm(monkeypatch: pytest.MonkeyPatch, **told: str) -> Any:
    for name, value in told.items():
        monkeypatch.setenv(f"ATTUNE_{name.upper()}", value)
    return trainer_config(Settings()).algorithm


def test_general_settings_hold_where_the_algorithm_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told = algorithm(monkeypatch, kl_coef="0.03", length_range="20,60", algorithm="length_aware_ppo")
    assert told == LengthAwarePPOConfig(kl_coef=0.03, shortest=20, longest=60, max_kl=0.02)


def test_what_the_algorithm_names_itself_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own = '{"type": "length_aware_ppo", "kl_coef": 0.5, "longest": 90}'
    told = algorithm(monkeypatch, kl_coef="0.03", length_range="20,60", algorithm=own)
    assert told == LengthAwarePPOConfig(kl_coef=0.5, shortest=20, longest=90, max_kl=0.02)


def test_an_algorithm_without_these_settings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert algorithm(monkeypatch, kl_coef="0.03", algorithm="kto") == KTOConfig(max_kl=0.02)


def test_the_default_is_ppo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert algorithm(monkeypatch, kl_coef="0.03") == PPOConfig(kl_coef=0.03, max_kl=0.02)


def test_an_update_makes_no_step_from_beyond_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    own = '{"type": "ppo", "max_kl": 0.005}'
    assert algorithm(monkeypatch, algorithm=own).max_kl == 0.005, "a tighter bound of its own holds"
    assert algorithm(monkeypatch, algorithm="ppo", kl_guard="0.001").max_kl == 0.001


def test_a_target_beyond_the_guard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = '{"type": "ppo", "kl_control": {"target": 0.02}}'
    with pytest.raises(ValueError, match="ATTUNE_KL_GUARD"):
        algorithm(monkeypatch, algorithm=own)


def test_all_weights_are_trained_at_a_tenth_of_an_adapters_rate_unless_one_was_set() -> None:
    config = trainer_config(Settings())
    assert config.lora is not None and config.optim.lr == 3e-4
    full = trainer_config(Settings(adaptation="full"))
    assert full.lora is None and full.optim.lr == pytest.approx(3e-5)
    assert trainer_config(Settings(adaptation="full", learning_rate=3e-4)).optim.lr == 3e-4
