"""Read the results of a finished canary: its users, when its feedback was decisive, and when it ended."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import select

from alignment.release.canary import Arm, CanaryConfig, decide
from app.core.database import Database
from app.models import Audit, Feedback, Origin, RouteReason, Turn, TurnState, Version
from tests.benchmarks.deployment import POLICY

ENDINGS = {"canary.ended": "rolled back", "deployment.deployed": "live"}


class RatedTurn(NamedTuple):
    """One vote on a turn of the canary (`candidate`) or of the live version."""

    at: float
    rater: str
    candidate: bool
    value: float


@dataclass
class ArmVotes:
    """The votes on one arm of the canary. The sum of a rater's votes counts as one vote."""

    votes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rated: int = 0
    good: int = 0

    def add(self, vote: RatedTurn) -> None:
        before = self.votes[vote.rater]
        self.votes[vote.rater] = after = before + vote.value
        self.rated += (after != 0) - (before != 0)
        self.good += (after > 0) - (before > 0)

    @property
    def arm(self) -> Arm:
        return Arm(turns=self.rated, rated=self.rated, good=self.good)


async def read_results(db: Database, version_id: str, since: float, config: CanaryConfig) -> dict[str, Any]:
    """Return the results of the canary that started at `since` and that the monitor ended. Times are in seconds."""
    async with db.read() as session:
        audit_rows = await session.scalars(select(Audit).where(Audit.actor == "reconcile", Audit.created_at >= since))
        end = next(row for row in audit_rows if row.action in ENDINGS)
        turns = [
            row
            for row in await session.execute(
                select(
                    Turn.created_at, Turn.finished_at, Turn.end_user, Turn.version_id, Turn.route_reason, Turn.state
                ).where(Turn.origin == Origin.CHAT, Turn.created_at >= since)
            )
        ]
        feedback_rows = await session.execute(
            select(Feedback.created_at, Feedback.source_id, Turn.version_id, Feedback.value)
            .join(Turn, Turn.id == Feedback.turn_id)
            .where(Turn.created_at >= since, Feedback.created_at <= end.created_at)
            .order_by(Feedback.seq)
        )
        votes = [
            RatedTurn(at, rater, turn_version == version_id, value)
            for at, rater, turn_version, value in feedback_rows
            if rater is not None and value is not None
        ]
    canary_turns = [turn for turn in turns if turn.version_id == version_id and turn.route_reason == RouteReason.CANARY]
    turns_before_end = [turn for turn in turns if turn.created_at <= end.created_at]
    users, canary_users = {turn.end_user for turn in turns_before_end}, {turn.end_user for turn in canary_turns}
    decisive = decisive_at(config, votes, end.action)
    last_start, last_finish = (
        max(turn.created_at for turn in canary_turns),
        max(turn.finished_at for turn in canary_turns),
    )
    ended = end.created_at
    return {
        "end": ENDINGS[end.action],
        "reason": end.reason,
        "seconds": ended - since,
        "turns": len(turns_before_end),
        "users": len(users),
        "share": len(canary_users & users) / len(users),
        "canary_users": len(canary_users),
        "canary_turns": len(canary_turns),
        "raters": len({vote.rater for vote in votes if vote.candidate}),
        "raters_live": len({vote.rater for vote in votes if not vote.candidate}),
        "decisive_to_end": None if decisive is None else ended - decisive,
        "decisive_to_last_turn": None if decisive is None else last_start - decisive,
        "decisive_to_last_token": None if decisive is None else last_finish - decisive,
        "end_to_last_turn": last_start - ended,
        "not_done": sum(turn.state != TurnState.DONE for turn in turns),
    }


def decisive_at(config: CanaryConfig, votes: Iterable[RatedTurn], action: str) -> float | None:
    """Return when the vote was accepted after which the canary could end as it did, or None if there is none."""
    decision = {"canary.ended": "roll_back", "deployment.deployed": "promote"}[action]
    arms = {True: ArmVotes(), False: ArmVotes()}
    for vote in votes:
        arms[vote.candidate].add(vote)
        if decide(config, arms[True].arm, arms[False].arm, age_seconds=0.0).action == decision:
            return vote.at
    return None


async def count_misnamed(db: Database, labels: dict[str, str]) -> int:
    """Count the replies that named another version to the user than the recorded one."""
    async with db.read() as session:
        rows = await session.execute(
            select(Turn.completion_id, Version.number).join(Version, Version.id == Turn.version_id)
        )
        recorded = {id: f"{POLICY}@v{number}" for id, number in rows}
    return sum(recorded.get(id) != label for id, label in labels.items())
