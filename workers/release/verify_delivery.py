"""Verify that an engine computes what the trainer computed: compare the log-probs of a version's probe."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from app.core.settings import Settings
from app.inference.engine import EngineClient
from app.inference.transport import EngineUnavailable
from app.models import Version

log = logging.getLogger("attune.evaluate")
Scores = Sequence[Sequence[float]]
# Largest |engine - trainer| log-prob over the probe that counts as the same weights. Measured in float32: below 1e-5.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
# In bfloat16 log-probs of the same weights differ by 0.04 (root mean square) and 0.31 at most, which is as much as an
# update moves them. All tokens of the probe together tell the version from its parent: a version is refused if the
# engine is nearer to the parent by this many standard errors.
MIN_STANDARD_ERRORS = 3.0


class NotDelivered(Exception):
    """The engine does not compute what the trainer computed: its weights are not the weights that were trained."""


class EngineUnreachable(EngineUnavailable):
    """The engine did not answer before anything was asked of it, so the version cannot be the cause."""


@dataclass
class Timings:
    """Seconds by phase, measured on one clock."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Record how long the block took, unless it raises."""
        started = time.perf_counter()
        yield
        self.record(phase, time.perf_counter() - started)

    def record(self, name: str, value: float) -> None:
        """Record a value. Of engines that work in parallel the largest counts."""
        self.seconds[name] = max(value, self.seconds.get(name, 0.0))


def require_delivered(engine_scores: Scores, version: Version, settings: Settings, timings: Timings) -> None:
    """Raise NotDelivered unless these are the version's log-probs, and nearer to them than to its parent's.

    In bfloat16 the tolerance alone would accept the parent under the version's name. An update that moved the probe
    too little to tell is accepted with a warning.
    """
    assert version.probe is not None
    require_equal_scores(engine_scores, version.probe["logprobs"], settings, timings)
    if (parent_scores := version.probe.get("parent_logprobs")) is None:
        return  # exported before these were recorded, or the base model's
    position = position_from_parent(engine_scores, version.probe["logprobs"], parent_scores)
    if position is None:
        log.warning("%s: its update did not change the probe", version.adapter_name)
        return
    share, error = position
    timings.record("probe_share", share)
    timings.record("probe_share_error", error)
    if abs(share - 0.5) <= MIN_STANDARD_ERRORS * error:
        log.warning(
            "%s: its update moved the probe too little to tell its delivery from its parent's (%.2f ± %.2f of the way)",
            version.adapter_name,
            share,
            error,
        )
    elif not share > 0.5:
        raise NotDelivered(
            "the engine's log-probs of the probe are nearer to the parent's than to the version's: they moved by "
            f"{share:.2f} ± {error:.2f} of the way"
        )


def position_from_parent(
    engine_scores: Scores, trainer_scores: Scores, parent_scores: Scores
) -> tuple[float, float] | None:
    """Return the engine's share of the way from the parent to the version, and the share's standard error.

    The share is the projection of engine - parent on version - parent over all tokens: near 0 for the parent's weights
    and near 1 for the version's. Rounding moves both towards the middle by the same amount, so that 0.5 separates them.
    Returns None if the update changed no log-prob.
    """
    rows = zip(engine_scores, trainer_scores, parent_scores, strict=True)
    triples = [scores for row in rows for scores in zip(*row, strict=True)]
    moves = [(engine - parent, own - parent) for engine, own, parent in triples]
    length = sum(own * own for _, own in moves)
    if not length:
        return None
    share = sum(engine * own for engine, own in moves) / length
    residuals = [(engine - share * own, own) for engine, own in moves]
    # The noise may be the same at all tokens, or grow with the move: the larger error counts.
    even = math.sqrt(sum(rest * rest for rest, _ in residuals) / max(1, len(moves) - 1) / length)
    uneven = math.sqrt(sum((rest * own) ** 2 for rest, own in residuals)) / length
    return share, max(even, uneven)


def max_logprob_difference(engine_scores: Scores, trainer_scores: Scores) -> float:
    """Return the largest |engine - trainer|, or NaN if any value is NaN."""
    differences = [
        abs(engine - trainer)
        for engine_row, trainer_row in zip(engine_scores, trainer_scores, strict=True)
        for engine, trainer in zip(engine_row, trainer_row, strict=True)
    ]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def require_equal_scores(
    engine_scores: Scores, trainer_scores: Scores, settings: Settings, timings: Timings | None = None
) -> None:
    """Raise NotDelivered if log-probs of the probe differ by more than the tolerance, or by NaN."""
    difference = max_logprob_difference(engine_scores, trainer_scores)
    if timings is not None:
        timings.record("probe_distance", difference)
    bound = probe_tolerance(settings)
    if not difference <= bound:
        raise NotDelivered(
            f"the engine's log-probs of the probe differ from the trainer's by {difference:.3g} (bound {bound:g})"
        )


def probe_tolerance(settings: Settings) -> float:
    """Return the largest |engine - trainer| log-prob, in nats, that counts as the same weights."""
    return settings.release.probe_tolerance or TOLERANCE[settings.dtype]


async def require_reachable(client: EngineClient) -> None:
    """Raise EngineUnreachable if the engine does not answer twice: one missed answer does not count."""
    if not await client.is_ready() and not await client.is_ready():
        raise EngineUnreachable(f"{client.url} does not answer")
