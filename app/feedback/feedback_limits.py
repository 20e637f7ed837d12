"""The most feedback that a target may get, that a source may give about it, and that a browser token may submit.

They bound what reading a reply's feedback costs: its votes are read whenever one more is curated.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from sqlalchemy.engine import Connection

from app.core.errors import AttuneError, Conflict, Forbidden
from app.core.settings import Settings
from app.feedback import repository
from app.feedback.feedback_rows import FeedbackRow
from app.feedback.repository import FeedbackSource, ProjectAndValue


@dataclass(frozen=True, slots=True)
class FeedbackLimits:
    """The most rows about one target, of one source about it, and of one browser token. Replaced feedback counts."""

    per_target: int
    per_source: int
    per_token: int

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        limits = settings.limits
        return cls(limits.max_target_feedback, limits.max_source_feedback, limits.max_token_feedback)


def find_beyond_limits(
    connection: Connection, new: Mapping[ProjectAndValue, FeedbackRow], limits: FeedbackLimits
) -> dict[ProjectAndValue, AttuneError]:
    """Return an error for each new row that its source or its browser token may not add, or its target may not get.

    The projects' locks, which this takes, make the counts exact.
    """
    if not new:
        return {}
    repository.lock_projects(connection, {project_id for project_id, _ in new})
    sources_of = {key: _source_of(row) for key, row in new.items()}
    of_token: Counter[tuple[str, ...]] = Counter(repository.count_by_source(connection, set(sources_of.values())))
    of_source: Counter[tuple[str, ...]] = Counter()
    for token_key, count in of_token.items():
        of_source[token_key[:-1]] += count
    of_target = Counter(
        repository.count_by_target(connection, {(source.project_id, source.target) for source in sources_of.values()})
    )
    errors: dict[ProjectAndValue, AttuneError] = {}
    for project_key, row in new.items():
        source = sources_of[project_key]
        token_id, target = row["token_id"] or "", (source.project_id, source.target)
        if token_id and of_token[*source, token_id] >= limits.per_token:
            errors[project_key] = _token_quota(limits)
        elif of_source[source] >= limits.per_source:
            errors[project_key] = _source_quota(limits, is_named=row["source_id"] is not None)
        elif of_target[target] >= limits.per_target:
            errors[project_key] = _target_quota(limits)
        else:
            of_token[*source, token_id] += 1
            of_source[source] += 1
            of_target[target] += 1
    return errors


def _source_of(row: FeedbackRow) -> FeedbackSource:
    return FeedbackSource(row["project_id"], row["target"], row["source_kind"], row["source_id"] or "")


def _token_quota(limits: FeedbackLimits) -> Forbidden:
    message = f"This feedback token has submitted {limits.per_token} times, its limit; create another token."
    return Forbidden(message, code="token_quota")


def _source_quota(limits: FeedbackLimits, *, is_named: bool) -> Conflict:
    message = (
        f"This source has given feedback about this target {limits.per_source} times, the limit "
        "(ATTUNE_LIMITS__MAX_SOURCE_FEEDBACK); its latest feedback counts."
    )
    if not is_named:
        message += " Feedback without a `source.id` is of one source: name each person."
    return Conflict(message, code="source_quota", param="source")


def _target_quota(limits: FeedbackLimits) -> Conflict:
    message = (
        f"There are {limits.per_target} pieces of feedback about this target, the limit of all sources together "
        "(ATTUNE_LIMITS__MAX_TARGET_FEEDBACK)."
    )
    return Conflict(message, code="target_quota")
