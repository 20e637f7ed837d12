"""Random batches: the inputs of all formulas, by name, in one dictionary.

Shapes: B sequences, T tokens, P = B pairs. Masked positions hold ordinary numbers, so a formula that ignores its mask
gives a different result.
"""

from typing import Literal

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Kind = Literal["plain", "holes", "empty", "wild"]

# plain: right-padded sequences of one token or more. holes: also masked inside (observations of tools).
# empty: also sequences without tokens. wild: log-probs up to 30 apart, beyond every clamp.
KINDS: tuple[Kind, ...] = ("plain", "holes", "empty", "wild")
SHAPES = ((4, 6), (12, 33), (6, 1))
GROUPS = {4: ((2, 2), (2, 2)), 6: ((3, 3), (2, 4)), 12: ((4, 4, 4), (2, 3, 7))}  # B: equal groups, unequal groups


def draw(kind: Kind, shape: tuple[int, int], generator: torch.Generator) -> Tensors:
    """Return a batch, float64. The integer tensors are groups, lags and lengths."""
    B, T = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    def perturb(logprobs: Tensor) -> Tensor:
        """Return log-probs of a similar policy: mostly close, sometimes far enough for every clip."""
        step = torch.where(uniform(*logprobs.shape) < 0.25, 1.2, 0.15)
        changed = logprobs + (step * normal(*logprobs.shape)).clamp(-2.2, 2.2)
        return apply_wild(changed.clamp(max=-1e-4))

    def apply_wild(logprobs: Tensor) -> Tensor:
        """Return the log-probs, with nearly impossible tokens if the batch is wild."""
        if kind != "wild":
            return logprobs
        return torch.where(uniform(*logprobs.shape) < 0.25, logprobs - 8 - 22 * uniform(*logprobs.shape), logprobs)

    logprobs_BT = apply_wild(-0.02 - normal(B, T).abs() * 1.5)
    old_logprobs_BT = perturb(logprobs_BT)
    equal, unequal = GROUPS[B]
    order = torch.randperm(B, generator=generator)
    logps_B = -20 * uniform(B) - 1
    return {
        "mask_BT": _mask(kind, B, T, generator),
        "logprobs_BT": logprobs_BT,
        "old_logprobs_BT": old_logprobs_BT,
        "rollout_logprobs_BT": perturb(old_logprobs_BT),
        "ref_logprobs_BT": perturb(logprobs_BT),
        "advantages_BT": normal(B, T),
        "advantages_B": normal(B),
        "rewards_BT": 0.3 * normal(B, T),
        "values_BT": normal(B, T),
        "old_values_BT": normal(B, T),
        "returns_BT": normal(B, T),
        "rewards_B": (torch.randperm(60, generator=generator)[:B].double() - 30) / 10,  # at least 0.1 apart
        "group_B": torch.repeat_interleave(torch.arange(len(equal)), torch.tensor(equal)),
        "mixed_group_B": torch.repeat_interleave(3 * torch.arange(len(unequal)) + 7, torch.tensor(unequal))[order],
        "lag_B": torch.randint(0, 6, (B,), generator=generator),
        "chosen_P": -20 * uniform(B) - 1,
        "rejected_P": -20 * uniform(B) - 1,
        "ref_chosen_P": -20 * uniform(B) - 1,
        "ref_rejected_P": -20 * uniform(B) - 1,
        "chosen_length_P": torch.randint(1, 9, (B,), generator=generator),
        "rejected_length_P": torch.randint(1, 9, (B,), generator=generator),
        "logps_B": logps_B,
        "ref_logps_B": logps_B + 3 * normal(B),
        "mismatched_B": logps_B + 1.5,
        "ref_mismatched_B": logps_B + normal(B),
        "desirable_B": (torch.arange(B) % 3 != 1)[torch.randperm(B, generator=generator)],
    }


def cast(batch: Tensors, dtype: torch.dtype, leaves: tuple[str, ...] = ()) -> Tensors:
    """Return copies in another precision; those in `leaves` collect gradients."""
    converted = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor.clone() for name, tensor in batch.items()
    }
    return {name: tensor.clone().requires_grad_(name in leaves) for name, tensor in converted.items()}


def _mask(kind: Kind, B: int, T: int, generator: torch.Generator) -> Tensor:
    length_B = torch.randint(1, T + 1, (B,), generator=generator)
    mask_BT = (torch.arange(T)[None, :] < length_B[:, None]).double()
    if kind != "plain":
        first_BT = torch.arange(T)[None, :] == 0
        hole_BT = torch.rand(B, T, generator=generator, dtype=torch.float64) < 0.25
        mask_BT = mask_BT * (first_BT | ~hole_BT)
    if kind == "empty":
        mask_BT[torch.randperm(B, generator=generator)[: B // 3]] = 0.0
    mask_BT[torch.randint(B, (1,), generator=generator)] = 1.0  # whitening needs two tokens
    return mask_BT
