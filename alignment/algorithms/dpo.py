"""DPO (Rafailov et al., 2023): no reward model and no credit; of two replies to one prompt the preferred one.

Pairs are all samples of a group whose rewards differ, so a comparison is a group of two and a ranking one of many.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import MicroBatch, RLAlgorithm
from alignment.algorithms.groups import groups
from alignment.config.algorithm import DPOConfig, UpdateConfig
from alignment.errors import NothingToCompare
from alignment.functional import aggregate, dpo_loss, kl_estimate
from alignment.types import Sample

Pair = tuple[int, int]  # the preferred one first


class DPO(RLAlgorithm):
    Config: ClassVar[type[UpdateConfig]] = DPOConfig
    needs_parent = False

    def select(self, samples: Sequence[Sample]) -> list[int]:
        found = self.pairs(samples)
        if not found:
            raise NothingToCompare(f"No two replies to one prompt differ in reward, in this batch of {len(samples)}.")
        return sorted({index for pair in found for index in pair})

    def together(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        return list(self.pairs(samples))

    def pairs(self, samples: Sequence[Sample]) -> list[Pair]:
        """Indices of (preferred, other)."""
        pairs = [pair for group in groups(samples) for pair in combinations(group, 2)]
        ordered = [(a, b) if samples[a].reward > samples[b].reward else (b, a) for a, b in pairs]
        return [(a, b) for a, b in ordered if samples[a].reward > samples[b].reward]

    def compute_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        here = {row: place for place, row in enumerate(data.rows)}
        in_minibatch = set(data.minibatch)
        all_pairs = [pair for pair in self.pairs(data.whole.samples) if pair[0] in in_minibatch]
        pairs = [pair for pair in all_pairs if pair[0] in here]
        mask_BT = data.mask_BT
        logps_B = (data.logprobs_BT * mask_BT).sum(-1)
        ref_B = (data.cut(data.whole.reference_BT) * mask_BT).sum(-1)
        length_B = mask_BT.sum(-1)
        chosen = torch.tensor([here[pair[0]] for pair in pairs], dtype=torch.long, device=mask_BT.device)
        rejected = torch.tensor([here[pair[1]] for pair in pairs], dtype=torch.long, device=mask_BT.device)
        result = dpo_loss(
            logps_B[chosen],
            logps_B[rejected],
            ref_B[chosen],
            ref_B[rejected],
            beta=self.config.beta,
            kind=self.config.kind,
            label_smoothing=self.config.label_smoothing,
            chosen_length_P=length_B[chosen],
            rejected_length_P=length_B[rejected],
        )
        count = max(1, len(all_pairs))
        margins_P = result.chosen_rewards_P - result.rejected_rewards_P
        return {
            "loss": result.loss_P.sum() / count,
            "actor/pg_loss": result.loss_P.detach().sum() / count,
            "rewards/chosen": result.chosen_rewards_P.sum() / count,
            "rewards/rejected": result.rejected_rewards_P.sum() / count,
            "rewards/margins": margins_P.sum() / count,
            "rewards/accuracies": (margins_P > 0).to(margins_P).sum() / count,
        } | reference_metrics(data)


def reference_metrics(data: MicroBatch) -> dict[str, Tensor]:
    """How far the policy is from the base model, estimated on these samples (k3), a token."""
    kl_BT = kl_estimate(data.logprobs_BT.detach(), data.cut(data.whole.reference_BT), "k3")
    return {"reference_kl": aggregate(kl_BT, data.mask_BT, "token-mean", denominator=data.num_tokens)}
