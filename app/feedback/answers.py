"""What the answer to a submission says beside the row: whether it can give a reward, and whether a replay counts.

A replay changes nothing, so its answer must show what was lost meanwhile: feedback is gone when it was withdrawn, when
later feedback of its source replaced it, or when its reply was deleted.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import NamedTuple, NotRequired, TypedDict

from sqlalchemy import Select, select
from sqlalchemy.engine import Connection

from app.feedback.effective import is_replaced, is_withdrawn
from app.feedback.feedback_rows import FeedbackRow
from app.feedback.repository import FEEDBACK, has_arrays, is_in
from app.models import VOTE_KINDS, Feedback, Turn

WITHDRAWN = "it was withdrawn; feedback with a new id counts again"
REPLACED = "later feedback of its source replaced it"
ERASED = "its reply was deleted"


class Trainability(TypedDict):
    """Whether feedback can give a reward, and why not. The last two are those of feedback that is sent again."""

    trainable: bool | None
    exclusion_reason: str | None
    effective: NotRequired[bool]
    withdrawn: NotRequired[bool]


class RecordedState(NamedTuple):
    """The state of a row of feedback. The last two are those of its reply; null and false unless it is about one."""

    is_replaced: bool
    is_withdrawn: bool
    turn_exclusion_reason: str | None
    is_turn_deleted: bool


def read_states(connection: Connection, seqs: AbstractSet[int]) -> dict[int, RecordedState]:
    """Return the states of feedback by `seq`, in one statement."""
    if not seqs:
        return {}
    rows = connection.execute(_states_statement(has_arrays(connection)), {"seqs": sorted(seqs)})
    return {row.seq: RecordedState(*row[1:]) for row in rows}


def view_new(kind: str, exclusion_reasons: Sequence[str | None]) -> Trainability:
    """Return `trainable` and `exclusion_reason` of new feedback.

    Args:
        kind: The kind of the feedback.
        exclusion_reasons: Of each reply that it is about: why it must not be trained on, or None.
    """
    if kind not in VOTE_KINDS:
        return {"trainable": False, "exclusion_reason": f"a {kind} gives no reward"}
    if exclusion_reasons and all(exclusion_reasons):
        return {"trainable": False, "exclusion_reason": exclusion_reasons[0]}
    is_known = bool(exclusion_reasons) and kind != "categorical"
    return {"trainable": True if is_known else None, "exclusion_reason": None}


def view_replay(
    row: FeedbackRow, state: RecordedState, ranked_reasons: Sequence[str | None], *, has_target: bool
) -> Trainability:
    """Return `trainable` and `exclusion_reason` of feedback that was recorded before, and whether it still counts.

    Args:
        row: Its row. Its target is meant: the metadata of the request may lead to another reply by now.
        state: The state of the row.
        ranked_reasons: Of a comparison or a ranking: the exclusion reason of each of its replies that is left.
        has_target: Whether the conversation that the row is about has a reply left, or its episode exists.
    """
    reasons = ranked_reasons
    is_erased = not reasons
    if row["turn_id"] is not None:
        reasons, is_erased = [state.turn_exclusion_reason], bool(state.is_turn_deleted)
    elif row["conversation_id"] is not None or row["episode_id"] is not None:
        reasons, is_erased = [], not has_target
    losses = ((state.is_withdrawn, WITHDRAWN), (state.is_replaced, REPLACED), (is_erased, ERASED))
    loss = next((reason for is_lost, reason in losses if is_lost), None)
    view = view_new(row["kind"], reasons)
    if loss is not None:
        view = {"trainable": False, "exclusion_reason": loss}
    view["effective"] = not (state.is_replaced or state.is_withdrawn)
    view["withdrawn"] = bool(state.is_withdrawn)
    return view


@lru_cache(maxsize=2)
def _states_statement(arrays: bool) -> Select[int, bool, bool, str | None, bool]:
    states = (is_replaced().label("is_replaced"), is_withdrawn().label("is_withdrawn"))
    turn = (Turn.exclusion_reason, Turn.deleted_at.is_not(None).label("is_turn_deleted"))
    query = select(Feedback.seq, *states, *turn).outerjoin(Turn, Turn.id == Feedback.turn_id)
    return query.where(is_in(FEEDBACK.c.seq, "seqs", arrays))
