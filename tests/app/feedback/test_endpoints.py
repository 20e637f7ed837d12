"""Feedback over HTTP: committed before 201, recorded once, and clear errors for any body."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.models import Feedback
from tests.support.deployment import Harness

WORDS = st.sampled_from(["chatcmpl-known", "chatcmpl-other", "c", "up", "", "k" * 300, "a\u0000b", "é\U0001f600"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(), inner, max_size=3)
)
PAIRS = st.dictionaries(WORDS, WORDS, max_size=3)
CHOICE = st.fixed_dictionaries({"completion_id": WORDS}, optional={"choice_index": st.integers(-1, 200) | ANYTHING})
REFERENCE = WORDS | CHOICE
TARGET = CHOICE | st.fixed_dictionaries({"conversation_id": WORDS}) | st.fixed_dictionaries({"metadata": PAIRS})
KIND = st.sampled_from(
    ["binary", "rating", "score", "comparison", "ranking", "correction", "comment", "categorical", "withdrawal"]
)
VALUE = st.lists(REFERENCE | st.lists(REFERENCE, max_size=3), max_size=4) | st.floats(-2, 6) | ANYTHING
BODY = st.fixed_dictionaries(
    {"kind": KIND | ANYTHING, "value": VALUE},
    optional={
        "completion_id": WORDS | ANYTHING,
        "choice_index": st.integers(-1, 3) | ANYTHING,
        "target": TARGET | ANYTHING,
        "id": st.text(max_size=5) | ANYTHING,
        "name": WORDS | ANYTHING,
        "comment": st.text() | ANYTHING,
        "scale": st.lists(st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_size=3) | ANYTHING,
        "source": st.fixed_dictionaries({}, optional={"kind": WORDS, "id": WORDS}) | ANYTHING,
        "metadata": PAIRS | ANYTHING,
    },
)


async def test_feedback_is_committed_before_acknowledgement(harness: Harness) -> None:
    turn = await harness.turn()
    response = await harness.vote(turn.id, "down", comment="no", source={"kind": "HUMAN", "id": "ada"})
    assert response.status_code == 201
    [row] = await harness.all(Feedback)
    assert (row.turn_id, row.value, row.comment, row.source_id) == (turn.id, -1.0, "no", "ada")
    assert response.json()["id"] == row.id


async def test_score_is_between_minus_one_and_one(harness: Harness) -> None:
    turn = await harness.turn()
    response = await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "score", "value": 0.25})
    assert (response.status_code, response.json()["value"]) == (201, 0.25)


@pytest.mark.parametrize("where", ["id", "header"])
async def test_repeated_key_is_one_feedback(harness: Harness, where: str) -> None:
    turn = await harness.turn()
    body = {"completion_id": turn.id, "kind": "binary", "value": True}
    headers = {"Idempotency-Key": "k-1"} if where == "header" else {}
    body |= {"id": "k-1"} if where == "id" else {}
    first = await harness.api.post("/v1/feedback", json=body, headers=headers)
    again = await harness.api.post("/v1/feedback", json=body, headers=headers)
    other = await harness.api.post("/v1/feedback", json=body | {"value": False}, headers=headers)
    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 422)
    assert again.json() == first.json() | {"effective": True, "withdrawn": False}
    assert again.headers["idempotent-replayed"] == "true"
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    assert len(await harness.all(Feedback)) == 1


async def test_ten_concurrent_retries_are_one_feedback(harness: Harness) -> None:
    turn = await harness.turn()
    responses = await asyncio.gather(*[harness.vote(turn.id, id="k-2") for _ in range(10)])
    assert sorted(response.status_code for response in responses) == [200] * 9 + [201]
    assert len({response.json()["id"] for response in responses}) == 1
    assert len(await harness.all(Feedback)) == 1


async def test_unknown_completion_is_404(harness: Harness) -> None:
    response = await harness.vote("chatcmpl-nobody")
    assert response.status_code == 404
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_feedback_is_listed_by_completion(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.vote(turn.id, "up")
    await harness.vote(turn.id, "down")
    response = await harness.api.get("/v1/feedback", params={"completion_id": turn.id})
    assert [row["value"] for row in response.json()["data"]] == [1.0, -1.0]


@pytest.mark.parametrize(
    "value",
    ["2.0", "-1.01", "NaN", "Infinity", "1e999", "true", '"up"', "null", "[]", "{}", '"\\ud800"', '"\\u0000"', ""],
)
async def test_invalid_score_is_refused(harness: Harness, value: str) -> None:
    turn = await harness.turn()
    content = f'{{"completion_id": "{turn.id}", "kind": "score", "value": {value}}}'
    response = await harness.api.post("/v1/feedback", content=content)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert await harness.all(Feedback) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"comment": "\ud800"},
        {"comment": "a\x00b"},
        {"comment": 7},
        {"kind": "stars"},
        {"completion_id": 7},
        {"metadata": {"k": 1}},
        {"metadata": {"k" * 65: "v"}},
        {"source": {"kind": "GHOST"}},
        {"surprise": 1},
        {"id": ""},
        {"id": "x" * 300},
    ],
)
async def test_invalid_field_is_named(harness: Harness, fields: dict[str, object]) -> None:
    turn = await harness.turn()
    body = {"completion_id": turn.id, "kind": "binary", "value": True, **fields}
    response = await harness.api.post("/v1/feedback", content=json.dumps(body))
    assert response.status_code == 400, response.text
    assert await harness.all(Feedback) == []


async def test_body_of_ten_megabytes_is_413(harness: Harness) -> None:
    turn = await harness.turn()
    response = await harness.vote(turn.id, comment="x" * 10_000_000)
    assert response.status_code == 413
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_deeply_nested_body_is_refused(harness: Harness) -> None:
    response = await harness.api.post("/v1/feedback", content='{"metadata": ' + "[" * 900 + "]" * 900 + "}")
    assert response.status_code == 400


@pytest.mark.parametrize("headers", [{"authorization": ""}, {"authorization": "Bearer nope"}, {"authorization": "x"}])
async def test_unknown_api_key_is_401(harness: Harness, headers: dict[str, str]) -> None:
    response = await harness.api.post("/v1/feedback", json={}, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


@given(bodies=st.lists(BODY | ANYTHING, min_size=1, max_size=8))
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
async def test_any_body_is_accepted_or_refused_without_server_error(harness: Harness, bodies: list[Any]) -> None:
    if (await harness.api.get("/v1/feedback?completion_id=chatcmpl-known")).status_code == 404:
        await harness.turn(id="chatcmpl-known", completion_id="chatcmpl-known", conversation_id="c")
    for body in bodies:
        response = await harness.api.post("/v1/feedback", json=body)
        assert 200 <= response.status_code < 500, (body, response.text)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    response = await harness.api.post("/v1/feedback/batch", json={"items": bodies})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 200:
        assert all(result["status"] in (200, 201, 400, 404, 422) for result in response.json()["data"])
