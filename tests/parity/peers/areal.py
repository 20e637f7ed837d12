"""AReaL 1.0.4's side of the comparisons, from its own functions.

AReaL's packages import its infrastructure, so empty packages are registered in their place. Two classes that the
formulas need from other modules are extracted from their sources.
"""

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.parity.draws import Tensors
from tests.parity.ours import LENGTHS, advantages
from tests.parity.peers.extract import compile_statements
from tests.parity.peers.stubs import register_empty_packages, register_module

ROOT = register_empty_packages("areal", "areal.utils", "areal.utils.functional")


def _execute(path: str, first: str, **names: Any) -> dict[str, Any]:
    exec(compile_statements((ROOT / path).read_text(), first), names)
    return names


CONFIG = _execute("api/cli_args.py", "@dataclass\nclass RejectionSamplingConfig", dataclass=dataclass, field=field)
KL = _execute("utils/data.py", "class KLEstimator", torch=torch)
register_module("areal.api.cli_args", RejectionSamplingConfig=CONFIG["RejectionSamplingConfig"])
register_module("areal.utils.data", KLEstimator=KL["KLEstimator"])
formulas: ModuleType = importlib.import_module("areal.utils.functional.functional")
constants = vars(importlib.import_module("areal.utils.constants"))
LOGLINEAR = constants["PROX_APPROX_METHOD_LOGLINEAR"]
PROXIMAL = _execute("trainer/ppo/actor.py", "def compute_prox_logp_approximations", torch=torch, **constants)


def bradley_terry_loss(x: Tensors) -> Tensor:
    """Execute the statement of `compute_rw_loss` that computes the loss of each pair."""
    scores = torch.stack([x["chosen_P"], x["rejected_P"]], dim=1)
    loss: Tensor = _execute(
        "trainer/rw/rw_engine.py", "loss = -torch.nn.functional.logsigmoid", torch=torch, scores=scores
    )["loss"]
    return loss.mean()


def policy_loss(x: Tensors, *, per: str = "token", **settings: Any) -> Tensor:
    return _policy_loss(x, advantages(x, per), **settings)


def corrected_policy_loss(x: Tensors, *, correction: dict[str, Any], **settings: Any) -> Tensor:
    bounds = CONFIG["RejectionSamplingConfig"](
        level=correction["level"],
        action="mask" if correction["mode"] == "mask" else "clamp",
        upper=correction["high"],
        lower=correction.get("low"),
    )
    return _policy_loss(x, x["advantages_BT"], bounds=bounds, **settings)


def kl_estimate(x: Tensors, *, kind: str) -> Tensor:
    return KL["KLEstimator"](kind)(x["logprobs_BT"], x["ref_logprobs_BT"]) * x["mask_BT"]


def whiten(x: Tensors) -> Tensor:
    return formulas.masked_normalization(x["returns_BT"], x["mask_BT"]) * x["mask_BT"]


def proximal_loglinear(x: Tensors) -> Tensor:
    """Convert lags to AReaL's version numbers: the trained version is the parent's number plus one."""
    parent = 40
    versions_BT = (parent - x["lag_B"])[:, None].expand_as(x["mask_BT"])
    result = PROXIMAL["compute_prox_logp_approximations"](
        x["rollout_logprobs_BT"], x["logprobs_BT"], versions_BT, parent + 1, method=LOGLINEAR
    )
    return result[LOGLINEAR] * x["mask_BT"]


def value_loss(x: Tensors, *, clip: float) -> Tensor:
    """AReaL's function takes float32 only."""
    values = (x[name].float() for name in ("values_BT", "old_values_BT", "returns_BT"))
    return formulas.ppo_critic_loss_fn(*values, clip, x["mask_BT"].bool())[0]


def preference_loss(x: Tensors, *, beta: float, kind: str, by_length: bool) -> Tensor:
    """AReaL's callers divide by the lengths, for IPO only."""
    chosen_ratio_P, rejected_ratio_P = x["chosen_P"] - x["ref_chosen_P"], x["rejected_P"] - x["ref_rejected_P"]
    if kind == "ipo":
        chosen_ratio_P, rejected_ratio_P = (
            chosen_ratio_P / x["chosen_length_P"],
            rejected_ratio_P / x["rejected_length_P"],
        )
    return formulas.dpo_preference_loss(chosen_ratio_P - rejected_ratio_P, beta=beta, loss_type=kind).mean()


def overlong_penalty(x: Tensors, *, longest: int, buffer: int) -> Tensor:
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    data = {"rewards": torch.zeros(len(LENGTHS), dtype=torch.float64), "input_ids": mask, "loss_mask": mask}
    return formulas.reward_overlong_penalty(data, buffer, 1.0, longest)["rewards"]


def _policy_loss(
    x: Tensors,
    advantages_BT: Tensor,
    *,
    kind: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    aggregation: str = "token-mean",
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    bounds: Any = None,
) -> Tensor:
    assert aggregation == "token-mean", "AReaL has no other aggregation"
    mask_BT = x["mask_BT"].bool()
    if kind == "sapo":
        return formulas.sapo_loss_fn(x["logprobs_BT"], x["old_logprobs_BT"], advantages_BT, tau_pos, tau_neg, mask_BT)[
            0
        ]
    return formulas.ppo_actor_loss_fn(
        x["logprobs_BT"],
        x["old_logprobs_BT"],
        x["rollout_logprobs_BT"],
        advantages_BT,
        clip_low,
        mask_BT,
        eps_clip_higher=clip_high,
        c_clip=clip_c,
        rejection_sampling=bounds,
        importance_sampling_level="sequence" if kind == "gspo" else "token",
    )[0]
