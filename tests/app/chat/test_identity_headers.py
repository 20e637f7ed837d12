"""The end user and metadata by header, for front ends and gateways that cannot set the body."""

from typing import Any

import pytest

from app.chat.identity_headers import add_identity
from app.chat.schemas import parse_chat_request
from app.models import Turn
from app.projects.service import NO_CONSENT
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

HEADERS = {
    "x-attune-user": "openwebui:67a9",
    "x-attune-metadata-message-id": "m-1",
    "X-Attune-Metadata-Team": "caf%C3%A9%20support",
}


def read(headers: dict[str, str], **fields: Any) -> tuple[str | None, dict[str, str]]:
    request = parse_chat_request({"model": "shop", "messages": [{"role": "user", "content": "hi"}], **fields})
    request = add_identity(request, headers)
    return request.end_user, request.metadata


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        (HEADERS, {}, ("openwebui:67a9", {"message-id": "m-1", "team": "café support"})),
        ({}, {"user": "u-1", "metadata": {"a": "1"}}, ("u-1", {"a": "1"})),
        # The body wins.
        (HEADERS, {"user": "u-1"}, ("u-1", {"message-id": "m-1", "team": "café support"})),
        (HEADERS, {"safety_identifier": "s-1"}, ("s-1", {"message-id": "m-1", "team": "café support"})),
        (
            HEADERS,
            {"metadata": {"message-id": "mine", "order": "7"}},
            ("openwebui:67a9", {"message-id": "mine", "order": "7", "team": "café support"}),
        ),
        # Nothing, and what a front end did not fill in.
        ({"x-attune-user": "", "x-attune-metadata-message-id": " "}, {}, (None, {})),
        ({"x-attune-user": "{{USER_ID}}", "x-attune-metadata-message-id": "%7B%7BMESSAGE_ID%7D%7D"}, {}, (None, {})),
        ({"x-attune-metadata": "x", "x-other-metadata-a": "1"}, {}, (None, {})),
        ({"x-attune-metadata-share": "50%", "x-attune-user": "a%zz"}, {}, ("a%zz", {"share": "50%"})),
    ],
)
def test_headers_add_what_the_body_lacks(
    headers: dict[str, str], fields: dict[str, Any], expected: tuple[str | None, dict[str, str]]
) -> None:
    assert read(headers, **fields) == expected


MANY = {f"x-attune-metadata-k{number}": "1" for number in range(9)}


@pytest.mark.parametrize(
    ("headers", "metadata", "param", "message"),
    [
        ({"x-attune-user": "u" * 513}, {}, "x-attune-user", "at most 512"),
        ({"x-attune-user": "a%00b"}, {}, "x-attune-user", "NUL"),
        ({"x-attune-metadata-a": "u" * 513}, {}, "x-attune-metadata-a", "at most 512"),
        ({f"x-attune-metadata-{'k' * 65}": "1"}, {}, f"x-attune-metadata-{'k' * 65}", "1 to 64"),
        ({"x-attune-metadata-": "1"}, {}, "x-attune-metadata-", "1 to 64"),
        (MANY, {f"b{number}": "1" for number in range(8)}, "metadata", "17 pairs together"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_limits_are_those_of_the_body(
    harness: Harness,
    scripted: ScriptedEngine,
    headers: dict[str, str],
    metadata: dict[str, str],
    param: str,
    message: str,
    path: str,
) -> None:
    body: dict[str, Any] = {"model": "shop", "metadata": metadata}
    body |= {"input": "hi"} if "responses" in path else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await harness.api.post(path, json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]
    assert await harness.all(Turn) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_turn_is_found_by_the_metadata_of_a_header(
    harness: Harness, scripted: ScriptedEngine, path: str, stream: bool
) -> None:
    body: dict[str, Any] = {"model": "shop", "stream": stream}
    body |= {"input": "hi"} if "responses" in path else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await harness.api.post(path, json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    turn: Turn = await harness.get(Turn, answer.headers["x-completion-id"])
    assert (turn.end_user, turn.request_metadata) == (
        "openwebui:67a9",
        {"message-id": "m-1", "team": "café support"},
    )
    vote = {"kind": "binary", "value": True, "target": {"metadata": {"message-id": "m-1"}}}
    answer = await harness.api.post("/v1/feedback", json=vote)
    assert answer.json()["completion_id"] == turn.id, answer.text


async def test_consent_and_tasks_may_be_named_by_header(harness: Harness, scripted: ScriptedEngine) -> None:
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
    reasons = []
    for name, value in [("attune_train", "false"), ("task", "title_generation")]:
        answer = await harness.api.post("/v1/chat/completions", json=body, headers={f"x-attune-metadata-{name}": value})
        turn: Turn = await harness.get(Turn, answer.json()["id"])
        reasons.append(turn.exclusion_reason)
    assert reasons == [NO_CONSENT, "task: title_generation"]
