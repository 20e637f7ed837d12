"""Votes as front ends send them: changed, withdrawn, repeated and in another order. With the state they must end in."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from app.core.database import Database
from app.feedback.effective import is_effective
from app.models import Feedback

Value = bool | str | None  # a thumb, a comment without one, or None: withdrawn
REPEATED = 0.05  # of all changes
NEAR = 50.0  # how many other votes come between two changes of one vote, or between a change and its repetition
FIRST_SENT_AT = 1_760_000_000.0  # any time in the past
HISTORIES: Sequence[tuple[float, Sequence[str]]] = (
    (0.65, ("vote",)),
    (0.15, ("vote", "other")),
    (0.05, ("vote", "other", "vote")),
    (0.05, ("vote", "comment")),
    (0.06, ("vote", "withdrawal")),
    (0.02, ("vote", "other", "withdrawal")),
    (0.02, ("vote", "withdrawal", "vote")),
)


@dataclass(frozen=True, slots=True)
class Change:
    """What a person says about a reply at a time. Each vote is of another person, on another reply."""

    vote: int
    revision: int  # of the vote: 0, 1, …
    value: Value
    sent_at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """What a route can carry.

    Args:
        in_order: Changes of one vote arrive in the order in which they were made, as they have no times.
        repeats_late: A change may be repeated after a later one of its vote.
        withdrawals: Votes can be withdrawn.
        returns: A vote that was withdrawn can come again.
        comments: A vote can become a comment alone.
    """

    in_order: bool = False
    repeats_late: bool = True
    withdrawals: bool = True
    returns: bool = True
    comments: bool = True

    def can_have(self, history: Sequence[str]) -> bool:
        withdrawn = "withdrawal" in history
        return (
            (self.withdrawals or not withdrawn)
            and (self.returns or not withdrawn or history[-1] == "withdrawal")
            and (self.comments or "comment" not in history)
        )


@dataclass(frozen=True)
class Traffic:
    """The changes as they arrive, repetitions included, and the last state of each vote."""

    arrivals: list[Change]
    num_changes: int  # without repetitions
    expected: list[Value]

    @property
    def num_expected(self) -> int:
        return sum(value is not None for value in self.expected)


@dataclass(frozen=True)
class Comparison:
    """What the service counts, compared with what it must."""

    num_counted: int
    wrong: Mapping[int, list[Value]]  # what is counted for a vote, if it is not its last state, once


def make_traffic(num_votes: int, options: TrafficOptions, seed: int = 0) -> Traffic:
    """Return the changes of this many votes. The same arguments give the same changes."""
    rng = random.Random(seed)
    possible = [(weight, history) for weight, history in HISTORIES if options.can_have(history)]
    histories = rng.choices([history for _, history in possible], [weight for weight, _ in possible], k=num_votes)
    timeline: list[tuple[float, int, int, Value]] = []  # when, in votes
    expected: list[Value] = []
    for vote, history in enumerate(histories):
        first, at = rng.random() < 0.6, float(vote)
        values: dict[str, Value] = {"vote": first, "other": not first, "withdrawal": None, "comment": f"text {vote}"}
        for revision, act in enumerate(history):
            timeline.append((at, vote, revision, values[act]))
            at += rng.uniform(1.0, NEAR)
        expected.append(values[history[-1]])
    timeline.sort(key=lambda one: one[:3])
    arrivals: list[tuple[float, int, Change]] = []
    for number, (at, vote, revision, value) in enumerate(timeline):
        change = Change(vote, revision, value, FIRST_SENT_AT + 0.01 * number)
        arrives = at if options.in_order else at + rng.uniform(0.0, NEAR)
        arrivals.append((arrives, number, change))
        if rng.random() < REPEATED:
            arrivals.append((arrives + (rng.uniform(0.0, NEAR) if options.repeats_late else 0.0), number, change))
    arrivals.sort(key=lambda one: one[:2])
    return Traffic([change for *_, change in arrivals], len(timeline), expected)


def to_person(vote: int) -> str:
    return f"u-{vote}"


async def compare(db: Database, traffic: Traffic) -> Comparison:
    """Compare the effective feedback in the database with the last state of each vote."""
    counted: defaultdict[int, list[Value]] = defaultdict(list)
    query = select(Feedback.source_id, Feedback.kind, Feedback.value, Feedback.raw_value).where(is_effective())
    async with db.read() as session:
        for source_id, kind, value, raw_value in await session.execute(query.order_by(Feedback.seq)):
            vote = int(str(source_id).rpartition("u-")[2])
            counted[vote].append(str(raw_value) if kind == "comment" else (value or 0.0) > 0)
    states = {vote: [] if value is None else [value] for vote, value in enumerate(traffic.expected)}
    wrong = {vote: counted[vote] for vote in states.keys() | counted.keys() if counted[vote] != states.get(vote)}
    return Comparison(sum(map(len, counted.values())), wrong)
