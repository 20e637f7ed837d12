"""Preference learning: DPO and online DPO on pairs of replies to one prompt, KTO on single replies.

DPO (Rafailov et al., 2023) takes every pair of a group whose rewards differ by more than a margin: a comparison is a
group of two, a ranking a larger group. Replies to different prompts, as most turns of a group of episodes, are no
pairs. Online DPO (Guo et al., 2024) takes one pair of each prompt that the policy itself sampled for: its best and its
worst reply.

KTO (Ethayarajh et al., 2024) learns from binary feedback. It compares the log-ratio of each reply to the base model
with the mean log-ratio of the policy. This reference point z₀ is the batch mean of log π(reply) − log base(reply)
before the update, clamped to at least 0. The policy sampled the replies, or the weights below make up for it, so it is
its current KL to the base model.
(The paper estimates it on mismatched pairs of prompts and replies, because other models or people wrote its replies.)
The size of a reward is a weight: a rating of 0.5 counts half as much as a thumb, and a score near 0 hardly anything.

So is the importance of a reply that another version sampled, π(reply) / version(reply), at most 1. The loss of a
disliked reply has a gradient however improbable the reply has become: without the weight, updates from old samples
push away what the policy does not say any more, and its other replies with it.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from alignment.algorithms.base import RLAlgorithm
from alignment.config.preference_algorithms import DPOConfig, KTOConfig, OnlineDPOConfig
from alignment.errors import ForeignSamples, NothingToCompare
from alignment.functional import dpo_loss, kl_estimate, kto_loss, rollout_correction
from alignment.tolerance import TOLERANCE, exceeds, sign
from alignment.types import LossOutput, MicroBatch, Sample, TrainData, check_variance

IMPORTANCE = "importance_B"  # in `TrainData.extra`: the weight of each reply that another version sampled
Pair = tuple[int, int]  # sample indices: (preferred, other)
Prompt = tuple[str | None, tuple[int, ...]]  # the group, and the tokens


class DPO(RLAlgorithm):
    Config = DPOConfig
    needs_old_logprobs = False

    def select(self, samples: Sequence[Sample]) -> list[int]:
        pairs = self.pairs(samples)
        if not pairs:
            raise NothingToCompare(
                f"No two replies to one prompt differ in reward by more than {self.config.min_margin:g}, in this batch "
                f"of {len(samples)} samples."
            )
        return sorted({index for pair in pairs for index in pair})

    def coupled_samples(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        return list(self.pairs(samples))

    def pairs(self, samples: Sequence[Sample]) -> list[Pair]:
        """Return the pairs to learn from."""
        groups: dict[Prompt, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            if sample.group is not None:
                groups[_prompt_of(sample)].append(index)
        candidates = [pair for group in groups.values() for pair in combinations(group, 2)]
        ordered = [(a, b) if samples[a].reward > samples[b].reward else (b, a) for a, b in candidates]
        margin = self.config.min_margin
        return [(a, b) for a, b in ordered if exceeds(samples[a].reward, samples[b].reward, margin)]

    def compute_loss(self, inputs: MicroBatch) -> LossOutput:
        mask_BT = inputs.response_mask_BT
        logps_B = (inputs.logprobs_BT * mask_BT).sum(-1)
        ref_logps_B = (inputs.ref_logprobs_BT * mask_BT).sum(-1)
        length_B = mask_BT.sum(-1)
        rows_P2 = torch.tensor(inputs.coupled_rows, dtype=torch.long, device=mask_BT.device)
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
        margins_P = result.chosen_rewards_P - result.rejected_rewards_P
        metrics = {
            "rewards/chosen": result.chosen_rewards_P,
            "rewards/rejected": result.rejected_rewards_P,
            "rewards/margins": margins_P,
            "rewards/accuracies": margins_P > 0,
        }
        return LossOutput(result.loss_P, metrics | reference_metrics(inputs), unit="coupled_set")


class OnlineDPO(DPO):
    Config = OnlineDPOConfig

    def pairs(self, samples: Sequence[Sample]) -> list[Pair]:
        """Return one pair per prompt: its best and its worst reply, the first ones in case of ties."""
        pairs_by_prompt: dict[Prompt, list[Pair]] = defaultdict(list)
        for pair in super().pairs(samples):
            pairs_by_prompt[_prompt_of(samples[pair[0]])].append(pair)
        return [
            max(pairs, key=lambda pair: samples[pair[0]].reward - samples[pair[1]].reward)
            for pairs in pairs_by_prompt.values()
        ]


class KTO(RLAlgorithm):
    Config = KTOConfig

    def __init__(self, config: KTOConfig) -> None:
        self.config = config
        self._kl = 0.0
        self._weights = (1.0, 1.0)  # of the two classes
        self._mismatch: dict[str, float] = {}

    def select(self, samples: Sequence[Sample]) -> list[int]:
        """Select the replies whose reward is not 0: a reward of 0 is neither positive nor negative."""
        labelled = [index for index, sample in enumerate(samples) if sign(sample.reward)]
        check_variance([samples[index].reward for index in labelled])
        return labelled

    def before_train_step(self, step: int, batch: TrainData) -> None:
        assert batch.old_logprobs_BT is not None and batch.ref_logprobs_BT is not None
        mask_BT = batch.response_mask_BT
        correction = rollout_correction(
            batch.old_logprobs_BT, batch.rollout_logprobs_BT, mask_BT, **self.config.correction.model_dump()
        )
        importance_B = correction.weights_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)
        if not importance_B.any():
            raise ForeignSamples("the rollout correction rejects every reply of the batch")
        batch.extra[IMPORTANCE], self._mismatch = importance_B, correction.metrics
        log_ratio_B = ((batch.old_logprobs_BT - batch.ref_logprobs_BT) * mask_BT).sum(-1)
        self._kl = max(0.0, float((importance_B * log_ratio_B).sum() / importance_B.sum()))
        sizes_B = batch.rewards_B if batch.weights_B is None else batch.rewards_B * batch.weights_B
        desirable, undesirable = (float(part_B.clamp(min=0).sum()) for part_B in (sizes_B, -sizes_B))
        # By default both classes have the same total weight, whatever their counts.
        balance = float((batch.rewards_B.abs() > TOLERANCE).sum()) / 2
        self._weights = (
            self.config.desirable_weight or balance / (desirable or balance),
            self.config.undesirable_weight or balance / (undesirable or balance),
        )

    def compute_loss(self, inputs: MicroBatch) -> LossOutput:
        mask_BT = inputs.response_mask_BT
        result = kto_loss(
            (inputs.logprobs_BT * mask_BT).sum(-1),
            (inputs.ref_logprobs_BT * mask_BT).sum(-1),
            inputs.rewards_B > 0,
            kl=self._kl,
            beta=self.config.beta,
            desirable_weight=self._weights[0],
            undesirable_weight=self._weights[1],
            kind=self.config.kind,
        )
        importance_B = inputs.rows(inputs.batch.extra[IMPORTANCE])
        return LossOutput(result.loss_B * inputs.rewards_B.abs() * importance_B, reference_metrics(inputs))

    def get_metrics(self) -> dict[str, float]:
        weights = {"kto/desirable_weight": self._weights[0], "kto/undesirable_weight": self._weights[1]}
        return {"kl": self._kl} | weights | self._mismatch


def _prompt_of(sample: Sample) -> Prompt:
    return sample.group, sample.prompt_ids


def reference_metrics(inputs: MicroBatch) -> dict[str, Tensor]:
    """Return the KL to the base model per token, estimated (k3) on these samples."""
    return {"reference_kl": kl_estimate(inputs.logprobs_BT.detach(), inputs.ref_logprobs_BT, "k3")}
