"""Telemetry of one API process: what it counts and measures while it serves requests. /metrics shows it."""

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import Gauge, Histogram

T = TypeVar("T", Gauge, Histogram)
WINDOW = 1000  # replies
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
EPISODES = "/v1/episodes/"
CHAT_ROUTES = ("/v1/chat/completions", "/v1/responses")
TIMED_ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/feedback": "feedback",
    "/v1/feedback/batch": "feedback_batch",
}


class LengthWindow:
    """The lengths of the last thousand finished replies of one policy, compared with the range of the settings."""

    def __init__(self) -> None:
        self.out_of_range = 0  # of all replies, not of the last thousand
        self._last: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def add(self, length: int, penalty: float) -> None:
        self.out_of_range += penalty < 0
        self._last.append((length, penalty))

    @property
    def mean_penalty(self) -> float:
        """From 0 (all in range) to 1."""
        return abs(sum(penalty for _, penalty in self._last)) / len(self._last)

    @property
    def p95(self) -> int:
        """In tokens: the shortest length that 95 % of the replies do not exceed."""
        lengths = sorted(length for length, _ in self._last)
        return lengths[math.ceil(0.95 * len(lengths)) - 1]


def _series_of_each_route(metric: T) -> T:
    """Return the metric with a series for each route, at 0."""
    for route in TIMED_ROUTES.values():
        metric.labels(route)
    return metric


@dataclass
class Telemetry:
    """Used on the event loop only. Keys are ids; their names are read when /metrics is."""

    turns: Counter[tuple[str, str]] = field(default_factory=Counter)  # by policy and state
    feedback: Counter[tuple[str, str]] = field(default_factory=Counter)  # by project and kind
    unmatched: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by project, connector and reason
    requests: Histogram = field(  # by route and status; in no global registry, as tests run several applications
        default_factory=lambda: Histogram(
            "attune_request_seconds",
            "From a request's head to its reply's last byte.",
            ("route", "status"),
            registry=None,
            buckets=BUCKETS,
        )
    )
    first_tokens: Histogram = field(
        default_factory=lambda: Histogram(
            "attune_ttft_seconds",
            "From a request's head to the first token of a streamed reply.",
            ("route",),
            registry=None,
            buckets=BUCKETS,
        )
    )
    in_flight: Gauge = field(
        default_factory=lambda: _series_of_each_route(
            Gauge("attune_inflight", "Requests whose reply has not ended.", ("route",), registry=None)
        )
    )
    lengths: defaultdict[str, LengthWindow] = field(default_factory=lambda: defaultdict(LengthWindow))  # by policy

    def record_turn(self, policy_id: str, state: str, length: int | None, penalty: float | None) -> None:
        """Count a turn that has ended. `penalty` is None when no range is set or the reply was not finished."""
        self.turns[policy_id, str(state)] += 1
        if length is not None and penalty is not None:
            self.lengths[policy_id].add(length, penalty)

    def record_feedback(self, project_id: str, kind: str) -> None:
        """Count feedback that was stored; a repeated request does not count."""
        self.feedback[project_id, kind] += 1

    def record_unmatched(self, project_id: str, connector: str, reason: str) -> None:
        """Count a vote of a connector that is about no reply of the project."""
        self.unmatched[project_id, connector, reason] += 1

    @staticmethod
    def timed_route(method: str, path: str) -> str | None:
        """Return the name of a chat or feedback route; None for others, which are not timed."""
        if method != "POST":
            return None
        if path.startswith(EPISODES):  # the chats of an episode are below its path
            path = f"/v1/{path.removeprefix(EPISODES).partition('/')[2]}"
            return TIMED_ROUTES[path] if path in CHAT_ROUTES else None
        return TIMED_ROUTES.get(path)

    def record_begin(self, route: str) -> None:
        self.in_flight.labels(route).inc()

    def record_first_token(self, route: str, seconds: float) -> None:
        """Record when the first event of a streamed reply was sent, which is never before the first token."""
        self.first_tokens.labels(route).observe(seconds)

    def record_request(self, route: str, status: int | None, seconds: float) -> None:
        """Record how long a request took that has begun. No `status`: no response was sent."""
        self.in_flight.labels(route).dec()
        status_class = "none" if status is None else f"{status // 100}xx"
        self.requests.labels(route, status_class).observe(seconds)
