"""Formulas per token: aggregation, means, whitening, KL, values."""

from tests.parity.case import ALL, Case

X = ("returns_BT",)
LP = ("logprobs_BT",)
EPS = "verl adds 1e-8 to counts"
MEANS = ("token-mean", "seq-mean-token-mean")
FLOAT32 = "OpenRLHF computes it in float32"

CASES = [
    *(
        Case("aggregate", mode, "aggregate", ("verl", "openrlhf") if mode in MEANS else ("verl",), {"mode": mode}, X)
        for mode in (*MEANS, "seq-mean-token-sum")
    ),
    Case("aggregate", "token-sum", "aggregate", ("verl",), {"mode": "token-sum"}, X, bound32=1e-5,
         why="a sum of hundreds of tokens, in another order"),
    *(
        Case("aggregate", f"{mode}, part of a larger minibatch", "aggregate",
             ("verl", "openrlhf") if mode in MEANS else ("verl",), {"mode": mode, "denominator": 40.0}, X)
        for mode in (*MEANS, "seq-mean-token-sum")
    ),
    Case("aggregate", "seq-mean-token-sum-norm", "aggregate", ("verl",),
         {"mode": "seq-mean-token-sum-norm", "horizon": 64}, X),
    Case("aggregate", "seq-mean-token-sum-norm, part of a larger minibatch", "aggregate", ("verl",),
         {"mode": "seq-mean-token-sum-norm", "denominator": 40.0, "horizon": 64}, X),
    Case("masked_mean", "mean", "masked_mean", ("verl",), {}, X, bound64=1e-8, why=EPS),
    Case("masked_mean", "mean", "masked_mean", ("openrlhf",), {}, X),
    Case("whiten", "mean 0, deviation 1 (Bessel)", "whiten", ("verl",), {}, X, bound64=1e-8, why=EPS),
    *(
        Case("kl_estimate", kind, "kl_estimate", ("verl",), {"kind": kind}, LP, ALL)
        for kind in ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
    ),
    *(
        Case("kl_estimate", kind, "kl_estimate", ("openrlhf",), {"kind": kind}, LP,
             bound64=1e-6, why=FLOAT32)
        for kind in ("k1", "k2", "k3", "k1+", "k2+", "k3+")
    ),
    *(
        Case("kl_estimate", kind, "kl_estimate", ("areal",), {"kind": kind}, LP, bound64=1e-6,
             why="AReaL computes it in float32")
        for kind in ("k1", "k2", "k3")
    ),
    Case("kl_estimate", "k3, log-probs 30 apart", "kl_estimate", ("openrlhf",), {"kind": "k3"}, LP, ("wild",),
         bound64=1e-5, bound32=1e-5, why=FLOAT32 + ", and log-probs of −30 leave it fewer digits"),
    Case("kl_estimate", "k1 in the reward", "kl_in_reward", ("verl",), {"kind": "k1"}, (), ALL),
    Case("kl_estimate", "k1 in the reward", "kl_in_reward", ("openrlhf",), {"kind": "k1"}, (), bound64=1e-6,
         why=FLOAT32),
    Case("kl_estimate", "k3 in the reward", "kl_in_reward", ("verl",), {"kind": "k3"}, (), ALL),
    *(
        Case("AdaptiveKLController", f"target {target}", "adaptive_kl", ("verl", "openrlhf"),
             {"init": 1e-3, "target": target, "horizon": 10_000}, (), ("plain",))
        for target in (0.1, 0.01)
    ),
    Case("value_loss", "clip 0.5", "value_loss", ("verl", "openrlhf"), {"clip": 0.5}, ("values_BT",)),
    Case("value_loss", "clip 0.5", "value_loss", ("areal",), {"clip": 0.5}, ("values_BT",), bound64=1e-6,
         why="AReaL computes it in float32"),
    Case("value_loss", "clip 0.5, seq-mean-token-mean of a larger minibatch", "value_loss", ("verl", "openrlhf"),
         {"clip": 0.5, "aggregation": "seq-mean-token-mean", "denominator": 40.0}, ("values_BT",)),
    Case("value_loss", "no clip", "value_loss", ("verl", "openrlhf"), {"clip": None}, ("values_BT",)),
    Case("value_loss", "clip fraction", "value_clip_fraction", ("verl",), {"clip": 0.5}, (), bound64=1e-8,
         why=EPS),
]  # fmt: skip
