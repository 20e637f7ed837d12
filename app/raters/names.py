"""What raters are called: as the feedback names them, or for whose turn it was."""

PERSON = "HUMAN"
END_USER = "end-user"
PROGRAMS = ("CODE/", "LLM_JUDGE/")
LONGEST = 320  # as the tables hold them


def spoken(kind: str, source_id: str | None) -> str:
    """Example: ("HUMAN", "user-7") -> "HUMAN/user-7"; a program may do without an id."""
    return f"{kind}/{source_id or ''}"


def end_user(name: str) -> str:
    return f"{END_USER}/{name}"[:LONGEST]


def voice(end_user_name: str | None, conversation_id: str | None, turn_id: str) -> str:
    """The person at the other end of a turn, as far as it tells."""
    if end_user_name:
        return end_user(end_user_name)
    return of_conversation(conversation_id) if conversation_id else of_turn(turn_id)


def of_conversation(conversation_id: str) -> str:
    return f"conversation/{conversation_id}"


def of_turn(turn_id: str) -> str:
    return f"turn/{turn_id}"


def comes_back(name: str) -> bool:
    """Whoever is named after a single turn never does: a row of theirs would be a row a thumb."""
    return not name.startswith("turn/")


def is_person(name: str | None) -> bool:
    """Programs and judges are answered for by the key that lets them in."""
    return name is not None and not name.startswith(PROGRAMS)
