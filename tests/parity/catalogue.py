"""All comparisons, and the formulas that no peer has."""

from alignment import functional
from tests.parity.cases import advantages, correction, policy, preference, reward_model, tokens

CASES_BY_TOPIC = {
    "policy": policy.CASES,
    "tokens": tokens.CASES,
    "advantages": advantages.CASES,
    "correction": correction.CASES,
    "preference": preference.CASES,
    "reward_model": reward_model.CASES,
}
CASES = [case for cases in CASES_BY_TOPIC.values() for case in cases]

# Formulas without a peer. Those in `references.MEASURES` are compared with an independent reference instead.
NO_PEER = {
    "running_baseline": "prime-rl has it (RAE), ROLL in another order; neither is installed here",
    "discounted_turn_returns": "AReaL discounts turns inside an asynchronous workflow; the others have no turns",
    "anchor_state_advantage": "of GiGPO; verl-agent has it, which is not installed here",
    "turn_gae_advantage": "the peers that are installed here have no turns",
    "binary_feedback_loss": "the peers train reward models on pairs only, not on binary or soft labels",
    "fit_platt_scaling": "no peer calibrates a reward model",
    "calibration_error": "no peer measures the calibration of a reward model",
    "auc": "no peer measures a reward model on binary labels; they report the accuracy on pairs",
    "length_penalty": "specific to Attune",
    "distribution_kl": "the peers estimate a KL from the tokens drawn, not over the likeliest tokens",
    "LOG_RATIO_BOUND": "a constant; the cases with log-ratios beyond ±20 cover it",
}
RESULT_TYPES = {
    "Gae",
    "KTOLoss",
    "PlattScaling",
    "PolicyLoss",
    "PreferenceLoss",
    "RolloutCorrection",
    "TurnGae",
    "ValueLoss",
}


def uncompared() -> list[str]:
    """Return the public formulas that have neither a case nor a reason. Result types are not formulas."""
    listed = {case.function for case in CASES} | set(NO_PEER) | RESULT_TYPES
    return [name for name in functional.__all__ if name not in listed]
