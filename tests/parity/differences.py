"""Intended differences from a peer. They are measured too, so the list stays up to date."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.utils import torch_functional

from alignment import functional
from alignment.errors import SingletonGroup
from tests.parity import ours
from tests.parity.compare import precision
from tests.parity.draws import Kind, Tensors, cast, draw
from tests.parity.peers import areal, openrlhf, trl, verl

Formula = Callable[[Tensors], Tensor]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """`ours` and `theirs` compute the differing result from a batch of 12 sequences, float64."""

    what: str
    peer: str
    why: str
    ours: Formula
    theirs: Formula
    batch: Kind = "plain"

    def measure(self, generator: torch.Generator, batches: int = 5) -> "Measured":
        """Return the results with the largest difference, because a single batch may lack its cause."""
        return max((self._measure(generator) for _ in range(batches)), key=lambda measured: measured.gap)

    def _measure(self, generator: torch.Generator) -> "Measured":
        batch = draw(self.batch, (12, 33), generator)
        with precision(torch.float64):
            our_result, their_result = self.ours(cast(batch, torch.float64)), self.theirs(cast(batch, torch.float64))
        return Measured(our_result.detach(), their_result.detach())


class Measured(NamedTuple):
    ours: Tensor
    theirs: Tensor

    @property
    def gap(self) -> float:
        """Return the largest difference; infinite where only one of them has a result."""
        return float((self.ours - self.theirs).abs().nan_to_num(nan=torch.inf).max())


def run_on(side: Any, call: str, **settings: Any) -> Formula:
    return lambda x: getattr(side, call)(x, **settings)


def gradient(side: Any, **settings: Any) -> Formula:
    def formula(x: Tensors) -> Tensor:
        logprobs_BT = x["logprobs_BT"].requires_grad_()
        return torch.autograd.grad(side.policy_loss(x, **settings), logprobs_BT)[0]

    return formula


def metric(side: Any, name: str, level: str = "token") -> Formula:
    return run_on(side, "rollout_metrics", names=(name,), level=level, mode="truncate", high=2.0)


def loss_with_rejection(x: Tensors) -> Tensor:
    """Return the loss as in the trainer: rejected tokens have weight 0 and count in the denominator."""
    correction = functional.rollout_correction(x["old_logprobs_BT"], x["rollout_logprobs_BT"], x["mask_BT"], **REJECT)
    return ours.policy_loss(x, **PPO, rollout_weights_BT=correction.weights_BT)


def singleton_group(x: Tensors) -> Tensor:
    """Return the advantage of a group of one reply. Attune rejects the batch, so the result is NaN."""
    try:
        return functional.group_advantage(x["rewards_B"][:1], torch.tensor([0]))
    except SingletonGroup:
        return torch.tensor([torch.nan])


def singleton_group_in_verl(x: Tensors) -> Tensor:
    first = {name: x[name][:1] for name in ("rewards_B", "mask_BT", "group_B")}
    return verl.group_advantage(first, **GRPO)


def equal_rewards(side: Any) -> Formula:
    """Return the largest advantage in groups of eight equal rewards, from 0.1 to 0.9."""

    def formula(x: Tensors) -> Tensor:
        rest = {"group_B": torch.zeros(8, dtype=torch.int64), "mask_BT": x["mask_BT"][:8].float()}
        advantages = [
            side.group_advantage(rest | {"rewards_B": torch.full((8,), k / 10).float()}, **GRPO) for k in range(1, 10)
        ]
        return torch.stack(advantages).abs().max()

    return formula


def rejection_mask(side: Any, **bounds: float) -> Formula:
    return run_on(side, "rollout_mask", level="token", mode="reject", **bounds)


PPO: Settings = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "clip_c": None}
KL: Settings = PPO | {"kl_kind": "k3", "aggregation": "token-mean"}
MEAN: Settings = PPO | {"aggregation": "seq-mean-token-mean"}
GSPO: Settings = {"kind": "gspo", "clip_c": None, "aggregation": "seq-mean-token-mean"}
GSPO_BY_TOKEN: Settings = GSPO | {"aggregation": "token-mean"}
SAPO: Settings = {"kind": "sapo", "aggregation": "token-mean"}
GRPO: Settings = {"groups": "group_B", "scale_by_std": True}
IPO: Settings = {"kind": "ipo", "beta": 0.1}
GAE: Settings = {"gamma": 0.99, "lam": 0.95}
BY_SEQUENCE: Settings = {"level": "sequence", "mode": "truncate", "high": 2.0}
REJECT: Settings = {"level": "sequence", "mode": "reject", "low": 0.4, "high": 2.5}

DIFFERENCES = [
    Difference(
        "loss under sequence rejection (MIS)", "verl",
        "ours divides by the tokens before rejection (as AReaL, and TRL's masks), verl by those that are left: fewer "
        "tokens must not give each remaining one a larger gradient",
        loss_with_rejection, run_on(verl, "corrected_policy_loss", correction=REJECT, **PPO)),
    Difference(
        "the mask that rejection outside 0.5 and 4 leaves", "verl",
        "ours bounds the weight itself, proximal over behaviour; verl's k1 bounds the inverse",
        rejection_mask(ours, low=0.5, high=4.0), rejection_mask(verl, low=1 / 4.0, high=1 / 0.5)),
    Difference(
        "ppo + KL (k3) in the loss, TRL's default", "trl",
        "TRL multiplies k3 by the ratio (use_bias_correction_kl); ours has k3+ for the right gradient",
        run_on(ours, "policy_loss_with_kl", **KL), run_on(trl, "policy_loss_with_kl", bias_correction=True, **KL)),
    Difference(
        "GRPO advantage, each one's eps", "trl", "1e-6, as verl; TRL adds 1e-4",
        run_on(ours, "group_advantage", **GRPO), run_on(trl, "group_advantage", eps=1e-4, **GRPO)),
    Difference(
        "GRPO advantage, each one's eps", "openrlhf", "1e-6, as verl; OpenRLHF adds 1e-9",
        run_on(ours, "group_advantage", **GRPO), run_on(openrlhf, "group_advantage", **GRPO)),
    Difference(
        "GRPO advantage of a reply alone in its group", "verl",
        "ours rejects the batch (SingletonGroup); verl uses the raw reward as the advantage",
        singleton_group, singleton_group_in_verl),
    Difference(
        "GRPO advantage of eight equal rewards, float32", "verl",
        "equal rewards give exactly 0 in ours; verl divides the rounding error of the mean by its own deviation",
        equal_rewards(ours), equal_rewards(verl)),
    Difference(
        "k3 in the loss, log-probs 30 apart", "trl", "ours, as verl, keeps an estimate within 10; TRL has no bound",
        run_on(ours, "policy_loss_with_kl", **KL | {"clip_c": 3.0}),
        run_on(trl, "policy_loss_with_kl", **KL | {"clip_c": 3.0}), "wild"),
    Difference(
        "k1, log-probs 30 apart", "openrlhf", "OpenRLHF clamps every estimate to ±10; ours, as verl, k3 alone",
        run_on(ours, "kl_estimate", kind="k1"), run_on(openrlhf, "kl_estimate", kind="k1"), "wild"),
    Difference(
        "k2, log-probs 30 apart", "openrlhf", "the same",
        run_on(ours, "kl_estimate", kind="k2"), run_on(openrlhf, "kl_estimate", kind="k2"), "wild"),
    Difference(
        "seq-mean-token-mean where a sequence has no tokens", "trl",
        "ours, as verl, leaves it out of the mean; TRL counts it",
        run_on(ours, "policy_loss", **MEAN), run_on(trl, "policy_loss", **MEAN), "empty"),
    Difference(
        "ppo, log-ratios beyond ±20", "trl", "ours, as verl and OpenRLHF, keeps the ratio finite; TRL has no guard",
        run_on(ours, "policy_loss", **PPO), run_on(trl, "policy_loss", **PPO), "wild"),
    Difference(
        "dual clip with c = 1.1, below 1 + ε_high", "trl",
        "TRL's delta caps the ratio whatever the advantage's sign, the paper's dual clip only below 0",
        run_on(ours, "policy_loss", **PPO | {"clip_c": 1.1}), run_on(trl, "policy_loss", **PPO | {"clip_c": 1.1})),
    Difference(
        "gspo's gradient with an advantage for each token", "openrlhf",
        "ours, as verl, is the paper's token form; one ratio a sequence gives every token the mean advantage",
        gradient(ours, **GSPO), gradient(openrlhf, **GSPO)),
    Difference(
        "sapo under token-mean", "verl",
        "ours uses the configured aggregation; verl's SAPO always uses seq-mean-token-mean",
        run_on(ours, "policy_loss", **SAPO), run_on(verl, "policy_loss", **SAPO)),
    Difference(
        "gspo's gradient with an advantage for each token", "areal", "the same",
        gradient(ours, **GSPO_BY_TOKEN), gradient(areal, **GSPO_BY_TOKEN)),
    Difference(
        "GAE over masked tokens in between", "openrlhf",
        "ours, as verl, skips them without a discount; OpenRLHF sets their reward and value to 0",
        run_on(ours, "gae", **GAE), run_on(openrlhf, "gae", **GAE), "holes"),
    Difference(
        "REINFORCE++ with the group's mean as baseline", "openrlhf",
        "whitened with Bessel's correction, as verl; OpenRLHF without",
        run_on(ours, "reinforce_plus_plus_baseline", groups="group_B"),
        run_on(openrlhf, "reinforce_plus_plus_baseline", groups="group_B")),
    Difference(
        "whiten without its centre", "verl",
        "ours only scales, x / √mean(x²); verl's shift_mean=False subtracts the mean, scales, and adds it again",
        lambda x: functional.whiten(x["returns_BT"] + 2, x["mask_BT"], centre=False) * x["mask_BT"],
        lambda x: torch_functional.masked_whiten(x["returns_BT"] + 2, x["mask_BT"], shift_mean=False) * x["mask_BT"]),
    Difference(
        "whiten", "areal",
        "Bessel's correction and 1e-8 under the root, as verl; AReaL: neither, and 1e-5 added to the root",
        run_on(ours, "whiten"), run_on(areal, "whiten")),
    Difference(
        "the overlong penalty of a reply of 500 tokens where 80 is the longest", "areal",
        "ours stops at −1, as DAPO's paper; AReaL's continues to fall",
        run_on(ours, "overlong_penalty", longest=80, buffer=20),
        run_on(areal, "overlong_penalty", longest=80, buffer=20)),
    Difference(
        "weights by sequence, truncate", "areal",
        "ours, as verl and TRL, multiplies the tokens' ratios; AReaL takes their geometric mean",
        run_on(ours, "corrected_policy_loss", correction=BY_SEQUENCE, **PPO),
        run_on(areal, "corrected_policy_loss", correction=BY_SEQUENCE, **PPO)),
    Difference(
        "k1, log-probs 30 apart", "areal", "ours clamps k3 alone, to ±10; AReaL every estimate",
        run_on(ours, "kl_estimate", kind="k1"), run_on(areal, "kl_estimate", kind="k1"), "wild"),
    Difference(
        "ppo, log-ratios beyond ±20", "areal", "AReaL has no guard either",
        run_on(ours, "policy_loss", **PPO), run_on(areal, "policy_loss", **PPO), "wild"),
    Difference(
        "ipo", "openrlhf", "by length, as TRL after the paper's authors; OpenRLHF compares sums",
        run_on(ours, "dpo_loss", by_length=True, **IPO), run_on(openrlhf, "dpo_loss", **IPO)),
    Difference(
        "rollout_is_max by sequence", "verl",
        "ours is of the bounded weights, at both levels; verl's of the raw ratios",
        metric(ours, "rollout_is_max", "sequence"), metric(verl, "rollout_is_max", "sequence")),
    Difference(
        "training_ppl where a sequence has no tokens", "verl", "ours leaves it out; verl counts a perplexity of 1",
        metric(ours, "training_ppl"), metric(verl, "training_ppl"), "empty"),
    Difference(
        "k3_kl, log-probs 30 apart", "verl", "ours bounds this metric's ratio too, at e^20; verl does not",
        metric(ours, "k3_kl"), metric(verl, "k3_kl"), "wild"),
]  # fmt: skip
