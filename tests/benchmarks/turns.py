"""Several ways to do the same, timed in turns."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

Way = Callable[[], float]  # does it, and returns the loss that it came to
NEAR = 1e-5


@dataclass(frozen=True)
class Timed:
    seconds: dict[str, list[float]]

    @classmethod
    def of(cls, ways: Mapping[str, Way], rounds: int) -> "Timed":
        """Each once to warm up, in which all must come to the same loss; then all, round by round."""
        losses = {name: way() for name, way in ways.items()}
        if max(losses.values()) - min(losses.values()) > NEAR:
            raise AssertionError(f"not the same loss: {losses}")
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in list(ways) if number % 2 else reversed(ways):
                began = time.perf_counter()
                ways[name]()
                seconds[name].append(time.perf_counter() - began)
        return cls(seconds)

    def rate(self, name: str, tokens: int) -> float:
        return tokens / median(self.seconds[name])

    def times_as_fast(self, name: str, other: str) -> float:
        """Round by round, so that whatever else the machine did weighs on both."""
        pairs = zip(self.seconds[other], self.seconds[name], strict=True)
        return median(slow / fast for slow, fast in pairs)
