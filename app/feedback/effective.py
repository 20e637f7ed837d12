"""SQL conditions for effective feedback: the latest of its class, target, name and source, unless it was withdrawn.

Each condition is one look into an index for a row, however much feedback its target has.
"""

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists
from sqlalchemy.orm import InstrumentedAttribute, aliased

from app.feedback.schemas import WITHDRAWAL
from app.models import NUMERIC_KINDS, Feedback

Time = InstrumentedAttribute[float]


def kind_class(kind: ColumnElement[str] | InstrumentedAttribute[str]) -> ColumnElement[str]:
    """Return the class of a kind: a comment, for example, does not replace a rating."""
    return case((kind.in_(NUMERIC_KINDS), "number"), else_=kind)


def is_effective(kinds: Collection[str] | None = None, as_of: Time | None = None) -> ColumnElement[bool]:
    """Return the condition that a Feedback row is effective.

    Withdrawing the latest feedback does not make the one before effective again.

    Args:
        kinds: Only these kinds matter; all kinds if None.
        as_of: A time column of another table in the statement; later feedback is ignored.
    """
    is_relevant = Feedback.kind != WITHDRAWAL if kinds is None else Feedback.kind.in_(kinds)
    if as_of is not None:
        is_relevant = and_(is_relevant, Feedback.created_at <= as_of)
    return and_(is_relevant, ~is_replaced(kinds, as_of), ~is_withdrawn(as_of))


def is_replaced(kinds: Collection[str] | None = None, as_of: Time | None = None) -> ColumnElement[bool]:
    """Return the condition that later feedback of the same source has replaced a Feedback row. See `is_effective`."""
    later = aliased(Feedback)
    is_relevant = later.kind != WITHDRAWAL if kinds is None else later.kind.in_(kinds)
    if as_of is not None:
        is_relevant = and_(is_relevant, later.created_at <= as_of)
    replaces = and_(
        later.project_id == Feedback.project_id,
        later.target == Feedback.target,
        later.source_kind == Feedback.source_kind,
        later.name == Feedback.name,
        later.seq > Feedback.seq,
        kind_class(later.kind) == kind_class(Feedback.kind),
        is_relevant,
    )
    # Two subqueries: no index serves `IS NOT DISTINCT FROM`.
    of_source = exists().where(replaces, later.source_id == Feedback.source_id)
    of_nobody = exists().where(replaces, later.source_id.is_(None))
    outer = _outer(as_of)
    return case(
        (Feedback.source_id.is_(None), of_nobody.correlate(*outer)),
        else_=of_source.correlate(*outer),
    )


def is_withdrawn(as_of: Time | None = None) -> ColumnElement[bool]:
    """Return the condition that a Feedback row was withdrawn. See `is_effective`."""
    withdrawal = aliased(Feedback)
    conditions = [withdrawal.project_id == Feedback.project_id, withdrawal.withdraws == Feedback.id]
    if as_of is not None:
        conditions.append(withdrawal.created_at <= as_of)
    return exists().where(*conditions).correlate(*_outer(as_of))


def _outer(as_of: Time | None) -> list[Any]:
    return [Feedback] if as_of is None else [Feedback, as_of.class_]
