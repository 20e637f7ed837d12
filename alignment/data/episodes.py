"""Episodes in a batch: one attempt of an agent at a task counts once, however many turns it took.

Averaged over turns, long episodes would decide what is learned, and what rewards are compared with; long episodes are
often those that went wrong. The loss is therefore the mean over episodes of the mean over their turns.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from alignment.types import Sample


def share_within_episodes(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the weight of each divided by the number of samples of its episode.

    A sample without an episode keeps its weight: a reply to a chat counts as an episode of one turn.
    """
    counts = Counter(sample.episode for sample in samples)
    return [
        sample if sample.episode is None else replace(sample, weight=sample.weight / counts[sample.episode])
        for sample in samples
    ]


def count_episodes(samples: Sequence[Sample]) -> int:
    """Return the number of independent attempts: of episodes, and of replies without one."""
    return len({sample.episode or sample.turn_id for sample in samples})
