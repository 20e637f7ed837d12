"""The formulas, as pure functions on tensors: float32 or float64, on any device.

Shapes: B sequences, T output tokens (right-padded), P pairs. `mask_BT` is 1 (or True) where there is a token to learn
from and 0 elsewhere; what lies outside the mask is never looked at, NaN included, in values and in gradients.
Log-probs are natural logarithms (nats), lengths are tokens. `old` is the proximal policy (the trainer's own scores
before the update), `rollout` what the engine said when it drew the tokens, `reference` the base model.

Only log-probs and values of the model being trained carry gradient; everything else is a constant. Shapes that do
not match and names that are not known raise ValueError; data that cannot be learned from raises AlignmentError.
"""

from alignment.functional.advantages import (
    Gae,
    gae_advantage,
    group_advantage,
    leave_one_out_advantage,
    reinforce_plus_plus_advantage,
    running_baseline,
)
from alignment.functional.aggregation import aggregate
from alignment.functional.credit import turn_credit
from alignment.functional.importance import RolloutCorrection, proximal_loglinear, rollout_correction
from alignment.functional.kl import AdaptiveKLController, kl_estimate
from alignment.functional.masks import masked_mean, whiten
from alignment.functional.policy_losses import PolicyLoss, policy_loss
from alignment.functional.preference import KTOLoss, PreferenceLoss, dpo_loss, kto_loss
from alignment.functional.ratio import LOG_RATIO_BOUND
from alignment.functional.reward_model import Platt, auc, bradley_terry_loss, calibration_error, platt, thumb_loss
from alignment.functional.value import ValueLoss, value_loss

__all__ = [
    "LOG_RATIO_BOUND",
    "AdaptiveKLController",
    "Gae",
    "KTOLoss",
    "Platt",
    "PolicyLoss",
    "PreferenceLoss",
    "RolloutCorrection",
    "ValueLoss",
    "aggregate",
    "auc",
    "bradley_terry_loss",
    "calibration_error",
    "dpo_loss",
    "gae_advantage",
    "group_advantage",
    "kl_estimate",
    "kto_loss",
    "leave_one_out_advantage",
    "masked_mean",
    "platt",
    "policy_loss",
    "proximal_loglinear",
    "reinforce_plus_plus_advantage",
    "rollout_correction",
    "running_baseline",
    "thumb_loss",
    "turn_credit",
    "value_loss",
    "whiten",
]
