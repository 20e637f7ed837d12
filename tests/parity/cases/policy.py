"""The policy losses: every kind, clip and aggregation, rollout weights, and KL in the loss."""

from typing import Any

from tests.parity.case import ALL, FULL, Case

PPO = {"kind": "ppo", "clip_c": None}
HIGHER = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}
LP = ("logprobs_BT",)
FOUR = ("verl", "openrlhf", "trl", "areal")
WILD = "log-probs of −30 and ratios of e^20 leave float32 fewer digits"
MINIBATCH = 250.0  # tokens, or sequences, of a minibatch of which the batch is a part


def _loss(title: str, settings: dict[str, Any], peers: tuple[str, ...], call: str = "policy_loss", **more: Any) -> Case:
    return Case("policy_loss", title, call, peers, settings, more.pop("leaf", LP), **more)


CASES = [
    _loss("ppo, clip", PPO | {"aggregation": "token-mean"}, FOUR),
    _loss("ppo, clip, log-ratios beyond ±20", PPO, ("verl", "openrlhf"), kinds=("wild",), bound32=1e-5, why=WILD),
    _loss("ppo, clip-higher", HIGHER | {"clip_c": None}, FOUR),
    _loss("ppo, dual clip", HIGHER, FOUR),
    _loss("ppo, dual clip, log-ratios beyond ±20", HIGHER, ("verl", "openrlhf"), kinds=("wild",), bound32=1e-5,
          why=WILD),
    _loss("ppo, narrow clip", HIGHER | {"clip_low": 0.1, "clip_high": 0.12, "clip_c": 1.15}, FOUR),
    _loss("ppo, token-mean of a larger minibatch", HIGHER | {"denominator": MINIBATCH}, ("verl", "openrlhf", "trl")),
    _loss("ppo, seq-mean-token-mean", HIGHER | {"aggregation": "seq-mean-token-mean"}, ("verl", "openrlhf")),
    _loss("ppo, seq-mean-token-mean", HIGHER | {"aggregation": "seq-mean-token-mean"}, ("trl",), kinds=FULL,
          bound64=1e-7, why="verl's n + 1e-8, which ours shares, against TRL's max(n, 1)"),
    _loss("ppo, seq-mean-token-mean of a larger minibatch",
          HIGHER | {"aggregation": "seq-mean-token-mean", "denominator": MINIBATCH}, ("verl", "openrlhf")),
    _loss("ppo, seq-mean-token-sum", HIGHER | {"aggregation": "seq-mean-token-sum"}, ("verl",)),
    _loss("ppo, seq-mean-token-sum", HIGHER | {"aggregation": "seq-mean-token-sum"}, ("trl",), kinds=FULL),
    _loss("ppo, seq-mean-token-sum-norm (Dr.GRPO)",
          HIGHER | {"aggregation": "seq-mean-token-sum-norm", "horizon": 64}, ("verl",)),
    _loss("ppo, seq-mean-token-sum-norm (Dr.GRPO)",
          HIGHER | {"aggregation": "seq-mean-token-sum-norm", "horizon": 64}, ("trl",), kinds=FULL),
    _loss("ppo, token-sum", HIGHER | {"aggregation": "token-sum"}, ("verl",), bound32=1e-5,
          why="a sum of hundreds of tokens, in another order"),
    _loss("ppo, a reply as one action (RLOO)", {"clip_low": 0.2, "clip_high": 0.28, "clip_c": None}, ("trl",),
          call="policy_loss_of_sums"),
    _loss("gspo", {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.07, "clip_c": None,
                   "aggregation": "seq-mean-token-mean"}, ("verl",)),
    _loss("gspo, log-ratios beyond ±20", {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.07, "clip_c": None},
          ("verl",), kinds=("wild",), bound32=1e-5, why=WILD),
    _loss("gspo, token-mean", {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.07, "clip_c": None}, ("verl",)),
    _loss("gspo, one advantage a sequence, token-mean",
          {"kind": "gspo", "per": "sequence", "clip_low": 0.05, "clip_high": 0.07, "clip_c": None}, ("areal",)),
    _loss("gspo, one advantage a sequence",
          {"kind": "gspo", "per": "sequence", "clip_low": 0.05, "clip_high": 0.07, "clip_c": None,
           "aggregation": "seq-mean-token-mean"}, ("openrlhf",)),
    _loss("gspo, one advantage a sequence",
          {"kind": "gspo", "per": "sequence", "clip_low": 0.05, "clip_high": 0.07, "clip_c": None,
           "aggregation": "seq-mean-token-mean"}, ("trl",), kinds=FULL,
          bound64=1e-7, why="verl's n + 1e-8, which ours shares, against TRL's max(n, 1)"),
    _loss("cispo", {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.28}, ("verl",)),
    _loss("cispo, log-ratios beyond ±20", {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.28}, ("verl",),
          kinds=("wild",), bound32=1e-5, why=WILD),
    _loss("cispo, upper cap only", {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.28}, ("verl", "trl")),
    _loss("sapo", {"kind": "sapo", "aggregation": "seq-mean-token-mean"}, ("verl",)),
    _loss("sapo, log-ratios beyond ±20", {"kind": "sapo", "aggregation": "seq-mean-token-mean"}, ("verl",),
          kinds=("wild",), bound32=1e-5, why=WILD),
    _loss("sapo", {"kind": "sapo", "aggregation": "seq-mean-token-mean"}, ("trl",), kinds=FULL,
          bound64=1e-7, why="verl's n + 1e-8, which ours shares, against TRL's max(n, 1)"),
    _loss("sapo, token-mean", {"kind": "sapo"}, ("areal",)),
    _loss("reinforce", {"kind": "reinforce", "aggregation": "seq-mean-token-sum"}, ("verl",)),
    _loss("dppo_tv", {"kind": "dppo_tv", "clip_low": 0.1, "clip_high": 0.15, "clip_c": 20.0}, ("verl",)),
    _loss("dppo_tv, log-ratios beyond ±20", {"kind": "dppo_tv", "clip_low": 0.1, "clip_high": 0.15, "clip_c": 20.0},
          ("verl",), kinds=("wild",), bound32=1e-5, why=WILD),
    _loss("dppo_tv, low cap", {"kind": "dppo_tv", "clip_low": 0.02, "clip_high": 0.02, "clip_c": 1.2}, ("verl",)),
    _loss("clip fractions", HIGHER, ("verl",), call="clip_fractions", leaf=(), kinds=ALL,
          bound64=1e-8, why="verl adds 1e-8 to counts"),
    _loss("clip fractions, gspo", {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.07, "clip_c": None}, ("verl",),
          call="clip_fractions", leaf=(), bound64=1e-8, why="verl adds 1e-8 to counts"),
    _loss("clip fractions, cispo", {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.28}, ("verl",),
          call="clip_fractions", leaf=(), bound64=1e-8, why="verl adds 1e-8 to counts"),
    _loss("clip fractions, dppo_tv", {"kind": "dppo_tv", "clip_low": 0.02, "clip_high": 0.02, "clip_c": 1.2},
          ("verl",), call="clip_fractions", leaf=(), bound64=1e-8, why="verl adds 1e-8 to counts"),
    _loss("clip fraction", HIGHER | {"clip_c": None}, ("openrlhf",), call="clip_fraction", leaf=(), kinds=ALL,
          bound64=1e-7, why="OpenRLHF counts in float32"),
    _loss("clip fraction", HIGHER | {"clip_c": None}, ("trl",), call="clip_fraction", leaf=(), kinds=FULL,
          bound64=1e-7, why="TRL counts in float32"),
    *(
        _loss(f"{kind}, with rollout weights",
              {"kind": kind, "clip_low": 0.05, "clip_high": 0.07, "clip_c": 3.0,
               "aggregation": "seq-mean-token-mean",
               "correction": {"level": "token", "mode": "truncate", "high": 2.0}},
              ("verl",), call="corrected_policy_loss")
        for kind in ("ppo", "gspo", "cispo", "sapo", "dppo_tv")
    ),
    _loss("ppo + KL (k3) in the loss", HIGHER | {"kl_kind": "k3", "aggregation": "token-mean"}, ("verl", "trl"),
          call="policy_loss_with_kl"),
    _loss("ppo + KL (k3+) in the loss", HIGHER | {"kl_kind": "k3+", "aggregation": "seq-mean-token-mean"}, ("verl",),
          call="policy_loss_with_kl"),
]  # fmt: skip
