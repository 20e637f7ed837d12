"""Where ours and a peer's differ on purpose: measured like everything else, so that the list cannot grow stale."""

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

Answer = Callable[[Tensors], Tensor]


@dataclass(frozen=True)
class Difference:
    """`ours` and `theirs` give what differs, from a batch of 12 sequences, float64."""

    what: str
    peer: str
    why: str
    ours: Answer
    theirs: Answer
    batch: Kind = "plain"

    def measure(self, generator: torch.Generator, batches: int = 5) -> "Measured":
        """The batch on which they are furthest apart: by chance the reason for a difference may be absent from one."""
        return max((self._measure(generator) for _ in range(batches)), key=lambda measured: measured.gap)

    def _measure(self, generator: torch.Generator) -> "Measured":
        batch = draw(self.batch, (12, 33), generator)
        with precision(torch.float64):
            mine, yours = self.ours(cast(batch, torch.float64)), self.theirs(cast(batch, torch.float64))
        return Measured(mine.detach(), yours.detach())


class Measured(NamedTuple):
    ours: Tensor
    theirs: Tensor

    @property
    def gap(self) -> float:
        """Largest difference; infinite where only one of them answers."""
        return float((self.ours - self.theirs).abs().nan_to_num(nan=torch.inf).max())


def ask(side: Any, call: str, **settings: Any) -> Answer:
    return lambda x: getattr(side, call)(x, **settings)


def gradient(side: Any, **settings: Any) -> Answer:
    def answer(x: Tensors) -> Tensor:
        logprobs_BT = x["logprobs_BT"].requires_grad_()
        return torch.autograd.grad(side.policy_loss(x, **settings), logprobs_BT)[0]

    return answer


def metric(side: Any, name: str, level: str = "token") -> Answer:
    return ask(side, "rollout_metrics", names=(name,), level=level, mode="truncate", high=2.0)


def rejected(x: Tensors) -> Tensor:
    """As the trainer does it: rejected tokens weigh nothing, and stay in the denominator."""
    done = functional.rollout_correction(x["old_logprobs_BT"], x["rollout_BT"], x["mask_BT"], **REJECT)
    return ours.policy_loss(x, **PPO, rollout_weights_BT=done.weights_BT)


def alone(x: Tensors) -> Tensor:
    """A reply that is alone in its group: Attune refuses the batch, so the answer is no number."""
    try:
        return functional.group_advantage(x["rewards_B"][:1], torch.tensor([0]))
    except SingletonGroup:
        return torch.tensor([torch.nan])


def alone_in_verl(x: Tensors) -> Tensor:
    first = {name: x[name][:1] for name in ("rewards_B", "mask_BT", "group_B")}
    return verl.group_advantage(first, **GRPO)


def equal_rewards(side: Any) -> Answer:
    """The largest advantage in groups of eight equal rewards: 0.1 and so on to 0.9."""

    def answer(x: Tensors) -> Tensor:
        rest = {"group_B": torch.zeros(8, dtype=torch.int64), "mask_BT": x["mask_BT"][:8].float()}
        each = [
            side.group_advantage(rest | {"rewards_B": torch.full((8,), k / 10).float()}, **GRPO) for k in range(1, 10)
        ]
        return torch.stack(each).abs().max()

    return answer


def kept(side: Any, **bounds: float) -> Answer:
    return ask(side, "rollout_mask", level="token", mode="reject", **bounds)


PPO = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "clip_c": None}
KL = PPO | {"kl_kind": "k3", "aggregation": "token-mean"}
MEAN = PPO | {"aggregation": "seq-mean-token-mean"}
GSPO = {"kind": "gspo", "clip_c": None, "aggregation": "seq-mean-token-mean"}
GSPO_BY_TOKEN = GSPO | {"aggregation": "token-mean"}
SAPO = {"kind": "sapo", "aggregation": "token-mean"}
GRPO = {"groups": "group_B", "scale_by_std": True}
IPO = {"kind": "ipo", "beta": 0.1}
GAE = {"gamma": 0.99, "lam": 0.95}
BY_SEQUENCE = {"level": "sequence", "mode": "truncate", "high": 2.0}
REJECT = {"level": "sequence", "mode": "reject", "low": 0.4, "high": 2.5}

DIFFERENCES = [
    Difference(
        "loss under sequence rejection (MIS)", "verl",
        "ours divides by the tokens before rejection (as AReaL, and TRL's masks), verl by those that are left: fewer "
        "tokens must not mean a larger gradient for each that stays",
        rejected, ask(verl, "corrected_policy_loss", correction=REJECT, **PPO)),
    Difference(
        "the mask that rejection outside 0.5 and 4 leaves", "verl",
        "ours bounds the weight itself, proximal over behaviour; verl's k1 bounds the inverse",
        kept(ours, low=0.5, high=4.0), kept(verl, low=1 / 4.0, high=1 / 0.5)),
    Difference(
        "ppo + KL (k3) in the loss, TRL's default", "trl",
        "TRL multiplies k3 by the ratio (use_bias_correction_kl); ours has k3+ for the right gradient",
        ask(ours, "policy_loss_with_kl", **KL), ask(trl, "policy_loss_with_kl", bias_correction=True, **KL)),
    Difference(
        "GRPO advantage, each one's eps", "trl", "1e-6, as verl; TRL adds 1e-4",
        ask(ours, "group_advantage", **GRPO), ask(trl, "group_advantage", eps=1e-4, **GRPO)),
    Difference(
        "GRPO advantage, each one's eps", "openrlhf", "1e-6, as verl; OpenRLHF adds 1e-9",
        ask(ours, "group_advantage", **GRPO), ask(openrlhf, "group_advantage", **GRPO)),
    Difference(
        "GRPO advantage of a reply alone in its group", "verl",
        "ours refuses the batch (SingletonGroup); verl lets the raw reward through as an advantage",
        alone, alone_in_verl),
    Difference(
        "GRPO advantage of eight equal rewards, float32", "verl",
        "equal rewards leave exactly 0 in ours; in verl the rounding of their mean is divided by its own deviation",
        equal_rewards(ours), equal_rewards(verl)),
    Difference(
        "k3 in the loss, log-probs 30 apart", "trl", "ours, as verl, keeps an estimate within 10; TRL has no bound",
        ask(ours, "policy_loss_with_kl", **KL | {"clip_c": 3.0}),
        ask(trl, "policy_loss_with_kl", **KL | {"clip_c": 3.0}), "wild"),
    Difference(
        "k1, log-probs 30 apart", "openrlhf", "OpenRLHF clamps every estimate to ±10; ours, as verl, k3 alone",
        ask(ours, "kl_estimate", kind="k1"), ask(openrlhf, "kl_estimate", kind="k1"), "wild"),
    Difference(
        "k2, log-probs 30 apart", "openrlhf", "the same",
        ask(ours, "kl_estimate", kind="k2"), ask(openrlhf, "kl_estimate", kind="k2"), "wild"),
    Difference(
        "seq-mean-token-mean where a sequence has no tokens", "trl",
        "ours, as verl, leaves it out of the mean; TRL counts it",
        ask(ours, "policy_loss", **MEAN), ask(trl, "policy_loss", **MEAN), "empty"),
    Difference(
        "ppo, log-ratios beyond ±20", "trl", "ours, as verl and OpenRLHF, keeps the ratio finite; TRL has no guard",
        ask(ours, "policy_loss", **PPO), ask(trl, "policy_loss", **PPO), "wild"),
    Difference(
        "dual clip with c = 1.1, below 1 + ε_high", "trl",
        "TRL's delta caps the ratio whatever the advantage's sign, the paper's dual clip only below 0",
        ask(ours, "policy_loss", **PPO | {"clip_c": 1.1}), ask(trl, "policy_loss", **PPO | {"clip_c": 1.1})),
    Difference(
        "gspo's gradient with an advantage for each token", "openrlhf",
        "ours, as verl, is the paper's token form; one ratio a sequence gives every token the mean advantage",
        gradient(ours, **GSPO), gradient(openrlhf, **GSPO)),
    Difference(
        "sapo under token-mean", "verl", "ours aggregates as it is told; verl's SAPO always by seq-mean-token-mean",
        ask(ours, "policy_loss", **SAPO), ask(verl, "policy_loss", **SAPO)),
    Difference(
        "gspo's gradient with an advantage for each token", "areal", "the same",
        gradient(ours, **GSPO_BY_TOKEN), gradient(areal, **GSPO_BY_TOKEN)),
    Difference(
        "GAE over masked tokens in between", "openrlhf",
        "ours, as verl, skips them: time stands still while a tool speaks; OpenRLHF sets their reward and value to 0",
        ask(ours, "gae", **GAE), ask(openrlhf, "gae", **GAE), "holes"),
    Difference(
        "REINFORCE++ with the group's mean as baseline", "openrlhf",
        "whitened with Bessel's correction, as verl; OpenRLHF without",
        ask(ours, "reinforce_plus_plus_baseline", groups="group_B"),
        ask(openrlhf, "reinforce_plus_plus_baseline", groups="group_B")),
    Difference(
        "whiten without its centre", "verl",
        "ours only scales, x / σ; verl's shift_mean=False takes the mean away, scales, and adds it again",
        lambda x: functional.whiten(x["returns_BT"] + 2, x["mask_BT"], centre=False) * x["mask_BT"],
        lambda x: torch_functional.masked_whiten(x["returns_BT"] + 2, x["mask_BT"], shift_mean=False) * x["mask_BT"]),
    Difference(
        "whiten", "areal", "Bessel's correction and 1e-8 under the root, as verl; AReaL: neither, and 1e-5 beside it",
        ask(ours, "whiten"), ask(areal, "whiten")),
    Difference(
        "the overlong penalty of a reply of 500 tokens where 80 is the longest", "areal",
        "ours stops at −1, as DAPO's paper; AReaL's goes on falling",
        ask(ours, "overlong_penalty", longest=80, buffer=20), ask(areal, "overlong_penalty", longest=80, buffer=20)),
    Difference(
        "weights by sequence, truncate", "areal",
        "ours, as verl and TRL, multiplies the tokens' ratios; AReaL takes their geometric mean",
        ask(ours, "corrected_policy_loss", correction=BY_SEQUENCE, **PPO),
        ask(areal, "corrected_policy_loss", correction=BY_SEQUENCE, **PPO)),
    Difference(
        "k1, log-probs 30 apart", "areal", "ours clamps k3 alone, to ±10; AReaL every estimate",
        ask(ours, "kl_estimate", kind="k1"), ask(areal, "kl_estimate", kind="k1"), "wild"),
    Difference(
        "ppo, log-ratios beyond ±20", "areal", "AReaL has no guard either",
        ask(ours, "policy_loss", **PPO), ask(areal, "policy_loss", **PPO), "wild"),
    Difference(
        "ipo", "openrlhf", "by length, as TRL after the paper's authors; OpenRLHF compares sums",
        ask(ours, "dpo_loss", by_length=True, **IPO), ask(openrlhf, "dpo_loss", **IPO)),
    Difference(
        "rollout_is_max by sequence", "verl", "ours is of the weights that act, at both levels; verl's of raw ratios",
        metric(ours, "rollout_is_max", "sequence"), metric(verl, "rollout_is_max", "sequence")),
    Difference(
        "training_ppl where a sequence has no tokens", "verl", "ours leaves it out; verl counts a perplexity of 1",
        metric(ours, "training_ppl"), metric(verl, "training_ppl"), "empty"),
    Difference(
        "k3_kl, log-probs 30 apart", "verl", "ours bounds this metric's ratio too, at e^20; verl does not",
        metric(ours, "k3_kl"), metric(verl, "k3_kl"), "wild"),
]  # fmt: skip
