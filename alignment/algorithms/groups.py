"""Replies to one prompt, which algorithms without a critic compare with one another."""

from collections import defaultdict
from collections.abc import Sequence

from alignment.algorithms.policy_gradient import PolicyGradient
from alignment.errors import NothingToCompare
from alignment.types import Sample


def groups(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the samples of each group of two or more; who is alone is in none."""
    found: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if sample.group is not None:
            found[sample.group].append(index)
    return [group for group in found.values() if len(group) > 1]


class GroupGradient(PolicyGradient):
    """Learns from groups alone: a prompt that was answered once is left out, and counted as left out."""

    def select(self, samples: Sequence[Sample]) -> list[int]:
        kept = sorted(index for group in groups(samples) for index in group)
        if not kept:
            raise NothingToCompare(f"No prompt of this batch of {len(samples)} was answered twice.")
        return kept
