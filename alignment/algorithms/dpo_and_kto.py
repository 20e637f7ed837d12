"""Preference learning: DPO and online DPO on pairs of replies to one prompt, KTO on single replies.

DPO (Rafailov et al., 2023) takes every pair of a group whose rewards differ: a comparison is a group of two, a ranking
a larger group. Online DPO (Guo et al., 2024) takes one pair of each group that the policy itself sampled: its best and
its worst reply.

KTO (Ethayarajh et al., 2024) learns from binary feedback. It compares the log-ratio of each reply to the base model
with the mean log-ratio of the policy. This reference point z₀ is the batch mean of log π(reply) − log base(reply)
before the update, clamped to at least 0. The policy sampled the replies, so it is its current KL to the base model.
(The paper estimates it on mismatched pairs of prompts and replies, because other models or people wrote its replies.)
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from alignment.algorithms.base import RLAlgorithm
from alignment.algorithms.group_relative import group_indices
from alignment.config.algorithm import DPOConfig, KTOConfig, OnlineDPOConfig
from alignment.errors import NothingToCompare
from alignment.functional import aggregate, dpo_loss, kl_estimate, kto_loss
from alignment.types import MicroBatch, Sample, TrainData, check_variance

Pair = tuple[int, int]  # sample indices: (preferred, other)


class DPO(RLAlgorithm):
    Config = DPOConfig
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
        rows_P2 = torch.tensor([(position[a], position[b]) for a, b in pairs], dtype=torch.long, device=mask_BT.device)
        chosen, rejected = rows_P2.view(-1, 2).unbind(-1)
        result = dpo_loss(
            logps_B[chosen],
            logps_B[rejected],
            ref_logps_B[chosen],
            ref_logps_B[rejected],
            **self.config.model_dump(include={"beta", "kind", "label_smoothing"}),
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
    Config = OnlineDPOConfig

    def pairs(self, samples: Sequence[Sample]) -> list[Pair]:
        """Return one pair per group: its best and its worst reply, the first ones in case of ties."""
        pairs_by_group: dict[str | None, list[Pair]] = defaultdict(list)
        for pair in super().pairs(samples):
            pairs_by_group[samples[pair[0]].group].append(pair)
        return [
            max(pairs, key=lambda pair: samples[pair[0]].reward - samples[pair[1]].reward)
            for pairs in pairs_by_group.values()
        ]


class KTO(RLAlgorithm):
    Config = KTOConfig

    def __init__(self, config: KTOConfig) -> None:
        self.config = config
        self._kl = 0.0
        self._weights = (1.0, 1.0)

    def select(self, samples: Sequence[Sample]) -> list[int]:
        """Select the replies whose reward is not 0: a reward of 0 is neither positive nor negative."""
        labelled = [index for index, sample in enumerate(samples) if sample.reward]
        check_variance([samples[index].reward for index in labelled])
        return labelled

    def before_train_step(self, step: int, data: TrainData) -> None:
        assert data.old_logprobs_BT is not None and data.ref_logprobs_BT is not None
        log_ratio_B = ((data.old_logprobs_BT - data.ref_logprobs_BT) * data.mask_BT).sum(-1)
        self._kl = max(0.0, float(log_ratio_B.mean()))
        num_desirable = int((data.rewards_B > 0).sum())
        num_undesirable = len(data.samples) - num_desirable
        # By default both classes have the same total weight, whatever their counts.
        balance = (num_desirable + num_undesirable) / 2
        self._weights = (
            self.config.desirable_weight or balance / max(1, num_desirable),
            self.config.undesirable_weight or balance / max(1, num_undesirable),
        )

    def compute_loss(self, data: MicroBatch) -> dict[str, Tensor]:
        mask_BT = data.mask_BT
        result = kto_loss(
            (data.logprobs_BT * mask_BT).sum(-1),
            (data.rows(data.batch.ref_logprobs_BT) * mask_BT).sum(-1),
            data.rows(data.batch.rewards_B) > 0,
            kl=self._kl,
            beta=self.config.beta,
            desirable_weight=self._weights[0],
            undesirable_weight=self._weights[1],
            kind=self.config.kind,
        )
        loss = result.loss_B.sum() / data.num_sequences
        return {"loss": loss, "actor/pg_loss": loss.detach()} | reference_metrics(data)

    def get_metrics(self) -> dict[str, float]:
        return {"kl": self._kl, "kto/desirable_weight": self._weights[0], "kto/undesirable_weight": self._weights[1]}


def reference_metrics(data: MicroBatch) -> dict[str, Tensor]:
    """Return the mean KL to the base model per token, estimated (k3) on these samples."""
    kl_BT = kl_estimate(data.logprobs_BT.detach(), data.rows(data.batch.ref_logprobs_BT), "k3")
    return {"reference_kl": aggregate(kl_BT, data.mask_BT, "token-mean", denominator=data.num_tokens)}
