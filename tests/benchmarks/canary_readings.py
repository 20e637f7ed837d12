"""What a canary's rows tell afterwards: who heard it, when it was clear, and how long it was heard after that."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import select

from alignment.release.canary import Arm, CanaryConfig, decide
from app.core.database import Database
from app.models import Audit, Feedback, Origin, RouteReason, Turn, TurnState, Version
from tests.benchmarks.deployment import POLICY

ENDINGS = {"canary.ended": "taken back", "deployment.deployed": "live"}


class RatedTurn(NamedTuple):
    """A thumb: of whom, about whose reply."""

    at: float
    rater: str
    candidate: bool
    value: float


@dataclass
class Side:
    """One vote a rater: which way the words went, taken together."""

    votes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rated: int = 0
    good: int = 0

    def hear(self, word: RatedTurn) -> None:
        before = self.votes[word.rater]
        self.votes[word.rater] = after = before + word.value
        self.rated += (after != 0) - (before != 0)
        self.good += (after > 0) - (before > 0)

    @property
    def arm(self) -> Arm:
        return Arm(turns=self.rated, rated=self.rated, good=self.good)


async def read(db: Database, version_id: str, since: float, config: CanaryConfig) -> dict[str, Any]:
    """Of the canary that went out at `since` and has ended by itself. Seconds since it went out."""
    async with db.read() as session:
        watched = await session.scalars(select(Audit).where(Audit.actor == "watch", Audit.created_at >= since))
        end = next(row for row in watched if row.action in ENDINGS)
        turns = [
            row
            for row in await session.execute(
                select(
                    Turn.created_at, Turn.finished_at, Turn.end_user, Turn.version_id, Turn.route_reason, Turn.state
                ).where(Turn.origin == Origin.CHAT, Turn.created_at >= since)
            )
        ]
        thumbs = await session.execute(
            select(Feedback.created_at, Feedback.source_id, Turn.version_id, Feedback.value)
            .join(Turn, Turn.id == Feedback.turn_id)
            .where(Turn.created_at >= since, Feedback.created_at <= end.created_at)
            .order_by(Feedback.seq)
        )
        words = [RatedTurn(at, rater, of == version_id, value) for at, rater, of, value in thumbs]
    canary_turns = [turn for turn in turns if turn.version_id == version_id and turn.route_reason == RouteReason.CANARY]
    meanwhile = [turn for turn in turns if turn.created_at <= end.created_at]
    users, seen = {turn.end_user for turn in meanwhile}, {turn.end_user for turn in canary_turns}
    clear = clear_at(config, words, end.action)
    last, over = max(turn.created_at for turn in canary_turns), max(turn.finished_at for turn in canary_turns)
    ended = end.created_at
    return {
        "end": ENDINGS[end.action],
        "reason": end.reason,
        "seconds": ended - since,
        "turns": len(meanwhile),
        "users": len(users),
        "share": len(seen & users) / len(users),
        "seen_by": len(seen),
        "canary_turns": len(canary_turns),
        "rated": len({word.rater for word in words if word.candidate}),
        "rated_beside": len({word.rater for word in words if not word.candidate}),
        "clear_to_end": None if clear is None else ended - clear,
        "clear_to_last_turn": None if clear is None else last - clear,
        "clear_to_last_word": None if clear is None else over - clear,
        "end_to_last_turn": last - ended,
        "not_done": sum(turn.state != TurnState.DONE for turn in turns),
    }


def clear_at(config: CanaryConfig, words: Iterable[RatedTurn], action: str) -> float | None:
    """When the thumb was accepted that the words were enough with for the end that it took. None: they never were."""
    wanted = {"canary.ended": "roll_back", "deployment.deployed": "promote"}[action]
    sides = {True: Side(), False: Side()}
    for word in words:
        sides[word.candidate].hear(word)
        if decide(config, sides[True].arm, sides[False].arm, age_seconds=0.0).action == wanted:
            return word.at
    return None


async def misnamed(db: Database, named: dict[str, str]) -> int:
    """Replies that named another version to the user than is on record."""
    async with db.read() as session:
        rows = await session.execute(
            select(Turn.completion_id, Version.number).join(Version, Version.id == Turn.version_id)
        )
        known = {id: f"{POLICY}@v{number}" for id, number in rows}
    return sum(known.get(id) != label for id, label in named.items())
