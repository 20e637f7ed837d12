"""One idea a file, one visible dict."""

from alignment.algorithms.base import Algorithm, LossInputs, LossOutputs
from alignment.algorithms.ppo import PPO

ALGORITHMS: dict[str, type[PPO]] = {
    "ppo": PPO,
}

__all__ = ["ALGORITHMS", "Algorithm", "LossInputs", "LossOutputs"]
