"""The parts of a batch that are learned from with different losses in the same optimizer steps.

A policy gradient corrects for samples of other versions with importance weights. Where the version that generated a
reply is too far from the policy that is trained, these weights are truncated for most tokens and the gradient says
little. Such samples are *late*: KTO learns from them, whose loss needs no samples of the current policy.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from alignment.algorithms import RLAlgorithm
from alignment.algorithms.dpo_and_kto import KTO
from alignment.config.algorithm import KTOConfig
from alignment.config.trainer import LateConfig, Packing
from alignment.data.collate import split_minibatches
from alignment.data.micro_batches import ScoredSequence, make_micro_batches
from alignment.errors import NothingToCompare, NoVariance
from alignment.functional import kl_estimate
from alignment.models import parallel
from alignment.tolerance import is_tie, sign
from alignment.types import Sample, TrainData

Step = tuple[list[int], list[list[int]]]  # a minibatch, and the micro-batches that it is computed in


@dataclass
class LossPart:
    """Samples that share an algorithm. `weight` multiplies its loss; `prefix` goes before the names of its metrics.

    `coupled` are the algorithm's sets of samples that share a micro-batch. `epochs` holds, for each pass over the
    samples, one minibatch for each optimizer step.
    """

    algorithm: RLAlgorithm
    samples: Sequence[Sample]
    sequences: Sequence[ScoredSequence]
    data: TrainData
    weight: float = 1.0
    prefix: str = ""
    coupled: Sequence[tuple[int, ...]] = ()
    epochs: list[list[Step]] = field(default_factory=list)

    def plan(self, epochs: int, minibatches: int, max_tokens: int, packing: Packing, seed: int) -> None:
        """Split the samples into minibatches and micro-batches, equally on every rank."""
        generator = torch.Generator().manual_seed(seed)
        self.coupled = self.algorithm.coupled_samples(self.samples)
        self.epochs = [
            [
                (minibatch, self._plan_micro_batches(minibatch, max_tokens, packing))
                for minibatch in split_minibatches(self.samples, self.coupled, minibatches, generator)
            ]
            for _ in range(epochs)
        ]

    @property
    def first_epoch(self) -> list[list[int]]:
        """Return the micro-batches of the first pass."""
        return list(chain.from_iterable(micro_batches for _, micro_batches in self.epochs[0]))

    def take(self, indices: Sequence[int], algorithm: RLAlgorithm, weight: float, prefix: str = "") -> "LossPart":
        """Return a part with these samples, not planned yet."""
        samples, sequences = [self.samples[index] for index in indices], [self.sequences[index] for index in indices]
        return LossPart(algorithm, samples, sequences, self.data.take(indices), weight, prefix)

    def coupled_rows(self, rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the coupled sets among these samples, as positions in `rows`."""
        position = {index: row for row, index in enumerate(rows)}
        return tuple(tuple(position[i] for i in indices) for indices in self.coupled if indices[0] in position)

    def _plan_micro_batches(self, minibatch: list[int], max_tokens: int, packing: Packing) -> list[list[int]]:
        """Return lists of sample indices, as `make_micro_batches` does for positions in the minibatch."""
        micro_batches = make_micro_batches(
            [self.sequences[index] for index in minibatch],
            max_tokens,
            parallel.num_ranks(),
            coupled=self.coupled_rows(minibatch),
            packing=packing,
        )
        return [[minibatch[number] for number in micro_batch] for micro_batch in micro_batches]


def late_samples(part: LossPart, config: LateConfig) -> list[int]:
    """Return the indices of the samples whose version is further than `max_kl` from the policy before the update.

    The distance is the k3 estimate of KL(version that generated the reply ‖ policy before the update) per token, over
    all replies to the same prompt. A sample of the policy itself is never late, nor is one that says nothing to KTO,
    whose `label` is 0. An algorithm that compares replies to one prompt learns from whole groups or not at all, so that
    such a group is late as a whole: if its replies differ in reward, and none of them is the policy's own.
    """
    data, samples = part.data, part.samples
    assert data.old_logprobs_BT is not None
    kl_BT = kl_estimate(data.rollout_logprobs_BT, data.old_logprobs_BT, "k3") * data.response_mask_BT
    num_groups = int(data.group_B.max()) + 1
    kl_G, length_G = (
        torch.zeros(num_groups, device=kl_BT.device).index_add(0, data.group_B, values_B)
        for values_B in (kl_BT.sum(-1), data.length_B)
    )
    kl_B, labels_B = (kl_G / length_G)[data.group_B].tolist(), late_labels(part)
    is_far_B = [sample.lag > 0 and not kl <= config.max_kl for sample, kl in zip(samples, kl_B, strict=True)]
    if not part.algorithm.config.needs_groups:
        return [index for index, is_far in enumerate(is_far_B) if is_far and labels_B[index]]
    members: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(data.group_B.tolist()):
        members[group].append(index)
    late = [
        group
        for group in members.values()
        if all(is_far_B[index] for index in group) and any(labels_B[index] for index in group)
    ]
    return sorted(index for group in late for index in group)


def late_labels(part: LossPart) -> list[int]:
    """Return what KTO learns from each sample if it is late: 1 for a liked reply, -1 for a disliked one, else 0.

    It is the sign of the reward or, where the algorithm compares replies to one prompt, that of its difference from
    their mean.
    """
    return [sign(value) for value in _late_rewards(part).tolist()]


def _late_rewards(part: LossPart) -> Tensor:
    data = part.data
    if not part.algorithm.config.needs_groups:
        return data.rewards_B
    share_B = 1.0 / torch.bincount(data.attempt_B)[data.attempt_B]  # an episode counts once, as in the advantages
    sums_2B = torch.stack([share_B, share_B * data.rewards_B])
    weight_G, total_G = sums_2B.new_zeros(2, int(data.group_B.max()) + 1).index_add(1, data.group_B, sums_2B)
    return data.rewards_B - (total_G / weight_G)[data.group_B]


def has_contrast(algorithm: RLAlgorithm, samples: Sequence[Sample]) -> bool:
    """Return whether the algorithm has different rewards to compare: in one group, if it compares within groups."""
    try:
        selected = [samples[index] for index in algorithm.select(samples)]
    except (NoVariance, NothingToCompare):
        return False
    if not algorithm.config.needs_groups:
        return True
    groups: dict[str | None, list[float]] = defaultdict(list)
    for sample in selected:
        groups[sample.group].append(sample.reward)
    return not all(is_tie(rewards) for rewards in groups.values())


def split_late(part: LossPart, late: Sequence[int], config: LateConfig) -> tuple[list[LossPart], list[int]]:
    """Return the parts of a batch, and the indices of the samples that wait for a later update.

    `late` are the indices of the late samples. The parts are what is left, if anything, and the late samples with KTO.

    The rest waits if it has no contrast: it would move the policy towards, or away from, all of its replies alike. If
    the late samples have none either, KTO learns from all samples, which differ together. Late samples of one sign
    beside a rest with contrast do not wait: KTO compares each reply with the base model.

    KTO's gradient on a reply's log-prob is at most beta / 4, that of a policy gradient with a whitened advantage about
    1 / length. The weight makes them equal, times the share of the late samples, which is bounded by `config.share`.
    """
    is_late = set(late)
    rest = [index for index in range(len(part.samples)) if index not in is_late]
    waiting: list[int] = []
    if rest and not has_contrast(part.algorithm, [part.samples[index] for index in rest]):
        labels_B = late_labels(part)
        if {1, -1} <= {labels_B[index] for index in late}:
            waiting, rest = rest, []
        elif {1, -1} <= set(labels_B):
            late = [index for index, label in enumerate(labels_B) if label]
            waiting, rest = [index for index, label in enumerate(labels_B) if not label], []
        else:
            raise NoVariance("neither the late samples nor the others have different rewards to compare")
    share = min(len(late) / (len(late) + len(rest)), config.share) if rest else 1.0
    settings = part.algorithm.config
    kto = KTO(KTOConfig(beta=config.beta, epochs=settings.epochs, minibatches=settings.minibatches))
    mean_length = float(part.data.length_B[late].mean())
    weight = share * 4.0 / (config.beta * mean_length)
    late_part = part.take(late, kto, weight, prefix="late/" if rest else "")
    late_part.data.rewards_B = _late_rewards(part)[late]
    return ([part.take(rest, part.algorithm, 1.0 - share), late_part] if rest else [late_part]), waiting
