"""The parts of a batch that are learned from with different losses in the same optimizer steps.

A policy gradient corrects for samples of other versions with importance weights. Where the version that generated a
reply is too far from the policy that is trained, these weights are truncated for most tokens and the gradient says
little. Such samples are *late*: KTO learns from them, whose loss needs no samples of the current policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from alignment.algorithms import RLAlgorithm
from alignment.algorithms.dpo_and_kto import KTO
from alignment.config.algorithm import KTOConfig
from alignment.config.trainer import LateConfig, Packing
from alignment.data.collate import split_minibatches
from alignment.data.micro_batches import ScoredSequence, make_micro_batches
from alignment.functional import kl_estimate
from alignment.models import parallel
from alignment.tolerance import sign
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


def late_samples(data: TrainData, config: LateConfig) -> list[int]:
    """Return the indices of the samples whose version is further than `max_kl` from the policy before the update.

    The distance is the k3 estimate of KL(version that generated the reply ‖ policy before the update) per token, over
    all replies to the same prompt, which are learned from together. A sample of the policy itself is never late, nor is
    one with a reward of 0, from which KTO learns nothing.
    """
    assert data.old_logprobs_BT is not None
    kl_BT = kl_estimate(data.rollout_logprobs_BT, data.old_logprobs_BT, "k3") * data.response_mask_BT
    num_groups = int(data.group_B.max()) + 1
    kl_G, length_G = (
        torch.zeros(num_groups, device=kl_BT.device).index_add(0, data.group_B, values_B)
        for values_B in (kl_BT.sum(-1), data.length_B)
    )
    kl_B = (kl_G / length_G)[data.group_B]
    return [
        index
        for index, (sample, kl) in enumerate(zip(data.samples, kl_B.tolist(), strict=True))
        if sample.lag > 0 and sign(sample.reward) and not kl <= config.max_kl
    ]


def split_late(part: LossPart, late: Sequence[int], config: LateConfig) -> list[LossPart]:
    """Return what is left of the part, if anything, and its late samples with KTO. `late` are their indices.

    KTO's gradient on a reply's log-prob is at most beta / 4, that of a policy gradient with a whitened advantage about
    1 / length. The weight makes them equal, times the share of the late samples, which is bounded by `config.share`.
    """
    is_late = set(late)
    rest = [index for index in range(len(part.samples)) if index not in is_late]
    share = min(len(late) / len(part.samples), config.share) if rest else 1.0
    settings = part.algorithm.config
    kto = KTO(KTOConfig(beta=config.beta, epochs=settings.epochs, minibatches=settings.minibatches))
    mean_length = float(part.data.length_B[late].mean())
    weight = share * 4.0 / (config.beta * mean_length)
    late_part = part.take(late, kto, weight, prefix="late/" if rest else "")
    return [part.take(rest, part.algorithm, 1.0 - share), late_part] if rest else [late_part]
