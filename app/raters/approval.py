"""Approval: the share of people's votes that are up. This is the only definition; the API, the CLI and canaries use it.

- A vote is what one person said about one reply, if it is for or against it. If a person said several things about a
  reply (under several names, or about the conversation or in a comparison too), the last word counts.
- People are sources of the kind HUMAN; programs, judges and reward sources have no vote. Withdrawn feedback, feedback
  without a reward (a comment, a label without one) and a rating in the middle are no votes. Neither are those of raters
  with the weight 0, who are blocked.
- Its interval is Wilson's, at 95 % (`alignment.signals.proportions`).
"""

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, case, exists, func
from sqlalchemy.orm import aliased

from alignment.config.rewards import EXPLICIT
from alignment.signals.proportions import Share
from alignment.tolerance import TOLERANCE
from app.models import Reward
from app.raters.names import is_program


class ApprovalFields(NamedTuple):
    """The fields of views that show an approval; the last three are None without votes."""

    rated: int
    approval: float | None
    approval_low: float | None
    approval_high: float | None


def is_vote() -> ColumnElement[bool]:
    """Return the condition that a Reward row is a person's vote on its turn. There is one for each turn and rater.

    Curate keeps one row for each thing that a source can say about a turn, the latest.
    """
    later = aliased(Reward)
    newer = exists().where(
        later.turn_id == Reward.turn_id,
        later.rater == Reward.rater,
        later.reward_source == EXPLICIT,
        later.feedback_seq > Reward.feedback_seq,
    )
    return and_(
        Reward.reward_source == EXPLICIT,
        Reward.rater.is_not(None),
        ~is_program(Reward.rater),
        Reward.weight > 0,
        func.abs(Reward.value) > TOLERANCE,
        ~newer.correlate(Reward),
    )


def is_up() -> ColumnElement[int]:
    """Return 1 for a vote for the reply and 0 for one against it, as a SQL expression."""
    return case((Reward.value > 0, 1), else_=0)


def count_columns() -> tuple[ColumnElement[int], ColumnElement[Any], ColumnElement[int]]:
    """Return the numbers of votes, of those that are up, and of different raters, as columns of a grouped query.

    Its rows are those of Reward for which `is_vote` holds.
    """
    return func.count(), func.sum(is_up()), func.count(Reward.rater.distinct())


def approval_fields(votes: Share) -> ApprovalFields:
    """Return an approval with its interval, as views show it."""
    low, high = votes.interval() or (None, None)
    return ApprovalFields(votes.trials, votes.rate, low, high)
