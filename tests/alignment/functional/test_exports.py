"""What `alignment.functional` offers, pinned: the names are part of the interface."""

import inspect

import alignment.functional


def test_the_names_are_those_of_the_interface() -> None:
    assert set(alignment.functional.__all__) == {
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
    }


def test_every_formula_is_explained() -> None:
    for name in alignment.functional.__all__:
        exported = getattr(alignment.functional, name)
        if callable(exported):
            assert inspect.getdoc(exported), name
