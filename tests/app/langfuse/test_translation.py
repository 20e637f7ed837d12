"""What a score says as feedback: kinds, sources, names, and what has no room."""

from typing import Any

import pytest

from app.core.errors import BadRequest
from app.core.settings.service import LangfuseSettings
from app.feedback.kinds import parse_feedback
from app.langfuse.schemas import Score
from app.langfuse.translation import to_feedback

SETTINGS = LangfuseSettings(ranges={"quality": (1, 5)}, people=["user-feedback", "thumbs"])


def translate(**fields: Any) -> dict[str, Any]:
    body = to_feedback(Score.model_validate({"name": "user-feedback", **fields}), "s-1", SETTINGS)
    parse_feedback({**body, "completion_id": "chatcmpl-1"})
    return body


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"value": 1, "dataType": "BOOLEAN"}, "binary", True),
        ({"value": 0, "dataType": "BOOLEAN"}, "binary", False),
        ({"value": 1.0}, "binary", True),
        ({"value": -1}, "binary", False),
        ({"value": True}, "binary", True),
        ({"value": 0.5}, "categorical", "0.5"),
        ({"value": 4, "name": "quality"}, "rating", 4.0),
        ({"value": 3, "name": "other"}, "categorical", "3"),
        ({"value": 1, "name": "is_toxic", "dataType": "BOOLEAN"}, "categorical", "true"),
        ({"value": "wrong language"}, "categorical", "wrong language"),
        ({"value": "Too long.", "dataType": "TEXT"}, "comment", "Too long."),
        ({"value": "We open at nine.", "dataType": "CORRECTION", "name": "output"}, "correction", "We open at nine."),
    ],
)
def test_kind_and_value(fields: dict[str, Any], kind: str, value: Any) -> None:
    body = translate(**fields)
    assert (body["kind"], body["value"]) == (kind, value)


@pytest.mark.parametrize(
    "fields",
    [
        {"value": "yes", "dataType": "BOOLEAN"},
        {"value": 2, "dataType": "BOOLEAN"},
        {"value": "4", "dataType": "NUMERIC"},
        {"value": 4, "dataType": "CATEGORICAL"},
        {"value": 1, "dataType": "CORRECTION"},
        {"value": 6, "name": "quality"},
    ],
)
def test_value_that_its_type_or_its_range_does_not_allow(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="value"):
        translate(**fields)


def test_source_is_the_person_or_the_program() -> None:
    for key in ("userId", "user_id", "user-id"):
        assert translate(value=1, metadata={key: "ada"})["source"] == {"kind": "HUMAN", "id": "langfuse:ada"}
    assert translate(value=1)["source"] == {"kind": "HUMAN"}
    judge = translate(value=4, name="quality", metadata={"userId": "ada"})
    assert judge["source"] == {"kind": "CODE", "id": "langfuse:quality"}


def test_what_feedback_has_no_room_for() -> None:
    metadata = {"tag": "short", "n": 3, "long": "x" * 513, "k" * 65: "x", "nested": {"a": 1}, "empty": "", "none": None}
    body = translate(
        value=1, comment="x" * 10_001, metadata={**metadata, **{f"k-{number}": "x" for number in range(20)}}
    )
    assert len(body["comment"]) == 10_000 and len(body["metadata"]) == 16
    assert body["metadata"].items() >= {("tag", "short"), ("n", "3"), ("k-0", "x")}
    for other in (None, "text", ["a"], 3):
        assert translate(value=1, metadata=other)["metadata"] == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Answer quality!", "Answer-quality"), ("质量", "质量"), ("!", "score"), ("a" * 80, "a" * 63)],
)
def test_name_is_one_of_feedback(name: str, expected: str) -> None:
    assert translate(value=1, name=name)["name"] == expected


def test_time_is_the_senders() -> None:
    assert translate(value=1, timestamp="2026-11-20T10:00:00Z")["sent_at"] == 1795168800.0
    assert translate(value=1, timestamp="2026-11-20T12:00:00+02:00")["sent_at"] == 1795168800.0
    assert translate(value=1, timestamp="2026-11-20T10:00:00")["sent_at"] == 1795168800.0
    assert "sent_at" not in translate(value=1)
