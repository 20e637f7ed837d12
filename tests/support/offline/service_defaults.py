"""The service's defaults for runs without the service. Their one definition is `app.core.settings`."""

from collections.abc import Mapping
from typing import Any

from alignment.config.trainer import TrainerConfig
from app.core.settings import Settings
from app.core.settings.derived import trainer_config
from tests.support.offline.experiment import ExperimentConfig

# How many replies to a prompt an algorithm needs, and how they are judged; others need one reply with a vote.
GROUPS: dict[str, Mapping[str, Any]] = {
    "dpo": {"replies_per_prompt": 2, "feedback": "comparisons"},
    **{name: {"replies_per_prompt": 4} for name in ("grpo", "gigpo", "rloo", "dr_grpo", "dapo", "online_dpo")},
}
BATCH_SIZE = Settings().trainer.batch_size


def service_config(algorithm: Mapping[str, Any], seed: int = 0, **changes: Any) -> TrainerConfig:
    """Return the trainer's configuration in a service where these settings alone are set.

    `algorithm` holds settings of the section `algorithm`, `changes` fields of the result. Without a reward model unless
    one of them is.

    Example: service_config({"type": "ppo", "loss": "cispo"}, seed=3, late=None)
    """
    config = trainer_config(Settings().replace({"algorithm": dict(algorithm), "trainer.seed": seed}))
    return config.model_copy(update={"reward_model": None} | changes)


def service_run(algorithm: Mapping[str, Any], seed: int = 0, **changes: Any) -> ExperimentConfig:
    """Return a run whose updates are those of such a service, each with as many samples as start an update."""
    groups = GROUPS.get(str(algorithm["type"]), {})
    return ExperimentConfig(
        service_config(algorithm, seed, **changes),
        replies_per_update=BATCH_SIZE * (2 if groups else 1),  # two replies may have no preference
        min_samples=BATCH_SIZE,
        seed=seed,
        **groups,
    )
