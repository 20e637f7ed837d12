"""The annotation queue: replies that a person has not labelled yet, and the feedback that a label becomes.

Everybody has a queue of their own: of the newest replies those without their label, in an order that differs from
person to person, so that two rarely look at the same one; where they do, both labels count. A label is feedback of the
source `HUMAN/annotator:<key id>`, written as the API writes it.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment.config.rewards import EXPLICIT, ExplicitSource
from app.core.settings import Settings
from app.models import Feedback, FeedbackRank, Origin, Policy, Rater, RaterStanding, SourceKind, Turn, TurnState
from app.projects.auth import Caller
from app.raters.names import feedback_rater
from app.training.policy_config import effective_rewards

MAX_CANDIDATES = 300  # the newest replies that a queue is chosen from
Kind = Literal["single", "down", "pair"]
KINDS: dict[Kind, str] = {
    "single": "any reply",
    "down": "replies that somebody voted down",
    "pair": "two replies to one prompt, without their versions",
}


class Item(NamedTuple):
    """What is to be labelled: one reply, or two to the same prompt. `remaining` items are left, this one included."""

    turns: Sequence[Turn]
    remaining: int


def source_id(caller: Caller) -> str:
    """Return the id of the source of a person's labels: the same for all sessions of their key."""
    return f"annotator:{caller.key_id}"


async def find_standing(session: AsyncSession, caller: Caller) -> str:
    """Return the standing of the person as a rater."""
    rater = await session.get(Rater, (caller.project_id, feedback_rater(SourceKind.HUMAN, source_id(caller))))
    return str(RaterStanding.NORMAL if rater is None else rater.standing)


def corrections_are_learned_from(policy: Policy, settings: Settings) -> bool:
    """Whether a rewritten reply is learned from; it is exported as a preference pair in any case."""
    source = effective_rewards(policy, settings).source(EXPLICIT)
    return isinstance(source, ExplicitSource) and source.correction is not None


async def next_item(
    session: AsyncSession, caller: Caller, policy: Policy, kind: Kind, skipped: Sequence[str]
) -> Item | None:
    """Return what this person is to label next, or None. `skipped` are ids of replies that they passed over."""
    own = aliased(Feedback)
    is_own = (
        own.source_kind == SourceKind.HUMAN,
        own.source_id == source_id(caller),
        own.project_id == policy.project_id,
    )
    query = select(Turn).where(
        Turn.project_id == policy.project_id,
        Turn.policy_id == policy.id,
        Turn.origin == Origin.CHAT,
        Turn.state == TurnState.DONE,
        Turn.deleted_at.is_(None),
        Turn.exclusion_reason.is_(None),
    )
    if kind == "pair":
        ranked = exists().where(FeedbackRank.turn_id == Turn.id, FeedbackRank.feedback_seq == own.seq, *is_own)
        query = query.where(Turn.choice_index == 1, ~ranked)
    else:
        query = query.where(~exists().where(own.turn_id == Turn.id, *is_own))
    if kind == "down":
        query = query.where(exists().where(Feedback.turn_id == Turn.id, Feedback.value < 0))
    turns = list(await session.scalars(query.order_by(Turn.created_at.desc(), Turn.id).limit(MAX_CANDIDATES)))
    waiting = sorted((turn for turn in turns if turn.id not in skipped), key=lambda turn: _mix(caller.key_id, turn.id))
    if not waiting:
        return None
    first = waiting[0]
    if kind != "pair":
        return Item([first], len(waiting))
    other = await session.scalar(select(Turn).where(Turn.completion_id == first.completion_id, Turn.choice_index == 0))
    pair = [first] if other is None else [first, other]
    return Item(sorted(pair, key=lambda turn: _mix(caller.key_id, turn.id, "side")), len(waiting))


def _mix(*values: str) -> str:
    """Return a fixed order of values that looks random: which reply comes next, and which is on the left."""
    return hashlib.sha256("\n".join(values).encode()).hexdigest()
