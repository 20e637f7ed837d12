"""Telemetry: what one API process counts while it answers. A dictionary and a number: a request pays microseconds."""

import math
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import accumulate

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
WINDOW = 1000  # replies


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        self.sum += seconds
        self._counts[bisect_left(BOUNDS, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """How many took at most so long. Example: [("0.005", 0), …, ("+Inf", 7)]"""
        return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(self._counts), strict=True))


class Lengths:
    """The last thousand finished replies of one policy, against the range that is set."""

    def __init__(self) -> None:
        self.out_of_range = 0  # of all, not of the last thousand
        self._last: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def add(self, length: int, penalty: float) -> None:
        self.out_of_range += penalty < 0
        self._last.append((length, penalty))

    @property
    def mean_penalty(self) -> float:
        """From 0, all in range, to 1."""
        return abs(sum(penalty for _, penalty in self._last)) / len(self._last)

    @property
    def p95(self) -> int:
        """In tokens: the shortest length that 95 % of the replies do not exceed."""
        lengths = sorted(length for length, _ in self._last)
        return lengths[math.ceil(0.95 * len(lengths)) - 1]


@dataclass
class Telemetry:
    """Touched on the event loop alone. Keys are ids; names are looked up when somebody asks."""

    turns: Counter[tuple[str, str]] = field(default_factory=Counter)  # by policy and state
    feedback: Counter[tuple[str, str]] = field(default_factory=Counter)  # by project and kind
    requests: dict[tuple[str, str], Durations] = field(default_factory=dict)  # by route and status
    lengths: dict[str, Lengths] = field(default_factory=dict)  # by policy

    def ended(self, policy_id: str, state: str, length: int | None, penalty: float | None) -> None:
        """A turn is closed. `penalty` is None when no range is set, or the reply was not finished."""
        self.turns[policy_id, str(state)] += 1
        if length is not None and penalty is not None:
            if policy_id not in self.lengths:
                self.lengths[policy_id] = Lengths()
            self.lengths[policy_id].add(length, penalty)

    def heard(self, project_id: str, kind: str) -> None:
        """Feedback that was not there before is on record."""
        self.feedback[project_id, kind] += 1

    def answered(self, route: str, status: str, seconds: float) -> None:
        if (route, status) not in self.requests:
            self.requests[route, status] = Durations()
        self.requests[route, status].observe(seconds)
