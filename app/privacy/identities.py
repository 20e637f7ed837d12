"""Names: what one person is called where: end user of turns, source of feedback, rater."""

import hashlib
from dataclasses import dataclass
from typing import Self

from sqlalchemy import ColumnElement, and_, or_

from app.models import Feedback, Turn
from app.raters import names
from app.raters.names import END_USER, PERSON

KINDS = (PERSON, "LLM_JUDGE", "CODE")


def masked(project_id: str, name: str) -> str:
    """What the audit keeps in place of a name; with the project's id, so that it cannot be looked up."""
    return hashlib.sha256(f"{project_id}/{name}".encode()).hexdigest()


@dataclass(frozen=True)
class Names:
    """`id` is an end user, a source's id, or a rater's name. A prefix narrows it down, unless it is part of the id.

    Example: Names.of("proj-1", "HUMAN/user-7") -> also the end user "user-7", but not the program "CODE/user-7"
    """

    project_id: str
    id: str
    end_users: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, project_id: str, id: str) -> Self:
        kind, slash, rest = id.partition("/")
        end_users, sources = [id], [(known, id) for known in KINDS]
        if slash and rest and kind in KINDS:
            sources.append((kind, rest))
        if slash and rest and kind in (PERSON, END_USER):
            end_users.append(rest)
        return cls(project_id, id, tuple(end_users), tuple(sources))

    @property
    def sha256(self) -> str:
        """What the audit keeps in place of the name."""
        return masked(self.project_id, self.id)

    @property
    def raters(self) -> list[str]:
        """As `raters`, rewards and samples know them."""
        said = [names.spoken(kind, id) for kind, id in self.sources]
        return said + [names.end_user(name) for name in self.end_users]

    def asked(self) -> ColumnElement[bool]:
        """Turns that name them."""
        return and_(Turn.project_id == self.project_id, Turn.end_user.in_(self.end_users))

    def said(self) -> ColumnElement[bool]:
        """Feedback that names them."""
        ids = {id for _, id in self.sources}
        exact = or_(*[and_(Feedback.source_kind == kind, Feedback.source_id == id) for kind, id in self.sources])
        return and_(Feedback.project_id == self.project_id, Feedback.source_id.in_(ids), exact)
