"""Rollout correction for samples of other versions or engines: weights, masks, metrics, and losses with them."""

from typing import Any

from tests.parity.case import FULL, TAME, Case
from tests.parity.ours import METRICS

LP = ("logprobs_BT",)
PPO = {"kind": "ppo", "clip_c": None}
COUNTS = "verl adds 1e-8 to counts and takes shares in float32"
# verl's extremes at sequence level are those of the ratios before truncation, and its shares count empty sequences
BY_SEQUENCE = tuple(name for name in METRICS if name not in ("rollout_is_max", "rollout_is_min"))
DISTANCES = METRICS[:7]


def _weights(title: str, peers: tuple[str, ...], **settings: Any) -> Case:
    return Case("rollout_correction", f"weights: {title}", "rollout_weights", peers, settings, (), TAME)


def _decoupled(title: str, peers: tuple[str, ...], **correction: Any) -> Case:
    settings = PPO | {"correction": correction}
    return Case("rollout_correction", f"in the loss: {title}", "corrected_policy_loss", peers, settings, LP)


def _metrics(title: str, names: tuple[str, ...] = METRICS, **settings: Any) -> Case:
    return Case("rollout_correction", f"metrics: {title}", "rollout_metrics", ("verl",),
                settings | {"names": names}, (), FULL, bound64=2e-7, bound32=1e-5,
                why=COUNTS + "; its std is √(E[w²] − E[w]²), which loses float32 digits")  # fmt: skip


CASES = [
    _weights("token, truncate (TIS)", ("verl", "trl"), level="token", mode="truncate", high=2.0),
    _weights("sequence, truncate", ("verl", "trl"), level="sequence", mode="truncate", high=2.0),
    _weights("token, mask (IcePop)", ("verl", "trl"), level="token", mode="mask", low=0.5, high=2.0),
    _weights("sequence, mask", ("verl", "trl"), level="sequence", mode="mask", low=0.5, high=2.0),
    _weights("token, clamp", ("trl",), level="token", mode="clamp", low=0.5, high=2.0),
    _weights("sequence, clamp", ("trl",), level="sequence", mode="clamp", low=0.5, high=2.0),
    Case("rollout_correction", "weights beyond ±20: token, truncate", "rollout_weights", ("verl",),
         {"level": "token", "mode": "truncate", "high": 1e10}, (), ("wild",)),
    Case("rollout_correction", "weights beyond ±20: sequence, truncate", "rollout_weights", ("verl",),
         {"level": "sequence", "mode": "truncate", "high": 1e10}, (), ("wild",)),
    Case("rollout_correction", "mask: token, reject (MIS)", "rollout_mask", ("verl",),
         {"level": "token", "mode": "reject", "low": 0.5, "high": 1.8}),
    Case("rollout_correction", "mask: sequence, reject (MIS)", "rollout_mask", ("verl",),
         {"level": "sequence", "mode": "reject", "low": 0.4, "high": 2.5}),
    _decoupled("token, truncate (TIS)", ("verl", "openrlhf", "trl"), level="token", mode="truncate", high=2.0),
    _decoupled("token, mask (IcePop)", ("verl", "openrlhf", "trl"), level="token", mode="mask", low=0.5, high=2.0),
    _decoupled("token, clamp", ("openrlhf", "trl"), level="token", mode="clamp", low=0.5, high=2.0),
    _decoupled("sequence, truncate", ("verl", "trl"), level="sequence", mode="truncate", high=2.0),
    _decoupled("sequence, mask", ("verl", "trl"), level="sequence", mode="mask", low=0.5, high=2.0),
    _decoupled("token, reject, over the tokens that are left", ("verl",), level="token", mode="reject", low=0.5,
               high=1.8),
    *(
        Case("rollout_correction", f"in the loss: {title}", "corrected_policy_loss", ("areal",),
             PPO | {"correction": {"level": "token"} | correction}, LP, bound64=1e-6,
             why="AReaL computes the weights in float32")
        for title, correction in (
            ("token, truncate (TIS)", {"mode": "truncate", "high": 2.0}),
            ("token, mask (IcePop)", {"mode": "mask", "low": 0.5, "high": 2.0}),
            ("token, clamp", {"mode": "clamp", "low": 0.5, "high": 2.0}),
        )
    ),
    Case("proximal_loglinear", "lags of 0 to 5 versions", "proximal_loglinear", ("areal",), bound64=1e-6,
         why="AReaL computes α in float32"),
    Case("rollout_correction", "in the loss: REINFORCE by policy over behaviour (bypass)", "bypass_loss", ("verl",),
         {"correction": {"level": "token", "mode": "truncate", "high": 2.0}, "aggregation": "token-mean"}, LP),
    Case("rollout_correction", "in the loss: the same by sequence", "bypass_loss", ("verl",),
         {"correction": {"level": "sequence", "mode": "truncate", "high": 2.0},
          "aggregation": "seq-mean-token-sum"}, LP),
    _metrics("token, truncate", level="token", mode="truncate", high=2.0),
    _metrics("token, mask", level="token", mode="mask", low=0.5, high=2.0),
    _metrics("sequence, truncate", BY_SEQUENCE, level="sequence", mode="truncate", high=2.0),
    _metrics("sequence, mask", BY_SEQUENCE, level="sequence", mode="mask", low=0.5, high=2.0),
    _metrics("token, reject", (*DISTANCES, "rollout_rs_masked_fraction"), level="token", mode="reject", low=0.5,
             high=1.8),
    _metrics("sequence, reject", (*DISTANCES, "rollout_rs_masked_fraction"), level="sequence", mode="reject", low=0.4,
             high=2.5),
]  # fmt: skip
