"""Effective feedback: the latest of its class, target, name and source, unless it was withdrawn."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, func
from sqlalchemy.orm import InstrumentedAttribute, aliased

from app.feedback.schemas import WITHDRAWAL
from app.models import NUMERIC_KINDS, Feedback


def is_effective(
    kinds: Collection[str] | None = None, as_of: InstrumentedAttribute[float] | None = None
) -> ColumnElement[bool]:
    """Return the condition that a Feedback row is effective, in the same sense as the views of the API.

    Withdrawing the latest feedback does not make the one before effective again.

    Args:
        kinds: Only these kinds matter; all kinds if None.
        as_of: A time column of another table in the statement; later feedback is ignored.
    """
    later, withdrawal = aliased(Feedback), aliased(Feedback)

    def exists_by_then(row: Any, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
        return and_(*conditions, *([] if as_of is None else [row.created_at <= as_of]))

    def is_relevant(row: Any) -> ColumnElement[bool]:
        return exists_by_then(row, row.kind != WITHDRAWAL if kinds is None else row.kind.in_(kinds))

    newer = exists().where(
        later.project_id == Feedback.project_id,
        later.target == Feedback.target,
        later.name == Feedback.name,
        later.source_kind == Feedback.source_kind,
        func.coalesce(later.source_id, "") == func.coalesce(Feedback.source_id, ""),
        _kind_class(later.kind) == _kind_class(Feedback.kind),
        later.seq > Feedback.seq,
        is_relevant(later),
    )
    withdrawn = exists().where(
        withdrawal.project_id == Feedback.project_id,
        withdrawal.target == Feedback.target,
        withdrawal.request_metadata["withdraws"].as_string() == Feedback.id,
        exists_by_then(withdrawal, withdrawal.kind == WITHDRAWAL),
    )
    outer = [Feedback] if as_of is None else [Feedback, as_of.class_]
    return and_(is_relevant(Feedback), ~newer.correlate(*outer), ~withdrawn.correlate(*outer))


def _kind_class(kind: ColumnElement[str] | InstrumentedAttribute[str]) -> ColumnElement[str]:
    """Return the class of a kind: a comment, for example, does not replace a rating."""
    return case((kind.in_(NUMERIC_KINDS), "number"), else_=kind)
