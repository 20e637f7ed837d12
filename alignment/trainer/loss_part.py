"""The parts of a batch that are learned from with different losses in the same optimizer steps.

One learns from rewards, with the policy's algorithm, and the other from corrected texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from alignment.algorithms import RLAlgorithm
from alignment.config.trainer import Packing
from alignment.data.collate import split_minibatches
from alignment.data.micro_batches import ScoredSequence, make_micro_batches
from alignment.models import parallel
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
