"""Telemetry of one API process: what it counts and measures while it serves requests. /metrics shows it."""

import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from prometheus_client import Histogram
from starlette.types import ASGIApp, Receive, Scope, Send

WINDOW = 1000  # replies
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TIMED_ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/feedback": "feedback",
    "/v1/feedback/batch": "feedback_batch",
}


def _request_histogram() -> Histogram:
    """Return a histogram that belongs to no global registry, as tests run several applications in one process."""
    documentation = "From a request's head to its reply's last byte."
    return Histogram("attune_request_seconds", documentation, ("route", "status"), registry=None, buckets=BUCKETS)


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


@dataclass
class Telemetry:
    """Used on the event loop only. Keys are ids; their names are read when /metrics is."""

    turns: Counter[tuple[str, str]] = field(default_factory=Counter)  # by policy and state
    feedback: Counter[tuple[str, str]] = field(default_factory=Counter)  # by project and kind
    requests: Histogram = field(default_factory=_request_histogram)  # seconds, by route and status
    lengths: dict[str, LengthWindow] = field(default_factory=dict)  # by policy

    def record_turn(self, policy_id: str, state: str, length: int | None, penalty: float | None) -> None:
        """Count a turn that has ended. `penalty` is None when no range is set or the reply was not finished."""
        self.turns[policy_id, str(state)] += 1
        if length is not None and penalty is not None:
            if policy_id not in self.lengths:
                self.lengths[policy_id] = LengthWindow()
            self.lengths[policy_id].add(length, penalty)

    def record_feedback(self, project_id: str, kind: str) -> None:
        """Count feedback that was stored; a repeated request does not count."""
        self.feedback[project_id, kind] += 1

    def record_request(self, route: str, status: str, seconds: float) -> None:
        self.requests.labels(route, status).observe(seconds)


class RequestTimingMiddleware:
    """Measures chat and feedback requests from the head to the reply's last byte. It must be the outermost middleware.

    An inner middleware leaves the response's status at `state.status`; without it, no response was sent.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self.app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = TIMED_ROUTES.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        began_at = time.perf_counter()
        try:
            await self.app(scope, receive, send)
        finally:
            status = scope.get("state", {}).get("status")
            status_class = "none" if status is None else f"{status // 100}xx"
            self._telemetry.record_request(route, status_class, time.perf_counter() - began_at)
