"""OpenRLHF 0.11.2's side of the comparisons, from its own classes.

OpenRLHF's packages import DeepSpeed, flash-attention and vLLM. The formulas need none of them, so empty packages are
registered, and the modules with the formulas are loaded into them.
"""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.parity.draws import Tensors
from tests.parity.ours import KL_COEF, KLS, LENGTHS, STEPS, advantages
from tests.parity.peers.stubs import register_empty_packages, register_module

register_empty_packages("openrlhf.models", "openrlhf.utils", "openrlhf.trainer.ppo_utils", "openrlhf.trainer.ray")
register_module("openrlhf.trainer.ray.launcher", RayActorGroup=object)
register_module("deepspeed")
importlib.import_module("openrlhf.models.utils")  # imports DeepSpeed, which the functions used here do not need
del sys.modules["deepspeed"]  # other packages check whether it is installed

from openrlhf.models.loss import DPOLoss, PairWiseLoss, PolicyLoss, ValueLoss, aggregate_loss  # noqa: E402
from openrlhf.models.utils import compute_approx_kl, compute_reward  # noqa: E402
from openrlhf.models.utils import masked_mean as openrlhf_masked_mean  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController  # noqa: E402
from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty  # noqa: E402

PER_TOKEN = {"token-mean": True, "seq-mean-token-mean": False}  # OpenRLHF has no other aggregations
ESTIMATORS = {True: "group_norm", False: "dr_grpo"}


def policy_loss(x: Tensors, *, per: str = "token", **settings: Any) -> Tensor:
    return _policy_loss(x, advantages(x, per), **settings)[0]


def clip_fraction(x: Tensors, **settings: Any) -> Tensor:
    return _policy_loss(x, x["advantages_BT"], **settings)[1][None]


def corrected_policy_loss(x: Tensors, *, correction: dict[str, Any], **settings: Any) -> Tensor:
    correction_settings = {
        "is_correction_level": correction["level"],
        "is_correction_mode": "mask" if correction["mode"] == "mask" else "clip",
        "is_correction_threshold": [correction.get("low", 0.0), correction.get("high", 2.0)],
    }
    return _policy_loss(x, x["advantages_BT"], correction_settings=correction_settings, **settings)[0]


def aggregate(x: Tensors, *, mode: str, denominator: float | None = None) -> Tensor:
    return aggregate_loss(x["returns_BT"], x["mask_BT"], PER_TOKEN[mode], **_totals(denominator))


def masked_mean(x: Tensors) -> Tensor:
    return openrlhf_masked_mean(x["returns_BT"], x["mask_BT"])


def kl_estimate(x: Tensors, *, kind: str) -> Tensor:
    unbiased_gradient = kind.endswith("+")
    kl_BT = compute_approx_kl(
        x["logprobs_BT"], x["ref_logprobs_BT"], kl_estimator=kind.rstrip("+"), unbiased_gradient=unbiased_gradient
    )
    return kl_BT * x["mask_BT"]


def kl_in_reward(x: Tensors, *, kind: str) -> Tensor:
    """OpenRLHF adds one reward per sequence to the KL penalty; with rewards of 0 only the KL penalty remains."""
    kl_BT = compute_approx_kl(x["old_logprobs_BT"], x["ref_logprobs_BT"], kl_estimator=kind)
    zero_rewards_B = torch.zeros_like(x["rewards_B"])
    return (x["rewards_BT"] + compute_reward(zero_rewards_B, KL_COEF, kl_BT, action_mask=x["mask_BT"])) * x["mask_BT"]


def adaptive_kl(x: Tensors, *, init: float, target: float, horizon: int) -> Tensor:
    controller, values = AdaptiveKLController(init, target, horizon), []
    for kl, n_steps in zip(KLS, STEPS, strict=True):
        controller.update(kl, n_steps)
        values.append(controller.value)
    return torch.tensor(values, dtype=torch.float64)


def gae(x: Tensors, *, gamma: float, lam: float) -> Tensor:
    result = RemoteExperienceMaker.get_advantages_and_returns(
        None, x["values_BT"], x["rewards_BT"], x["mask_BT"], gamma, lam
    )
    return torch.stack(result) * x["mask_BT"]


def group_advantage(x: Tensors, *, groups: str, scale_by_std: bool, eps: float = 1e-6) -> Tensor:
    return _estimate(x, groups, ESTIMATORS[scale_by_std])[:, 0]


def leave_one_out_advantage(x: Tensors, *, groups: str) -> Tensor:
    return _estimate(x, groups, "rloo")[:, 0]


def reinforce_plus_plus_baseline(x: Tensors, *, groups: str) -> Tensor:
    rewards_B = (x["rewards_BT"] * x["mask_BT"]).sum(-1)
    return _estimate(x | {"rewards_B": rewards_B}, groups, "reinforce_baseline", x["mask_BT"]) * x["mask_BT"]


def value_loss(
    x: Tensors, *, clip: float | None, aggregation: str = "token-mean", denominator: float | None = None
) -> Tensor:
    loss = ValueLoss(clip_eps=clip, token_level_loss=PER_TOKEN[aggregation])
    return loss(x["values_BT"], x["old_values_BT"], x["returns_BT"], x["mask_BT"], **_totals(denominator))


def dpo_loss(x: Tensors, *, beta: float, kind: str, label_smoothing: float = 0.0) -> Tensor:
    names = ("chosen_P", "rejected_P", "ref_chosen_P", "ref_rejected_P")
    result = DPOLoss(beta, label_smoothing, ipo=kind == "ipo")(*(x[name] for name in names))
    return torch.stack([part.mean() for part in result])


def ipo_of_sums(x: Tensors, *, beta: float) -> Tensor:
    return dpo_loss(x, beta=beta, kind="ipo")


def bradley_terry_loss(x: Tensors) -> Tensor:
    loss: Tensor = PairWiseLoss()(x["chosen_P"], x["rejected_P"])
    return loss


def overlong_penalty(x: Tensors, *, longest: int, buffer: int) -> Tensor:
    rewards = torch.zeros(len(LENGTHS), dtype=torch.float64)
    sample = SimpleNamespace(response_length=torch.tensor(LENGTHS), rewards=rewards)
    apply_overlong_penalty([sample], longest, buffer)
    return sample.rewards


def _totals(denominator: float | None) -> dict[str, Any]:
    return {"batch_num_tokens": denominator, "global_batch_size": denominator}


def _policy_loss(
    x: Tensors,
    advantages_BT: Tensor,
    *,
    kind: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    aggregation: str = "token-mean",
    denominator: float | None = None,
    correction_settings: dict[str, Any] | None = None,
) -> tuple[Tensor, ...]:
    loss = PolicyLoss(
        clip_low, clip_high, clip_c, PER_TOKEN[aggregation], policy_loss_type=kind, **(correction_settings or {})
    )
    return loss(
        x["logprobs_BT"],
        x["old_logprobs_BT"],
        advantages_BT,
        x["mask_BT"],
        x["rollout_logprobs_BT"],
        **_totals(denominator),
    )


def _estimate(x: Tensors, groups: str, estimator: str, mask_BT: Tensor | None = None) -> Tensor:
    """Return the advantages of OpenRLHF's complete computation, without KL and discount.  [B, T]

    OpenRLHF requires consecutive groups of equal size, as in `group_B`. Without a mask all tokens count.
    """
    assert groups == "group_B", "OpenRLHF requires consecutive groups of equal size"
    mask_BT = torch.ones_like(x["mask_BT"]) if mask_BT is None else mask_BT
    advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=int((x["group_B"] == x["group_B"][0]).sum())),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        kl_ctl=SimpleNamespace(value=0.0),
        advantage_estimator=estimator,
        get_cumulative_returns=lambda *args: RemoteExperienceMaker.get_cumulative_returns(None, *args),
    )
    experience = Experience(
        action_mask=mask_BT,
        kl=torch.zeros_like(mask_BT),
        rewards=x["rewards_B"].clone(),
        index=list(range(len(mask_BT))),
    )
    RemoteExperienceMaker.compute_advantages_and_returns(maker, [experience])
    return experience.advantages
