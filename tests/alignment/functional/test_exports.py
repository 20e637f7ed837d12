"""The names that `alignment.functional` exports are part of the interface."""

import inspect

import alignment.functional


def test_exported_names() -> None:
    assert set(alignment.functional.__all__) == {
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
        "auc",
        "bradley_terry_loss",
        "calibration_error",
        "distribution_kl",
        "dpo_loss",
        "gae_advantage",
        "anchor_state_advantage",
        "group_advantage",
        "kl_estimate",
        "kto_loss",
        "leave_one_out_advantage",
        "masked_mean",
        "fit_platt_scaling",
        "policy_loss",
        "proximal_loglinear",
        "reinforce_plus_plus_advantage",
        "rollout_correction",
        "running_baseline",
        "binary_feedback_loss",
        "discounted_turn_returns",
        "turn_gae_advantage",
        "value_loss",
        "whiten",
    }


def test_every_export_has_a_docstring() -> None:
    for name in alignment.functional.__all__:
        exported = getattr(alignment.functional, name)
        if callable(exported):
            assert inspect.getdoc(exported), name
