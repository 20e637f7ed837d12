"""Hints of other vendors: the request means the same with and without them, and other unknown keys are named."""

from copy import deepcopy
from typing import Any

import pytest

from app.chat import vendor_hints
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

HINT = {"type": "ephemeral"}
CHAT: dict[str, Any] = {
    "model": "shop",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": "Where is order 7?"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me look."}],
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "status", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sent"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "And order 8?"},
    ],
    "tools": [{"type": "function", "function": {"name": "status", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "status"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": {"type": "object"}}},
}
IN_CALLS = vendor_hints.ANYWHERE | {"index", "parsed_arguments"}
PLACES: dict[str, frozenset[str]] = {
    "": vendor_hints.IN_REQUESTS,
    "messages.0": vendor_hints.ANYWHERE,
    "messages.0.content.0": vendor_hints.IN_PARTS,
    "messages.2.content.0": vendor_hints.IN_PARTS,
    "messages.2.tool_calls.0": IN_CALLS,
    "messages.2.tool_calls.0.function": IN_CALLS,
    "messages.3.content.0": vendor_hints.IN_PARTS,
    "messages.4.content.0": vendor_hints.IN_PARTS,
    "tools.0": vendor_hints.IN_TOOLS,
    "tools.0.function": vendor_hints.IN_TOOLS,
    "tool_choice": vendor_hints.ANYWHERE,
    "tool_choice.function": vendor_hints.ANYWHERE,
    "response_format": vendor_hints.ANYWHERE,
    "response_format.json_schema": vendor_hints.ANYWHERE,
}
# Fields that belong to a message or a call in OpenAI's API, and are ignored with all that a template does not read.
LENIENT = ("messages.0", "messages.2.tool_calls.0", "messages.2.tool_calls.0.function")


def change(place: str, **fields: Any) -> dict[str, Any]:
    """Return the chat with more fields in one place."""
    body = deepcopy(CHAT)
    target: Any = body
    for part in filter(None, place.split(".")):
        target = target[int(part)] if part.isdigit() else target[part]
    target.update(fields)
    return body


async def ask(harness: Harness, scripted: ScriptedEngine, body: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine was asked."""
    scripted.requests.clear()
    response = await harness.api.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return {name: value for name, value in scripted.requests[0].items() if name not in ("rid", "seed")}


async def test_hints_change_nothing(harness: Harness, scripted: ScriptedEngine) -> None:
    plain = await ask(harness, scripted, CHAT)
    for place, names in PLACES.items():
        body = change(place, **dict.fromkeys(names, HINT))
        assert await ask(harness, scripted, body) == plain, place


@pytest.mark.parametrize("place", [place for place in PLACES if place not in LENIENT])
async def test_other_unknown_key_is_named_with_its_place(
    harness: Harness, scripted: ScriptedEngine, place: str
) -> None:
    error = (await harness.api.post("/v1/chat/completions", json=change(place, colour="red"))).json()["error"]
    path = f"{place}.colour".removeprefix(".")
    assert (error["code"], error["param"]) == ("unknown_parameter", path)
    assert error["message"] == f"Unknown parameter: '{path}'."


async def test_responses_api_ignores_the_same_hints(harness: Harness, scripted: ScriptedEngine) -> None:
    part = {"type": "input_text", "text": "hi", "cache_control": HINT}
    body = {
        "model": "shop",
        "input": [{"type": "message", "role": "user", "content": [part], "cache_control": HINT}],
        "tools": [{"type": "function", "name": "status", "cache_control": HINT}],
        "tool_choice": {"type": "function", "name": "status", "cache_control": HINT},
        "text": {"format": {"type": "text", "cache_control": HINT}, "cache_control": HINT},
        **dict.fromkeys(vendor_hints.IN_REQUESTS, HINT),
    }
    response = await harness.api.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    error = (await harness.api.post("/v1/responses", json=body | {"colour": "red"})).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "colour")


async def test_hint_leaves_the_continuation_of_a_conversation_exact(harness: Harness, scripted: ScriptedEngine) -> None:
    user = {"role": "user", "content": "When are you open?"}
    first = await harness.api.post("/v1/chat/completions", json={"model": "shop", "messages": [user]})
    reply = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
    marked = [user, reply | {"cache_control": HINT}, {"role": "user", "content": "And on Sunday?"}]
    marked[0] = {"role": "user", "content": [{"type": "text", "text": user["content"], "cache_control": HINT}]}
    second = await harness.api.post("/v1/chat/completions", json={"model": "shop", "messages": marked})
    assert second.headers["x-conversation-id"] == first.headers["x-conversation-id"]
