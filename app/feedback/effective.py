"""Which feedback counts: the latest of its sort, target, name and source, unless it was taken back."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, func
from sqlalchemy.orm import InstrumentedAttribute, aliased

from app.feedback.kinds import NUMBERS
from app.feedback.schemas import WITHDRAWAL
from app.models import Feedback


def is_effective(
    kinds: Collection[str] | None = None, by: InstrumentedAttribute[float] | None = None
) -> ColumnElement[bool]:
    """Does this Feedback count, among the given `kinds` (all of them if unset)? As reads of feedback say.

    `by` is a moment of another table in the statement: what came later had not been said then. Withdrawing the latest
    does not bring back the one before.
    """
    later, tombstone = aliased(Feedback), aliased(Feedback)

    def said(row: Any, *more: ColumnElement[bool]) -> ColumnElement[bool]:
        return and_(*more, *([] if by is None else [row.created_at <= by]))

    def heard(row: Any) -> ColumnElement[bool]:
        return said(row, row.kind != WITHDRAWAL if kinds is None else row.kind.in_(kinds))

    newer = exists().where(
        later.project_id == Feedback.project_id,
        later.target == Feedback.target,
        later.name == Feedback.name,
        later.source_kind == Feedback.source_kind,
        func.coalesce(later.source_id, "") == func.coalesce(Feedback.source_id, ""),
        _sort(later.kind) == _sort(Feedback.kind),
        later.seq > Feedback.seq,
        heard(later),
    )
    withdrawn = exists().where(
        tombstone.project_id == Feedback.project_id,
        tombstone.target == Feedback.target,
        tombstone.request_metadata["withdraws"].as_string() == Feedback.id,
        said(tombstone, tombstone.kind == WITHDRAWAL),
    )
    outside = [Feedback] if by is None else [Feedback, by.class_]
    return and_(heard(Feedback), ~newer.correlate(*outside), ~withdrawn.correlate(*outside))


def _sort(kind: ColumnElement[str] | InstrumentedAttribute[str]) -> ColumnElement[str]:
    """A comment does not take back a thumb."""
    return case((kind.in_(NUMBERS), "number"), else_=kind)
