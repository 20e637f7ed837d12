"""TRL 1.16.0's side of the comparisons, from its trainers' own methods.

TRL's formulas are parts of the trainers' methods. `_compute_loss` is called unbound, on a stand-in with the attributes
that it reads. Parts of longer methods (importance ratios, advantages) are extracted and run unchanged.
"""

import inspect
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import grpo_trainer, rloo_trainer

from tests.parity.draws import Tensors
from tests.parity.ours import KL_COEF, LENGTHS, advantages, desirable
from tests.parity.peers.extract import compile_statements

LOSS_TYPES = {
    "token-mean": "bnpo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
LEVELS = {"token": "token", "sequence": "sequence"}
MODES = {"truncate": "truncate", "clamp": "truncate", "mask": "mask"}


def policy_loss(x: Tensors, *, per: str = "token", **settings: Any) -> Tensor:
    return _grpo(x, advantages(x, per), **settings)[0]


def clip_fraction(x: Tensors, **settings: Any) -> Tensor:
    return torch.tensor(_grpo(x, x["advantages_BT"], **settings)[1]["clip_ratio/region_mean"])


def policy_loss_of_sums(x: Tensors, *, clip_low: float, clip_high: float, clip_c: None) -> Tensor:
    trainer = _trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x["logprobs_BT"], torch.zeros_like(x["mask_BT"]), None),
        epsilon_low=clip_low,
        epsilon_high=clip_high,
    )
    old_B = (x["old_logprobs_BT"] * x["mask_BT"]).sum(-1)
    return _compute_loss(RLOOTrainer, trainer, _batch(x) | {"old_logps": old_B, "advantages": x["advantages_B"]})


def policy_loss_with_kl(x: Tensors, *, kl_kind: str, bias_correction: bool = False, **settings: Any) -> Tensor:
    assert kl_kind == "k3", "TRL has no other estimator in the loss"
    return _grpo(x, x["advantages_BT"], beta=KL_COEF, bias_correction=bias_correction, **settings)[0]


def corrected_policy_loss(x: Tensors, *, correction: dict[str, Any], **settings: Any) -> Tensor:
    return _grpo(x, x["advantages_BT"], ratio=_importance_ratio(x, **correction), **settings)[0]


def rollout_weights(x: Tensors, **settings: Any) -> Tensor:
    return _importance_ratio(x, **settings) * x["mask_BT"]


def group_advantage(x: Tensors, *, groups: str, scale_by_std: bool, eps: float) -> Tensor:
    assert groups == "group_B" and eps == 1e-4, "TRL requires consecutive groups of equal size, and adds 1e-4"
    trainer = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1),
        scale_rewards="group" if scale_by_std else "none",
    )
    return _advantages(GRPOTrainer, grpo_trainer, x, trainer, first="if self.multi_objective_aggregation", count=2)


def leave_one_out_advantage(x: Tensors, *, groups: str) -> Tensor:
    assert groups == "group_B", "TRL requires consecutive groups of equal size"
    return _advantages(
        RLOOTrainer, rloo_trainer, x, SimpleNamespace(normalize_advantages=False), first="grouped_rewards =", count=8
    )


def dpo_loss(x: Tensors, *, beta: float, kind: str, label_smoothing: float = 0.0, by_length: bool = False) -> Tensor:
    """The log-prob of a reply is assigned to its first token; the mask has the lengths."""
    length_B = torch.cat([x["chosen_length_P"], x["rejected_length_P"]])
    mask_BT = (torch.arange(1 + int(length_B.max())) <= length_B[:, None]).long()
    mask_BT[:, 0] = 0  # the prompt
    logps_B = torch.cat([x["chosen_P"], x["rejected_P"]])
    trainer = _trainer(
        precompute_ref_logps=True,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        beta=beta,
        label_smoothing=label_smoothing,
        loss_types=[kind],
        loss_weights=[1.0],
    )
    inputs = {
        "input_ids": torch.ones_like(mask_BT),
        "attention_mask": torch.ones_like(mask_BT),
        "completion_mask": mask_BT,
        "ref_chosen_logps": x["ref_chosen_P"],
        "ref_rejected_logps": x["ref_rejected_P"],
    }
    loss = _compute_loss(DPOTrainer, trainer, inputs, _model(logps_B, mask_BT), return_outputs=False)
    rewards = [trainer._metrics["train"][name][0] for name in ("rewards/chosen", "rewards/rejected")]
    return torch.cat([loss[None], torch.tensor(rewards, dtype=loss.dtype)])


def bradley_terry_loss(x: Tensors) -> Tensor:
    """Execute the statement of `RewardTrainer.compute_loss` for batches without margins."""
    names: dict[str, Any] = {"nn": torch.nn, "rewards_chosen": x["chosen_P"], "rewards_rejected": x["rejected_P"]}
    source = inspect.getsource(RewardTrainer.compute_loss)
    exec(
        compile_statements(source, "loss = -nn.functional.logsigmoid(rewards_chosen - rewards_rejected).mean()"), names
    )
    return names["loss"]


def kto_loss(
    x: Tensors,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
    kind: str,
    only: str = "",
    kl_below_zero: bool = False,
) -> Tensor:
    other_B, ref_other_B = x["mismatched_B"], x["ref_mismatched_B"]
    if kl_below_zero:
        other_B, ref_other_B = ref_other_B, other_B
    mask_BT = torch.tensor([[0, 1]] * len(x["logps_B"]))  # a prompt and a completion, one token each
    trainer = _trainer(
        precompute_ref_logps=True,
        calculate_KL=kind == "kto",
        loss_type=kind,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        _compute_kl_logps=lambda *_: other_B,
    )
    inputs = {
        "input_ids": torch.ones_like(mask_BT),
        "attention_mask": torch.ones_like(mask_BT),
        "completion_mask": mask_BT,
        "label": desirable(x, only),
        "ref_logps": x["ref_logps_B"],
        "ref_KL_logps": ref_other_B,
    }
    return _compute_loss(KTOTrainer, trainer, inputs, _model(x["logps_B"], mask_BT), return_outputs=False)


def overlong_penalty(x: Tensors, *, longest: int, buffer: int) -> Tensor:
    penalty_function = get_soft_overlong_punishment(longest, buffer)
    return torch.tensor(penalty_function([[1] * length for length in LENGTHS]), dtype=torch.float64)


def _trainer(**attributes: Any) -> Any:
    """Return the attributes of a trainer that `_compute_loss` reads, for one process, with only the loss enabled."""
    reductions = {"gather": lambda t: t, "gather_for_metrics": lambda t: t, "reduce": lambda t, reduction: t}
    return SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1, device=torch.device("cpu"), sync_gradients=True, **reductions),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )


def _compute_loss(
    trainer_class: Any, trainer: Any, inputs: dict[str, Any], model: Any = None, **options: Any
) -> Tensor:
    return trainer_class._compute_loss(trainer, model, inputs, **options)


def _model(logps_B: Tensor, mask_BT: Tensor) -> Any:
    """Return a model whose completions have these log-probs, assigned to the first token of each completion."""
    log_probs_BT = torch.nn.functional.pad(logps_B[:, None], (0, mask_BT.shape[1] - 2))
    zeros_BT = torch.zeros_like(log_probs_BT)
    outputs = SimpleNamespace(log_probs=log_probs_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=zeros_BT.bool())
    return lambda **_: outputs


def _batch(x: Tensors) -> dict[str, Any]:
    prompt_B1 = torch.ones(len(x["mask_BT"]), 1, dtype=torch.long)
    return {
        "prompt_ids": prompt_B1,
        "prompt_mask": prompt_B1,
        "completion_ids": torch.ones_like(x["mask_BT"], dtype=torch.long),
        "completion_mask": x["mask_BT"].long(),
    }


def _grpo(
    x: Tensors,
    advantages_BT: Tensor,
    *,
    kind: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    aggregation: str = "token-mean",
    denominator: float | None = None,
    horizon: int | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    beta: float = 0.0,
    bias_correction: bool = False,
    ratio: Tensor | None = None,
) -> tuple[Tensor, dict[str, list[float]]]:
    loss_type = LOSS_TYPES[aggregation] if denominator is None else "dapo"
    tokens = float(x["mask_BT"].sum()) if denominator is None else denominator
    trainer = _trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x["logprobs_BT"], torch.zeros_like(x["mask_BT"]), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if kind == "gspo" else "token",
        loss_type=kind if kind in ("cispo", "sapo") else loss_type,
        epsilon_low=clip_low,
        epsilon_high=1 + clip_high if kind == "cispo" else clip_high,  # for CISPO TRL's setting is the cap itself
        beta=beta,
        max_completion_length=horizon,
        current_gradient_accumulation_steps=1,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(
            delta=clip_c,
            use_bias_correction_kl=bias_correction,
            sapo_temperature_pos=tau_pos,
            sapo_temperature_neg=tau_neg,
            steps_per_generation=1,
        ),
    )
    inputs = _batch(x) | {
        "advantages": advantages_BT,
        "old_per_token_logps": x["old_logprobs_BT"],
        "ref_per_token_logps": x["ref_logprobs_BT"],
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": torch.tensor(tokens),
    }
    return _compute_loss(GRPOTrainer, trainer, inputs), trainer._metrics["train"]


def _importance_ratio(x: Tensors, *, level: str, mode: str, low: float = 0.0, high: float = 2.0) -> Tensor:
    """Return TRL's importance ratio, [B, T] or [B, 1]."""
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=f"{LEVELS[level]}_{MODES[mode]}",
        vllm_importance_sampling_clip_min=low if mode != "truncate" else None,
        vllm_importance_sampling_clip_max=high,
    )
    namespace: dict[str, Any] = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "tool_mask": None,
        "completion_mask": x["mask_BT"],
        "old_per_token_logps": x["old_logprobs_BT"],
        "sampling_per_token_logps": x["rollout_logprobs_BT"],
    }
    first = "if self.use_vllm and self.vllm_importance_sampling_correction:\n    mask ="
    exec(compile_statements(inspect.getsource(GRPOTrainer._generate_and_score_completions), first), namespace)
    return namespace["vllm_importance_sampling_ratio"]


def _advantages(trainer_class: Any, module: Any, x: Tensors, trainer: Any, *, first: str, count: int) -> Tensor:
    rewards_B = x["rewards_B"]
    namespace = vars(module) | {
        "self": trainer,
        "device": torch.device("cpu"),
        "rewards_per_func": rewards_B[:, None],
        "unscorable_mask": torch.zeros_like(rewards_B, dtype=torch.bool),
        "rewards": rewards_B,
        "num_generations": int((x["group_B"] == x["group_B"][0]).sum()),
    }
    exec(compile_statements(inspect.getsource(trainer_class._generate_and_score_completions), first, count), namespace)
    return namespace["advantages"]
