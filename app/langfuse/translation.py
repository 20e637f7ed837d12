"""What a score of Langfuse says as feedback: its kind, its value and its source. `targets` finds what it is about."""

import re

from app.core.errors import BadRequest
from app.core.settings.service import LangfuseSettings
from app.langfuse.schemas import Score
from app.models import SourceKind

CONNECTOR = "langfuse"
PREFIX = f"{CONNECTOR}:"  # of keys and of sources
MAX_COMMENT, MAX_SOURCE_ID, MAX_FEEDBACK_NAME = 10_000, 255, 63
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
NO_NAME = re.compile(r"[^\w.-]+")  # what a name of feedback cannot hold
USER_KEYS = ("userId", "user_id", "user-id")


def to_key(score_id: str) -> str:
    """Return the sender's key of the feedback that a score is."""
    return PREFIX + score_id


def to_feedback(score: Score, score_id: str, settings: LangfuseSettings) -> dict[str, object]:
    """Return the body of the feedback, without its target. Raises BadRequest for a value of another type."""
    kind, value = _value_of(score, settings)
    is_person = score.name in settings.people
    user = score.find_metadata(*USER_KEYS) if is_person else score.name
    source: dict[str, object] = {"kind": SourceKind.HUMAN if is_person else SourceKind.CODE}
    if user is not None:
        source["id"] = f"{PREFIX}{user}"[:MAX_SOURCE_ID]
    body: dict[str, object] = {
        "kind": kind,
        "value": value,
        "key": to_key(score_id),
        "name": NO_NAME.sub("-", score.name).strip("-")[:MAX_FEEDBACK_NAME] or "score",
        "source": source,
        "metadata": _scalars(score.metadata),
    }
    if score.comment:
        body["comment"] = score.comment[:MAX_COMMENT]
    if score.sent_at is not None:
        body["sent_at"] = max(score.sent_at, 0.0)
    if kind == "rating":
        body["scale"] = list(settings.ranges[score.name])
    return body


def _value_of(score: Score, settings: LangfuseSettings) -> tuple[str, object]:
    """Return the kind and the value of the feedback.

    A number is a vote only where it is known to be one: a thumb of people, or a score whose range is set. 1 may be the
    best score or the worst, so any other number is stored as a label.
    """
    data_type = score.data_type or _infer_type(score.value)
    if data_type in ("CATEGORICAL", "TEXT", "CORRECTION"):
        if not isinstance(score.value, str):
            raise BadRequest(f"value: a {data_type} score has a text as its value", param="value", code="invalid_value")
        kinds = {"CATEGORICAL": "categorical", "TEXT": "comment", "CORRECTION": "correction"}
        return kinds[data_type], score.value
    if isinstance(score.value, str):
        raise BadRequest(f"value: a {data_type} score has a number as its value", param="value", code="invalid_value")
    number = float(score.value)
    if data_type == "BOOLEAN" and number not in (0.0, 1.0):
        raise BadRequest("value: a BOOLEAN score is 1 or 0", param="value", code="invalid_value")
    if score.name in settings.ranges:
        return "rating", number
    if score.name in settings.people and number in (-1.0, 0.0, 1.0):
        return "binary", number == 1.0
    if data_type == "BOOLEAN":
        return "categorical", "true" if number else "false"
    return "categorical", f"{number:.12g}"


def _infer_type(value: bool | float | str) -> str:
    if isinstance(value, str):
        return "CATEGORICAL"
    return "BOOLEAN" if isinstance(value, bool) else "NUMERIC"


def _scalars(metadata: object) -> dict[str, str]:
    """Return the texts, numbers and truth values in a score's metadata, as far as feedback has room for them."""
    values = metadata if isinstance(metadata, dict) else {}
    texts = {
        key: value if isinstance(value, str) else str(value)
        for key, value in values.items()
        if isinstance(value, str | int | float) and len(key) <= MAX_METADATA_KEY
    }
    short = [(key, text) for key, text in texts.items() if text and len(text) <= MAX_METADATA_VALUE]
    return dict(short[:MAX_METADATA])
