"""Time several implementations of the same computation, alternating between them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

Implementation = Callable[[], float]  # runs the computation and returns its loss
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Timings:
    seconds: dict[str, list[float]]

    @classmethod
    def measure(cls, implementations: Mapping[str, Implementation], rounds: int) -> "Timings":
        """Run each implementation once to warm up, then all of them in every round.

        Raises AssertionError if the losses differ.
        """
        losses = {name: implementation() for name, implementation in implementations.items()}
        if max(losses.values()) - min(losses.values()) > TOLERANCE:
            raise AssertionError(f"the implementations have different losses: {losses}")
        seconds: dict[str, list[float]] = {name: [] for name in implementations}
        for number in range(rounds):
            for name in list(implementations)[:: 1 if number % 2 else -1]:
                start = time.perf_counter()
                implementations[name]()
                seconds[name].append(time.perf_counter() - start)
        return cls(seconds)

    def rate(self, name: str, tokens: int) -> float:
        return tokens / median(self.seconds[name])

    def speedup(self, name: str, other: str) -> float:
        """Return the median speedup over the rounds. Both ran in every round, so other load affects both."""
        pairs = zip(self.seconds[other], self.seconds[name], strict=True)
        return median(slow / fast for slow, fast in pairs)
