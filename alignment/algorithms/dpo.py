"""DPO (Rafailov et al., 2023) and online DPO (Guo et al., 2024): preference losses on pairs of replies to one prompt.

DPO takes every pair of a group whose rewards differ: a comparison is a group of two, a ranking a larger group. Online
DPO takes one pair of each group that the policy itself sampled: its best and its worst reply.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from alignment.algorithms.base import RLAlgorithm
from alignment.algorithms.group_relative import group_indices
from alignment.config.algorithm import DPOConfig, OnlineDPOConfig, UpdateConfig
from alignment.errors import NothingToCompare
from alignment.functional import aggregate, dpo_loss, kl_estimate
from alignment.types import MicroBatch, Sample

Pair = tuple[int, int]  # sample indices: (preferred, other)


class DPO(RLAlgorithm):
    Config: ClassVar[type[UpdateConfig]] = DPOConfig
    needs_old_logprobs = False

    def select(self, samples: Sequence[Sample]) -> list[int]:
        pairs = self.pairs(samples)
        if not pairs:
            raise NothingToCompare(
                f"No two replies to one prompt differ in reward, in this batch of {len(samples)} samples."
            )
        return sorted({index for pair in pairs for index in pair})

    def coupled_samples(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        return list(self.pairs(samples))

    def pairs(self, samples: Sequence[Sample]) -> list[Pair]:
        """Return the pairs to learn from."""
        candidates = [pair for group in group_indices(samples) for pair in combinations(group, 2)]
        ordered = [(a, b) if samples[a].reward > samples[b].reward else (b, a) for a, b in candidates]
        return [(a, b) for a, b in ordered if samples[a].reward > samples[b].reward]

    def compute_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        position = {index: row for row, index in enumerate(data.row_indices)}
        in_minibatch = set(data.minibatch_indices)
        all_pairs = [pair for pair in self.pairs(data.batch.samples) if pair[0] in in_minibatch]
        pairs = [pair for pair in all_pairs if pair[0] in position]
        mask_BT = data.mask_BT
        logps_B = (data.logprobs_BT * mask_BT).sum(-1)
        ref_logps_B = (data.rows(data.batch.ref_logprobs_BT) * mask_BT).sum(-1)
        length_B = mask_BT.sum(-1)
        chosen = torch.tensor([position[pair[0]] for pair in pairs], dtype=torch.long, device=mask_BT.device)
        rejected = torch.tensor([position[pair[1]] for pair in pairs], dtype=torch.long, device=mask_BT.device)
        result = dpo_loss(
            logps_B[chosen],
            logps_B[rejected],
            ref_logps_B[chosen],
            ref_logps_B[rejected],
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


class OnlineDPO(DPO):
    Config: ClassVar[type[UpdateConfig]] = OnlineDPOConfig

    def pairs(self, samples: Sequence[Sample]) -> list[Pair]:
        """Return one pair per group: its best and its worst reply, the first ones in case of ties."""
        pairs_by_group: dict[str | None, list[Pair]] = defaultdict(list)
        for pair in super().pairs(samples):
            pairs_by_group[samples[pair[0]].group].append(pair)
        return [
            max(pairs, key=lambda pair: samples[pair[0]].reward - samples[pair[1]].reward)
            for pairs in pairs_by_group.values()
        ]


def reference_metrics(data: MicroBatch) -> dict[str, Tensor]:
    """Return the mean KL to the base model per token, estimated (k3) on these samples."""
    kl_BT = kl_estimate(data.logprobs_BT.detach(), data.rows(data.batch.ref_logprobs_BT), "k3")
    return {"reference_kl": aggregate(kl_BT, data.mask_BT, "token-mean", denominator=data.num_tokens)}
