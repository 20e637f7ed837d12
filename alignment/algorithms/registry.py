"""Registry of the built-in algorithms, and the loader for algorithms of other packages."""

from pydantic import ValidationError

from alignment.algorithms.base import RLAlgorithm
from alignment.algorithms.dpo_and_kto import DPO, KTO, OnlineDPO
from alignment.algorithms.group_relative import DAPO, GRPO, RLOO, DrGRPO, GiGPO, ReinforcePlusPlus
from alignment.algorithms.ppo import PPO, LengthAwarePPO
from alignment.config.algorithm import UpdateConfig
from alignment.config.algorithm_choice import ALGORITHM_ENTRY_POINTS, AlgorithmConfig, CustomConfig
from alignment.errors import UnknownAlgorithm, UnknownExtension
from alignment.extensions import load_extension

ALGORITHMS: dict[str, type[RLAlgorithm]] = {
    "ppo": PPO,
    "length_aware_ppo": LengthAwarePPO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "gigpo": GiGPO,
    "reinforce++": ReinforcePlusPlus,
    "dpo": DPO,
    "online_dpo": OnlineDPO,
    "kto": KTO,
}


def build(config: AlgorithmConfig) -> RLAlgorithm:
    """Build the algorithm that a configuration names. Raises UnknownAlgorithm."""
    if isinstance(config, CustomConfig):
        return _build_custom(config)
    return ALGORITHMS[config.type](config)


def _build_custom(config: CustomConfig) -> RLAlgorithm:
    """`config.name` is `package.module:Class`, `package.module.Class` or the name of an entry point."""
    try:
        algorithm_class = load_extension(
            config.name, ALGORITHM_ENTRY_POINTS, ALGORITHMS, noun="algorithm", allow_dotted_path=True
        )
    except UnknownExtension as error:
        raise UnknownAlgorithm(f"{str(error).rstrip('.')}. Name a class of your own as module:Class.") from error
    if not (isinstance(algorithm_class, type) and issubclass(algorithm_class, RLAlgorithm)):
        raise UnknownAlgorithm(
            f"{config.name!r} is {algorithm_class!r}, which is not a subclass of alignment.algorithms.RLAlgorithm."
        )
    if not issubclass(algorithm_class.Config, UpdateConfig):
        raise UnknownAlgorithm(
            f"{config.name!r}: its Config must be a subclass of alignment.config.algorithm.UpdateConfig."
        )
    explicit_fields = config.model_dump(include=config.model_fields_set - {"type", "name", "options"})
    try:
        return algorithm_class(algorithm_class.Config(**(explicit_fields | config.options)))
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, details['loc']))}: {details['msg']}" for details in error.errors())
        raise UnknownAlgorithm(
            f"The options of {config.name!r} do not fit its Config: {'; '.join(problems)}"
        ) from error
