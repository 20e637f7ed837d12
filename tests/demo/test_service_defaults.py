"""Benchmarks that are said to run with the service's defaults have the configuration of a service with no settings."""

import pytest

from alignment.config.trainer import TrainerConfig
from app.core.settings import Settings
from app.core.settings.derived import trainer_config
from tests.benchmarks import late_votes, learning, rates, sparse_votes, staleness
from tests.support.offline.service_defaults import BATCH_SIZE, service_config, service_run

SERVICE = trainer_config(Settings())


def differences(config: TrainerConfig, algorithm: str = "ppo") -> dict[str, object]:
    """Return the fields that differ from the service's with this algorithm, and their values."""
    expected = trainer_config(Settings().replace({"algorithm": {"type": algorithm}}))
    found = {name: getattr(config, name) for name in TrainerConfig.model_fields}
    return {name: value for name, value in found.items() if value != getattr(expected, name)}


def test_the_service_trains_at_the_rate_and_with_the_kl_of_its_settings() -> None:
    """They ran at 1.5e-3 and with `kl_coef` 0.02."""
    assert SERVICE.optim.lr == Settings().trainer.optim.lr == 3e-4
    assert SERVICE.algorithm.model_dump()["kl_coef"] == 0.01
    assert (SERVICE.algorithm.epochs, SERVICE.kl_target, BATCH_SIZE) == (3, 0.003, 24)


@pytest.mark.parametrize("algorithm", ["ppo", "kto", "grpo", "dpo"])
def test_service_config_is_that_of_a_service_without_settings(algorithm: str) -> None:
    assert differences(service_config({"type": algorithm}), algorithm) == {"reward_model": None}
    assert differences(service_config({"type": algorithm}, seed=3), algorithm) == {"reward_model": None, "seed": 3}
    assert service_run({"type": algorithm}).min_samples == BATCH_SIZE


def test_late_votes() -> None:
    for name, algorithm in (("PPO", "ppo"), ("KTO", "kto")):
        config = late_votes.make_config(late_votes.STRATEGIES[name], seed=0)
        assert differences(config, algorithm) == {"reward_model": None}


def test_sparse_votes() -> None:
    assert differences(sparse_votes.make_config(sparse_votes.RECIPES["model"], seed=0)) == {}


def test_staleness() -> None:
    run = staleness.make_run("decoupled", seed=0, lag=8, is_service=True)
    assert (differences(run.config), run.lag, run.replies_per_update) == ({"reward_model": None}, 8, BATCH_SIZE)


def test_rates_and_learning() -> None:
    for name, algorithm in rates.ALGORITHMS.items():
        config = rates.make_run(name, 1e-2, seed=0)[1].config
        assert differences(config, algorithm).keys() == {"reward_model", "optim"} and config.optim.lr == 1e-2
    for run in learning.RUNS.values():
        config = learning.service_variant(run).config
        assert differences(config, config.algorithm.type).keys() - {"reward_model"} <= {"algorithm"}
    critic = learning.service_variant(learning.RUNS["PPO, critic"]).config.algorithm
    expected = SERVICE.algorithm.model_copy(update={"estimator": "gae"})
    assert critic.model_dump() == expected.model_dump()
