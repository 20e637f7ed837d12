"""Names of raters, derived from the source of the feedback or from the turn that it is about."""

import hashlib

from sqlalchemy import ColumnElement, or_
from sqlalchemy.orm import InstrumentedAttribute

from app.models import SourceKind

END_USER = "end-user"
PROGRAM_PREFIXES = (f"{SourceKind.CODE}/", f"{SourceKind.LLM_JUDGE}/")
MAX_LENGTH = 320  # of the database's columns


def feedback_rater(kind: str, source_id: str | None) -> str:
    """Return the rater of feedback. Example: ("HUMAN", "user-7") -> "HUMAN/user-7"; a program may have no id."""
    return f"{kind}/{source_id or ''}"


def end_user_rater(name: str) -> str:
    return f"{END_USER}/{name}"[:MAX_LENGTH]


def turn_rater(end_user_name: str | None, conversation_id: str | None, turn_id: str) -> str:
    """Return the rater for a turn's own user: the end user, else the conversation, else the turn."""
    if end_user_name:
        return end_user_rater(end_user_name)
    return conversation_rater(conversation_id) if conversation_id else single_turn_rater(turn_id)


def conversation_rater(conversation_id: str) -> str:
    return f"conversation/{conversation_id}"


def single_turn_rater(turn_id: str) -> str:
    return f"turn/{turn_id}"


def is_recurring(name: str) -> bool:
    """Return whether this rater can appear again. One named after a single turn cannot, and needs no row."""
    return not name.startswith("turn/")


def is_person(name: str | None) -> bool:
    """Return whether the rater is a person. Programs and judges are trusted through their API key."""
    return name is not None and not name.startswith(PROGRAM_PREFIXES)


def is_program(name: InstrumentedAttribute[str | None]) -> ColumnElement[bool]:
    """Return the condition that the rater is a program or a judge, for a column of names that are not null."""
    return or_(*(name.startswith(prefix, autoescape=True) for prefix in PROGRAM_PREFIXES))


def hash_name(project_id: str, name: str) -> str:
    """Return the SHA-256 that the audit log keeps in place of a name; the project's id prevents look-up tables."""
    return hashlib.sha256(f"{project_id}/{name}".encode()).hexdigest()


def pseudonym(project_id: str, kind: str, source_id: str) -> str:
    """Return what retention puts in place of a source's id: the same for all feedback of the source."""
    return hash_name(project_id, f"{kind}/{source_id}")
