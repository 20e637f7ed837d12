"""Feedback → Rewards: what people said, as numbers between -1 and 1, kept apart by source."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

KINDS = ("binary", "score", "rating")
WITHDRAWAL = "withdrawal"


@dataclass(frozen=True)
class Said:
    """One word of one source about one turn: 1 or -1 for a binary kind, a number in [-1, 1] for a score or a rating.

    A withdrawal takes the source's last preference back, and has no value.

    Example: Said(source="default/HUMAN/user-42", kind="binary", value=1.0)
    """

    source: str
    kind: str
    value: float | None = None


def worth(said: Said) -> float | None:
    """The reward of one piece of feedback; None for a kind that carries no preference, such as a comment."""
    if said.kind not in KINDS:
        return None
    if said.value is None or not math.isfinite(said.value) or not -1 <= said.value <= 1:
        raise ValueError(f"A {said.kind} lies between -1 and 1, and {said.value!r} does not.")
    if said.kind == "binary" and abs(said.value) != 1:
        raise ValueError(f"A binary is 1 or -1, not {said.value!r}.")
    return said.value


def by_source(heard: Iterable[Said]) -> dict[str, float]:
    """The last preference of each source that has not taken it back, given what was said in order of arrival."""
    rewards: dict[str, float] = {}
    for said in heard:
        if said.kind == WITHDRAWAL:
            rewards.pop(said.source, None)
        elif (reward := worth(said)) is not None:
            rewards[said.source] = reward
    return rewards


def combine(rewards: Mapping[str, float]) -> float:
    """The one number a sample carries: the mean over its sources, of which there must be one."""
    return fmean(rewards.values())
