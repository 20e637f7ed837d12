"""Training algorithms: the built-in ones, the interface of algorithms and of policy losses of other packages."""

from alignment.algorithms.base import PolicyGradient, RLAlgorithm
from alignment.algorithms.registry import ALGORITHMS, build
from alignment.functional.policy_loss_registry import TokenLoss, TokenLossInputs, register_policy_loss
from alignment.types import CriticMicroBatch, LossOutput, Metric, MicroBatch, Regularizer, TrainData

__all__ = [
    "ALGORITHMS",
    "CriticMicroBatch",
    "LossOutput",
    "Metric",
    "MicroBatch",
    "PolicyGradient",
    "RLAlgorithm",
    "Regularizer",
    "TokenLoss",
    "TokenLossInputs",
    "TrainData",
    "build",
    "register_policy_loss",
]
