"""The names of one data subject: end user of turns, source of feedback, rater."""

from dataclasses import dataclass
from typing import Self

from sqlalchemy import ColumnElement, and_, or_

from app.models import Feedback, SourceKind, Turn
from app.raters import names
from app.raters.names import END_USER, hash_name


@dataclass(frozen=True)
class SubjectNames:
    """All names that `id` may stand for: an end user, the id of a feedback source, or a rater.

    A prefix such as "HUMAN/" restricts it to that kind, unless the prefix is part of the id itself.

    Example: SubjectNames.of("proj-1", "HUMAN/user-7") includes the end user "user-7", not the program "CODE/user-7"
    """

    project_id: str
    id: str
    end_users: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]  # kind and id

    @classmethod
    def of(cls, project_id: str, id: str) -> Self:
        kind, slash, rest = id.partition("/")
        end_users, sources = [id], [(source_kind.value, id) for source_kind in SourceKind]
        if slash and rest and kind in tuple(SourceKind):
            sources.append((kind, rest))
        if slash and rest and kind in (SourceKind.HUMAN, END_USER):
            end_users.append(rest)
        return cls(project_id, id, tuple(end_users), tuple(sources))

    @property
    def sha256(self) -> str:
        """What the audit log keeps in place of the id."""
        return hash_name(self.project_id, self.id)

    @property
    def raters(self) -> list[str]:
        """The names that the raters, rewards and samples of this subject have."""
        feedback_raters = [names.feedback_rater(kind, id) for kind, id in self.sources]
        return feedback_raters + [names.end_user_rater(name) for name in self.end_users]

    def turns_filter(self) -> ColumnElement[bool]:
        """Return the condition for turns that name the subject."""
        return and_(Turn.project_id == self.project_id, Turn.end_user.in_(self.end_users))

    def feedback_filter(self) -> ColumnElement[bool]:
        """Return the condition for feedback that names the subject."""
        ids = {id for _, id in self.sources}
        pairs = or_(*[and_(Feedback.source_kind == kind, Feedback.source_id == id) for kind, id in self.sources])
        return and_(Feedback.project_id == self.project_id, Feedback.source_id.in_(ids), pairs)
