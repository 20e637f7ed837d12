"""The formulas, as pure functions on tensors: float32 or float64, on any device.

Shapes: B sequences, T output tokens (right-padded), P pairs. `mask_BT` is 1 (or True) for the tokens to learn from and
0 elsewhere. Values outside the mask are never read, NaN included, neither for results nor for gradients.
Log-probs are natural logarithms (nats); lengths count tokens. `old_logprobs` are those of the proximal policy (the
trainer's own scores before the update), `rollout_logprobs` those that the engine recorded when it sampled the tokens,
`ref_logprobs` those of the base model. `policy_loss_registry` has the interface of policy losses.

Only log-probs and values of the model in training carry a gradient; everything else is a constant. Mismatched shapes
and unknown names raise ValueError; data that cannot be learned from raises AlignmentError.
"""

from alignment.functional.advantages import (
    Gae,
    anchor_state_advantage,
    discounted_turn_returns,
    gae_advantage,
    group_advantage,
    leave_one_out_advantage,
    reinforce_plus_plus_advantage,
    running_baseline,
    turn_gae_advantage,
)
from alignment.functional.aggregation import aggregate, masked_mean, whiten
from alignment.functional.importance import LOG_RATIO_BOUND, RolloutCorrection, proximal_loglinear, rollout_correction
from alignment.functional.kl import AdaptiveKLController, distribution_kl, kl_estimate
from alignment.functional.policy_losses import PolicyLoss, ValueLoss, policy_loss, value_loss
from alignment.functional.preference import KTOLoss, PreferenceLoss, dpo_loss, kto_loss
from alignment.functional.reward_model import (
    PlattScaling,
    auc,
    binary_feedback_loss,
    bradley_terry_loss,
    calibration_error,
    fit_platt_scaling,
)

__all__ = [
    "LOG_RATIO_BOUND",
    "AdaptiveKLController",
    "Gae",
    "KTOLoss",
    "PlattScaling",
    "PolicyLoss",
    "PreferenceLoss",
    "RolloutCorrection",
    "ValueLoss",
    "aggregate",
    "anchor_state_advantage",
    "auc",
    "binary_feedback_loss",
    "bradley_terry_loss",
    "calibration_error",
    "discounted_turn_returns",
    "distribution_kl",
    "dpo_loss",
    "fit_platt_scaling",
    "gae_advantage",
    "group_advantage",
    "kl_estimate",
    "kto_loss",
    "leave_one_out_advantage",
    "masked_mean",
    "policy_loss",
    "proximal_loglinear",
    "reinforce_plus_plus_advantage",
    "rollout_correction",
    "running_baseline",
    "turn_gae_advantage",
    "value_loss",
    "whiten",
]
