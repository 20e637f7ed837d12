"""verl 0.9.1's side of the comparisons, from its own functions, in the precision of the batch."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl import DataProto
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import torch_functional
from verl.workers.config import ActorConfig, PolicyLossConfig

from tests.parity.case import Refused
from tests.parity.draws import Tensors
from tests.parity.ours import KL_COEF, KLS, METRICS, STEPS, advantages
from tests.parity.peers.extract import compile_statements

NAMES = {"ppo": "vanilla"}  # Attune's name: verl's name
NO_DUAL_CLIP = 1e30  # verl always applies dual clip
RS_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1"}


def policy_loss(x: Tensors, *, per: str = "token", **settings: Any) -> Tensor:
    return _policy_loss(x, per=per, **settings)[0]


def clip_fractions(x: Tensors, **settings: Any) -> Tensor:
    metrics = _policy_loss(x, **settings)[1]
    return torch.tensor([metrics["actor/pg_clipfrac"], metrics["actor/pg_clipfrac_lower"]])


def policy_loss_with_kl(x: Tensors, *, kl_kind: str, **settings: Any) -> Tensor:
    """Add the losses as the last lines of `verl.workers.utils.losses.ppo_loss` do."""
    kl_BT = core_algos.kl_penalty(x["logprobs_BT"], x["ref_logprobs_BT"], kl_kind)
    return policy_loss(x, **settings) + KL_COEF * core_algos.agg_loss(kl_BT, x["mask_BT"], settings["aggregation"])


def corrected_policy_loss(x: Tensors, *, correction: dict[str, Any], **settings: Any) -> Tensor:
    weights, mask_BT, _ = _correction(x, **correction)
    return _policy_loss(x | {"mask_BT": mask_BT}, rollout_weights_BT=weights, **settings)[0]


def bypass_loss(x: Tensors, *, correction: dict[str, Any], aggregation: str) -> Tensor:
    policy = PolicyLossConfig(
        loss_mode="bypass_mode",
        rollout_correction=RolloutCorrectionConfig(loss_type="reinforce", **_correction_settings(**correction)),
    )
    return core_algos.get_policy_loss_fn("bypass_mode")(
        old_log_prob=x["rollout_logprobs_BT"],
        log_prob=x["logprobs_BT"],
        advantages=x["advantages_BT"],
        response_mask=x["mask_BT"],
        loss_agg_mode=aggregation,
        config=_actor(policy_loss=policy),
    )[0]


def aggregate(x: Tensors, *, mode: str, denominator: float | None = None, horizon: int | None = None) -> Tensor:
    return core_algos.agg_loss(x["returns_BT"], x["mask_BT"], mode, **_totals(denominator, horizon))


def masked_mean(x: Tensors) -> Tensor:
    return torch_functional.masked_mean(x["returns_BT"], x["mask_BT"])


def kl_estimate(x: Tensors, *, kind: str) -> Tensor:
    return core_algos.kl_penalty(x["logprobs_BT"], x["ref_logprobs_BT"], kind) * x["mask_BT"]


def kl_in_reward(x: Tensors, *, kind: str) -> Tensor:
    data = DataProto.from_dict(
        tensors={
            "response_mask": x["mask_BT"],
            "token_level_scores": x["rewards_BT"],
            "old_log_probs": x["old_logprobs_BT"],
            "ref_log_prob": x["ref_logprobs_BT"],
        }
    )
    penalized, _ = _apply_kl_penalty(data, core_algos.FixedKLController(KL_COEF), kl_penalty=kind)
    return penalized.batch["token_level_rewards"] * x["mask_BT"]


def adaptive_kl(x: Tensors, *, init: float, target: float, horizon: int) -> Tensor:
    controller, values = core_algos.AdaptiveKLController(init, target, horizon), []
    for kl, n_steps in zip(KLS, STEPS, strict=True):
        controller.update(kl, n_steps)
        values.append(controller.value)
    return torch.tensor(values, dtype=torch.float64)


def gae_whitened(x: Tensors, *, gamma: float, lam: float) -> Tensor:
    result = core_algos.compute_gae_advantage_return(x["rewards_BT"], x["values_BT"], x["mask_BT"], gamma, lam)
    return torch.stack(result) * x["mask_BT"]


def group_advantage(x: Tensors, *, groups: str, scale_by_std: bool, eps: float = 1e-6) -> Tensor:
    return _outcome(
        x, groups, core_algos.compute_grpo_outcome_advantage, epsilon=eps, norm_adv_by_std_in_grpo=scale_by_std
    )


def leave_one_out_advantage(x: Tensors, *, groups: str) -> Tensor:
    return _outcome(x, groups, core_algos.compute_rloo_outcome_advantage)


def reinforce_plus_plus(x: Tensors, *, gamma: float) -> Tensor:
    config = _Gamma(gamma)
    return core_algos.compute_reinforce_plus_plus_outcome_advantage(x["rewards_BT"], x["mask_BT"], config=config)[0]


def reinforce_plus_plus_baseline(x: Tensors, *, groups: str) -> Tensor:
    # verl also sums rewards outside the mask, where its own rewards are always 0
    return core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        x["rewards_BT"] * x["mask_BT"], x["mask_BT"], x[groups].numpy()
    )[0]


def whiten(x: Tensors) -> Tensor:
    return torch_functional.masked_whiten(x["returns_BT"], x["mask_BT"]) * x["mask_BT"]


def rollout_weights(x: Tensors, **settings: Any) -> Tensor:
    weights_BT = _correction(x, **settings)[0]
    assert weights_BT is not None
    return weights_BT


def rollout_mask(x: Tensors, **settings: Any) -> Tensor:
    return _correction(x, **settings)[1]


def rollout_metrics(x: Tensors, *, names: tuple[str, ...] = METRICS, **settings: Any) -> Tensor:
    metrics = _correction(x, **settings)[2]
    return torch.tensor([metrics[f"rollout_corr/{name}"] for name in names], dtype=x["mask_BT"].dtype)


def value_loss(x: Tensors, *, aggregation: str = "token-mean", **settings: Any) -> Tensor:
    return _value_loss(x, aggregation, **settings)[0]


def value_clip_fraction(x: Tensors, **settings: Any) -> Tensor:
    return _value_loss(x, "token-mean", **settings)[1]


def _apply_kl_penalty(*args: Any, **settings: Any) -> Any:
    """Run verl's function without the trainer's module, which imports web servers and image libraries."""
    spec = importlib.util.find_spec("verl.trainer.ppo.ray_trainer")
    assert spec and spec.origin
    namespace = {
        "DataProto": DataProto,
        "core_algos": core_algos,
        "masked_mean": torch_functional.masked_mean,
        "torch": torch,
    }
    exec(compile_statements(Path(spec.origin).read_text(), "def apply_kl_penalty"), namespace)
    return namespace["apply_kl_penalty"](*args, **settings)


class _Gamma:
    """The attribute of verl's AlgoConfig that REINFORCE++ reads."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma


def _actor(**settings: Any) -> ActorConfig:
    sizes = {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1}
    return ActorConfig(strategy="fsdp", **sizes, **settings)


def _totals(denominator: float | None, horizon: int | None) -> dict[str, Any]:
    """Return Attune's denominator under verl's names. verl's modes divide by different ones."""
    return {"batch_num_tokens": denominator, "global_batch_size": denominator, "loss_scale_factor": horizon}


def _policy_loss(
    x: Tensors,
    *,
    per: str = "token",
    kind: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    aggregation: str = "token-mean",
    denominator: float | None = None,
    horizon: int | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    rollout_weights_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    config = _actor(
        clip_ratio_low=clip_low,
        clip_ratio_high=clip_high,
        clip_ratio_c=NO_DUAL_CLIP if clip_c is None else clip_c,
        tau_pos=tau_pos,
        tau_neg=tau_neg,
        global_batch_info=_totals(denominator, horizon),
    )
    common = {
        "log_prob": x["logprobs_BT"],
        "advantages": advantages(x, per),
        "response_mask": x["mask_BT"],
        "loss_agg_mode": aggregation,
        "config": config,
        "rollout_is_weights": rollout_weights_BT,
    }
    if kind == "reinforce":
        return core_algos.compute_policy_loss_reinforce(rollout_log_prob=x["rollout_logprobs_BT"], **common)
    return core_algos.get_policy_loss_fn(NAMES.get(kind, kind))(old_log_prob=x["old_logprobs_BT"], **common)


def _correction_settings(level: str, mode: str, low: float = 0.0, high: float = 2.0) -> dict[str, Any]:
    if mode == "truncate":
        return {"rollout_is": level, "rollout_is_threshold": high}
    if mode == "mask":
        return {"rollout_is": level, "rollout_is_threshold": f"{low}_{high}"}
    if mode == "reject":  # verl's bounds are on behaviour / proximal, the inverse ratio
        return {"rollout_is": None, "rollout_rs": RS_LEVELS[level], "rollout_rs_threshold": f"{1 / high}_{1 / low}"}
    raise ValueError(f"verl has no {mode}")


def _correction(x: Tensors, **settings: Any) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    try:
        proto, mask_BT, metrics = compute_rollout_correction_and_rejection_mask(
            x["old_logprobs_BT"], x["rollout_logprobs_BT"], x["mask_BT"], **_correction_settings(**settings)
        )
    except ZeroDivisionError as error:
        raise Refused("verl divides by zero where IcePop leaves no weight") from error
    return None if proto is None else proto.batch["rollout_is_weights"], mask_BT, metrics


def _outcome(x: Tensors, groups: str, estimator: Any, **settings: Any) -> Tensor:
    """Return verl's outcome advantage. The sequence's reward is on its first token, and the mask has all tokens."""
    rewards_BT = torch.nn.functional.pad(x["rewards_B"][:, None], (0, x["mask_BT"].shape[1] - 1))
    index: np.ndarray = x[groups].numpy()
    return estimator(rewards_BT, torch.ones_like(rewards_BT), index=index, **settings)[0][:, 0]


def _value_loss(
    x: Tensors, aggregation: str, *, clip: float | None, denominator: float | None = None
) -> tuple[Tensor, Tensor]:
    return core_algos.compute_value_loss(
        x["values_BT"],
        x["returns_BT"],
        x["old_values_BT"],
        x["mask_BT"],
        cliprange_value=NO_DUAL_CLIP if clip is None else clip,
        loss_agg_mode=aggregation,
        **_totals(denominator, None),
    )
