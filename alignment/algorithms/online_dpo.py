"""Online DPO (Guo et al., 2024): the policy draws a group of replies; the best of them is preferred to the worst."""

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from alignment.algorithms.dpo import DPO, Pair
from alignment.config.algorithm import OnlineDPOConfig, UpdateConfig
from alignment.types import Sample


class OnlineDPO(DPO):
    Config: ClassVar[type[UpdateConfig]] = OnlineDPOConfig

    def pairs(self, samples: Sequence[Sample]) -> list[Pair]:
        """One pair a group: its best and its worst, the first of each where several are as good."""
        widest: dict[int, Pair] = {}
        groups: dict[str | None, list[Pair]] = defaultdict(list)
        for pair in super().pairs(samples):
            groups[samples[pair[0]].group].append(pair)
        for number, pairs in enumerate(groups.values()):
            widest[number] = max(pairs, key=lambda pair: samples[pair[0]].reward - samples[pair[1]].reward)
        return list(widest.values())
