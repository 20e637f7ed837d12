"""One idea a file, one visible dict; and the way to an algorithm of somebody else's."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from alignment.algorithms.base import MicroBatch, RLAlgorithm, TrainData
from alignment.algorithms.dapo import DAPO
from alignment.algorithms.dpo import DPO
from alignment.algorithms.dr_grpo import DrGRPO
from alignment.algorithms.grpo import GRPO
from alignment.algorithms.kto import KTO
from alignment.algorithms.length_aware_ppo import LengthAwarePPO
from alignment.algorithms.online_dpo import OnlineDPO
from alignment.algorithms.ppo import PPO
from alignment.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from alignment.algorithms.rloo import RLOO
from alignment.config.algorithm import AlgorithmConfig, CustomConfig, UpdateConfig
from alignment.errors import UnknownAlgorithm

ALGORITHMS: dict[str, type[RLAlgorithm]] = {
    "ppo": PPO,
    "length_aware_ppo": LengthAwarePPO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "reinforce++": ReinforcePlusPlus,
    "dpo": DPO,
    "online_dpo": OnlineDPO,
    "kto": KTO,
}
ENTRY_POINTS = "attune.algorithms"


def build(config: AlgorithmConfig) -> RLAlgorithm:
    """The algorithm that a configuration names. Raises UnknownAlgorithm."""
    if not isinstance(config, CustomConfig):
        return ALGORITHMS[config.type](config)
    found = _find(config.name)
    if not (isinstance(found, type) and issubclass(found, RLAlgorithm)):
        raise UnknownAlgorithm(f"{config.name!r} is {found!r}, and not a subclass of alignment.algorithms.RLAlgorithm.")
    if not issubclass(found.Config, UpdateConfig):
        raise UnknownAlgorithm(
            f"{config.name!r}: its Config must be a subclass of alignment.config.algorithm.UpdateConfig."
        )
    named = config.model_dump(include=config.model_fields_set - {"type", "name", "options"})
    try:
        return found(found.Config(**(named | config.options)))
    except ValidationError as error:
        raise UnknownAlgorithm(f"The options of {config.name!r} do not fit its Config: {error}") from error


def _find(name: str) -> Any:
    """`package.module:Class`, `package.module.Class`, or the name of an entry point."""
    for point in entry_points(group=ENTRY_POINTS, name=name):
        return point.load()
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not module:
        known = sorted({*ALGORITHMS, *(point.name for point in entry_points(group=ENTRY_POINTS))})
        raise UnknownAlgorithm(
            f"There is no algorithm {name!r}; known are {', '.join(known)}, or name a class as module:Class."
        )
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownAlgorithm(f"{name!r} cannot be imported: {error}") from error


__all__ = ["ALGORITHMS", "MicroBatch", "RLAlgorithm", "TrainData", "build"]
