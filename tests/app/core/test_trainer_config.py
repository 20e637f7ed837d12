"""The trainer's configuration, derived from the settings."""

from typing import Any

import pytest

from alignment.algorithms import build
from alignment.config.policy_gradient_algorithms import LengthAwarePPOConfig, PPOConfig
from alignment.config.preference_algorithms import KTOConfig
from app.core.settings import Settings
from app.core.settings.derived import trainer_config
from app.core.settings.loading import load_settings
from tests.support.settings import by_path


def algorithm_for(**variables: str) -> Any:
    """Return the algorithm with these environment variables, without their prefix."""
    return trainer_config(
        load_settings({f"ATTUNE_{name}": value for name, value in variables.items()}).settings
    ).algorithm


def test_length_range_is_the_default_of_the_algorithms_that_have_one() -> None:
    config = algorithm_for(
        ALGORITHM__KL_COEF="0.03", OBSERVABILITY__LENGTH_RANGE="[20, 60]", ALGORITHM="length_aware_ppo"
    )
    assert config == LengthAwarePPOConfig(kl_coef=0.03, shortest=20, longest=60, epochs=3)


def test_algorithm_settings_override_the_length_range() -> None:
    algorithm = '{"type": "length_aware_ppo", "kl_coef": 0.5, "longest": 90}'
    config = algorithm_for(OBSERVABILITY__LENGTH_RANGE="[20, 60]", ALGORITHM=algorithm)
    assert config == LengthAwarePPOConfig(kl_coef=0.5, shortest=20, longest=90, epochs=3)


def test_the_default_is_ppo() -> None:
    assert algorithm_for(ALGORITHM__KL_COEF="0.03") == PPOConfig(kl_coef=0.03, epochs=3)
    assert algorithm_for(ALGORITHM="kto") == KTOConfig(epochs=3)


def test_the_kl_target_alone_bounds_an_update_unless_its_steps_have_a_limit_of_their_own() -> None:
    for algorithm in ("ppo", "kto", "alignment.algorithms.dpo_and_kto:DPO"):
        assert build(algorithm_for(ALGORITHM=algorithm)).config.max_kl is None
    assert algorithm_for(ALGORITHM='{"type": "ppo", "max_kl": 0.005}').max_kl == 0.005


def test_kl_target_above_the_guard_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.kl_guard"):
        algorithm_for(ALGORITHM='{"type": "ppo", "kl_control": {"target": 0.05}}')


def test_unknown_policy_loss_is_refused_with_the_known_names() -> None:
    known = "cispo, dppo_tv, gspo, ppo, reinforce, sapo"
    with pytest.raises(ValueError, match=rf"no policy loss 'ppoo'; did you mean 'ppo'\? Known are {known}"):
        Settings(algorithm=PPOConfig(loss="ppoo"))
    assert Settings(algorithm=PPOConfig(loss="shop_losses:mine")).algorithm == PPOConfig(loss="shop_losses:mine")


def test_default_learning_rate_of_full_weights_is_a_tenth() -> None:
    config = trainer_config(Settings())
    assert config.lora is not None and config.optim.lr == 3e-4
    full = trainer_config(Settings(trainer={"adaptation": "full"}))
    assert full.lora is None and full.optim.lr == pytest.approx(3e-5)
    assert trainer_config(Settings(trainer={"adaptation": "full", "optim": {"lr": 3e-4}})).optim.lr == 3e-4


@pytest.mark.parametrize(
    ("settings", "target"),
    [({}, 0.003), ({"kl_guard": 0.002}, 0.001), ({"kl_guard": 1.0}, 0.003), ({"kl_target": 0.005}, 0.005)],
)
def test_updates_are_fitted_to_a_target_below_the_kl_guard(settings: dict[str, Any], target: float) -> None:
    assert trainer_config(Settings().replace(by_path(settings))).kl_target == target


def test_kl_target_of_updates_must_be_below_the_guard() -> None:
    with pytest.raises(ValueError, match=r"kl_target \(0.06\) must be below trainer.kl_guard \(0.05\)"):
        Settings(trainer={"kl_target": 0.06})


def test_epochs_of_an_algorithm_of_a_users_own_are_its_own() -> None:
    assert algorithm_for(ALGORITHM="kto", ALGORITHM__EPOCHS="2").epochs == 2
    custom = algorithm_for(ALGORITHM="alignment.algorithms.dpo_and_kto:DPO")
    assert "epochs" not in custom.model_fields_set
