"""What a deployment is told, as the trainer understands it."""

import pytest

from alignment.recipes import KTOConfig, LengthAwarePPOConfig, PPOConfig
from app.config import Settings
from workers.trainer import trainer_config


def algorithm(monkeypatch: pytest.MonkeyPatch, **told: str) -> object:
    for name, value in told.items():
        monkeypatch.setenv(f"ATTUNE_{name.upper()}", value)
    return trainer_config(Settings()).algorithm


def test_general_settings_hold_where_the_algorithm_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told = algorithm(monkeypatch, kl_coef="0.03", length_range="20,60", algorithm="length_aware_ppo")
    assert told == LengthAwarePPOConfig(kl_coef=0.03, shortest=20, longest=60)


def test_what_the_algorithm_names_itself_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own = '{"type": "length_aware_ppo", "kl_coef": 0.5, "longest": 90}'
    told = algorithm(monkeypatch, kl_coef="0.03", length_range="20,60", algorithm=own)
    assert told == LengthAwarePPOConfig(kl_coef=0.5, shortest=20, longest=90)


def test_an_algorithm_without_these_settings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert algorithm(monkeypatch, kl_coef="0.03", algorithm="kto") == KTOConfig()


def test_the_default_is_ppo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert algorithm(monkeypatch, kl_coef="0.03") == PPOConfig(kl_coef=0.03)
