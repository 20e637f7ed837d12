"""POST /v1/messages: Anthropic's Messages API for clients, and a recorded chat behind it."""

import hashlib
import json
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from app.models import Turn, TurnState
from tests.app.messages.test_events import put_together
from tests.support.deployment import Harness
from tests.support.hang_up import hang_up
from tests.support.scripted_engine import ScriptedEngine

REQUEST: dict[str, Any] = {
    "model": "shop",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "When are you open?"}],
}
TOOL = {"name": "order_status", "input_schema": {"type": "object"}}
both_modes = pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])


async def ask(harness: Harness, headers: dict[str, str] | None = None, **fields: Any) -> httpx2.Response:
    return await harness.api.post("/v1/messages", json=REQUEST | fields, headers=headers)


def read_events(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the events of a stream. Each has its name and its data; there is no [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def read_message(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    streamed = response.headers["content-type"].startswith("text/event-stream")
    return put_together(read_events(response)) if streamed else response.json()


async def turn_of(harness: Harness, message: dict[str, Any]) -> Turn:
    turn: Turn = await harness.get(Turn, message["id"].replace("msg_", "chatcmpl-"))
    return turn


@both_modes
async def test_message_is_recorded_as_completion(harness: Harness, scripted: ScriptedEngine, stream: bool) -> None:
    metadata = {"user_id": "ada", "visit": "1"}
    response = await ask(harness, system="Be kind.", temperature=0.7, metadata=metadata, stream=stream)
    message = read_message(response)
    turn = await turn_of(harness, message)
    assert response.headers["x-completion-id"] == turn.id and response.headers["x-policy-version"] == "shop@v0"
    assert response.headers["request-id"] == response.headers["x-request-id"] == turn.id.replace("chatcmpl-", "req-")
    assert (turn.state, turn.exclusion_reason, turn.stream) == (TurnState.DONE, None, stream)
    assert (turn.sampling["temperature"], turn.sampling["max_tokens"]) == (0.7, 200)
    assert (turn.end_user, turn.request_metadata) == ("ada", {"visit": "1"})
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "shop@v0")
    assert message["content"] == [{"type": "text", "text": scripted.reply_text}]
    assert message["stop_reason"] == "end_turn"
    assert message["usage"]["output_tokens"] == len(turn.output_ids or []) == len(turn.logprobs or [])
    assert message["usage"]["input_tokens"] == len(await harness.prompt_ids(turn.id))
    assert (await harness.messages(turn.id))[0] == {"role": "system", "content": "Be kind."}


async def test_streamed_and_whole_messages_are_equal(harness: Harness, scripted: ScriptedEngine) -> None:
    async def both(**fields: Any) -> dict[str, Any]:
        whole, streamed = [read_message(await ask(harness, **fields, stream=mode)) for mode in (False, True)]
        assert whole.pop("id") != streamed.pop("id")
        assert whole == streamed
        return whole

    await both()
    scripted.reply_text = "<think>\nFriday?\n</think>\n\nWe open at nine."
    thought = await both(thinking={"type": "adaptive"})
    assert [block["type"] for block in thought["content"]] == ["thinking", "text"]
    cut = await both(max_tokens=2)
    assert cut["stop_reason"] == "max_tokens"
    scripted.reply_text, scripted.matched_stop = "We open", "at"
    stopped = await both(stop_sequences=["at"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "at")
    scripted.reply_text, scripted.matched_stop = "", 2
    assert (await both())["content"] == [{"type": "text", "text": ""}]
    scripted.tool_call, scripted.num_tool_calls = ("order_status", '{"order_id": "7"}'), 2
    called = await both(tools=[TOOL])
    assert [block["input"] for block in called["content"]] == [{"order_id": "7"}] * 2
    assert called["stop_reason"] == "tool_use"
    scripted.tool_call, scripted.finish_reason = ("order_status", '{"order_id": "7", "note": "ha'), "length"
    cut = await both(tools=[TOOL])
    assert cut["stop_reason"] == "max_tokens" and cut["content"][0]["input"] == {"order_id": "7"}


async def test_stream_begins_with_tokens_of_the_prompt(harness: Harness, scripted: ScriptedEngine) -> None:
    events = read_events(await ask(harness, stream=True))
    turn = await turn_of(harness, events[0]["message"])
    assert events[0]["message"]["usage"]["input_tokens"] == len(await harness.prompt_ids(turn.id))
    assert events[0]["message"]["usage"]["output_tokens"] <= 1


@both_modes
async def test_three_turns_with_a_tool_and_thinking_reuse_the_exact_prefix(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    """The blocks of a reply are sent back as they came: the recorded turn is found, and its tokens begin the prompt."""
    fields: dict[str, Any] = {"tools": [TOOL], "system": "Be kind.", "stream": stream}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Where is my order?"},
        {"role": "system", "content": "It is Friday."},
    ]
    scripted.tool_call = ("order_status", '{"order_id": "7"}')
    first = read_message(await ask(harness, **fields, messages=messages))
    [use] = first["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "shipped"}]}
    messages += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Be brief."}]},
    ]
    scripted.tool_call, scripted.reply_text = None, "<think>\nShipped.\n</think>\n\nIt is on its way."
    second = read_message(await ask(harness, **fields, messages=messages))
    assert [block["type"] for block in second["content"]] == ["thinking", "text"]
    marked = {"type": "text", "text": "Thanks!", "cache_control": {"type": "ephemeral"}}
    messages += [{"role": "assistant", "content": second["content"]}, {"role": "user", "content": [marked]}]
    third = read_message(await ask(harness, **fields, messages=messages))
    turns = [await turn_of(harness, message) for message in (first, second, third)]
    assert [turn.parent_id for turn in turns] == [None, turns[0].id, turns[1].id]
    assert [turn.prefix_reuse for turn in turns] == [None, "exact", "exact"]
    assert len({turn.conversation_id for turn in turns}) == 1
    for parent, turn in pairwise(turns):
        recorded = [*await harness.prompt_ids(parent.id), *(parent.output_ids or [])]
        assert (await harness.prompt_ids(turn.id))[: len(recorded)] == recorded
    assert [message["role"] for message in await harness.messages(turns[2].id)] == [
        "system", "user", "system", "assistant", "tool", "user", "assistant", "user",
    ]  # fmt: skip


async def test_system_joins_the_leading_one_where_the_template_takes_it_only_there(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    scripted.takes_late_system = False
    messages = [*REQUEST["messages"], {"role": "system", "content": "It is Friday."}]
    message = read_message(await ask(harness, system="Be kind.", messages=messages))
    turn = await turn_of(harness, message)
    assert await harness.messages(turn.id) == [
        {"role": "system", "content": "Be kind.\n\nIt is Friday."},
        REQUEST["messages"][0],
    ]
    scripted.requests.clear()
    count = await harness.api.post("/v1/messages/count_tokens", json={"model": "shop", "messages": messages})
    assert count.status_code == 200, count.text


async def test_tokens_are_counted_without_generating(harness: Harness, scripted: ScriptedEngine) -> None:
    message = read_message(await ask(harness, system="Be kind.", tools=[TOOL]))
    body = {name: REQUEST[name] for name in ("model", "messages")} | {"system": "Be kind.", "tools": [TOOL]}
    response = await harness.api.post("/v1/messages/count_tokens?beta=true", json=body)
    assert response.json() == {"input_tokens": message["usage"]["input_tokens"]}
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert len(scripted.requests) == len(await harness.all(Turn)) == 1
    unknown = await harness.api.post("/v1/messages/count_tokens", json=body | {"model": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


async def test_feedback_by_message_id_and_by_metadata(harness: Harness, scripted: ScriptedEngine) -> None:
    message = read_message(await ask(harness, metadata={"visit": "1"}))
    vote = await harness.vote(message["id"])
    assert (vote.status_code, vote.json()["completion_id"]) == (201, message["id"].replace("msg_", "chatcmpl-"))
    target = {"target": {"metadata": {"visit": "1"}}, "kind": "binary", "value": False}
    headers = {"authorization": "", "x-api-key": harness.key}
    vote = await harness.api.post("/v1/feedback", json=target, headers=headers)
    assert vote.status_code == 201, vote.text
    stored = await harness.api.get(f"/v1/chat/completions/{message['id']}")
    assert stored.json()["choices"][0]["message"]["content"] == scripted.reply_text


async def test_session_is_the_conversation_and_long_user_id_is_hashed(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    id = json.dumps({"device_id": "d" * 64, "session_id": "s-1"})
    response = await ask(harness, {"x-claude-code-session-id": "s-1"}, metadata={"user_id": id})
    turn = await turn_of(harness, read_message(response))
    assert (turn.conversation_id, turn.end_user) == ("s-1", hashlib.sha256(id.encode()).hexdigest())
    assert response.headers["x-conversation-id"] == "s-1"
    named = await ask(harness, {"x-claude-code-session-id": "s-1", "x-conversation-id": "ada-1"})
    assert (await turn_of(harness, read_message(named))).conversation_id == "ada-1"


async def test_length_limit_is_a_ceiling(harness: Harness, scripted: ScriptedEngine) -> None:
    turn = await turn_of(harness, read_message(await ask(harness, max_tokens=32_000)))
    assert turn.sampling["max_tokens"] == harness.settings.limits.max_output_tokens
    refused = await harness.api.post(
        "/v1/chat/completions", json={"model": "shop", "messages": REQUEST["messages"], "max_tokens": 32_000}
    )
    assert refused.status_code == 400


async def test_room_behind_the_prompt_is_the_ceiling(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.context_length = 120
    turn = await turn_of(harness, read_message(await ask(harness, max_tokens=5000)))
    assert turn.sampling["max_tokens"] == 120 - len(await harness.prompt_ids(turn.id)) > 0
    response = await ask(harness, system="x" * 200)
    assert_error(response, 400, "invalid_request_error", "prompt is too long: messages: The prompt has")


async def test_top_k_is_sampled_from_and_excludes_turn(harness: Harness, scripted: ScriptedEngine) -> None:
    turn = await turn_of(harness, read_message(await ask(harness, top_k=5)))
    assert turn.sampling["top_k"] == 5 == scripted.requests[-1]["top_k"]
    assert "top-k truncated" in (turn.exclusion_reason or "")
    whole = await turn_of(harness, read_message(await ask(harness, top_k=0)))
    assert (whole.sampling["top_k"], whole.exclusion_reason) == (-1, None)


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", None])
@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_key_is_taken_from_either_header(
    harness: Harness, scripted: ScriptedEngine, header: str, version: str | None
) -> None:
    headers = {"authorization": "", "anthropic-beta": "context-management-2025-06-27", "x-app": "cli"}
    headers[header] = harness.key if header == "x-api-key" else f"Bearer {harness.key}"
    headers |= {"anthropic-version": version} if version else {}
    response = await harness.api.post("/v1/messages?beta=true", json=REQUEST, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer wrong"}, {"authorization": "", "x-api-key": "wrong"}, {"authorization": ""}],
    ids=["bearer", "x-api-key", "none"],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_api_key_is_required(harness: Harness, headers: dict[str, str], path: str) -> None:
    response = await harness.api.post(path, json=REQUEST, headers=headers)
    assert_error(response, 401, "authentication_error", "API key")


def assert_error(response: httpx2.Response, status: int, type: str, part: str) -> None:
    body = response.json()
    assert response.status_code == status and body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error" and body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == type and part in body["error"]["message"], body
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


async def test_errors_have_the_form_of_anthropic_and_name_the_place(harness: Harness, scripted: ScriptedEngine) -> None:
    image = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]}
    schema = {"type": "json_schema", "schema": {"title": "x" * 33_000}}
    wrong: list[tuple[dict[str, Any], int, str, str]] = [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": [image]}, 400, "invalid_request_error", "messages.0.content.0: 'image'"),
        ({"surprise": 1}, 400, "invalid_request_error", "'surprise'"),
        ({"model": "nobody"}, 404, "not_found_error", "nobody"),
        ({"output_config": {"format": schema}}, 400, "invalid_request_error", "output_config.format.schema"),
        ({"system": "x" * 400_001}, 400, "invalid_request_error", "prompt is too long: Messages"),
        ({"tools": [TOOL, TOOL]}, 400, "invalid_request_error", "the same name"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"metadata": {"a" * 65: "x"}}, 400, "invalid_request_error", "metadata"),
        ({"metadata": {"conversation_id": "x" * 300}}, 400, "invalid_request_error", "conversation"),
        ({"system": "x" * 5_000_000}, 413, "request_too_large", "bytes"),
    ]
    for fields, status, type, part in wrong:
        assert_error(await ask(harness, **fields), status, type, part)
    assert scripted.requests == [] and await harness.all(Turn) == []
    broken = await harness.api.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert_error(broken, 400, "invalid_request_error", "not valid JSON")
    assert_error(await harness.api.get("/v1/messages"), 405, "invalid_request_error", "Method Not Allowed")
    for path in ("/v1/messages/batches", "/v1/messages/count_tokens/x"):
        assert_error(await harness.api.post(path, json={}), 404, "not_found_error", path)
    other = await harness.api.post("/v1/messagesx", json={})
    assert other.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_scope_and_limits_are_errors_of_the_same_form(harness: Harness, scripted: ScriptedEngine) -> None:
    key = (await harness.api.post("/v1/keys", json={"scopes": ["viewer"]})).json()["key"]
    assert_error(await ask(harness, {"x-api-key": key, "authorization": ""}), 403, "permission_error", "chat")
    limited = (await harness.api.post("/v1/keys", json={"scopes": ["chat"], "requests_per_minute": 1})).json()["key"]
    answers = [await ask(harness, {"x-api-key": limited, "authorization": ""}) for _ in range(2)]
    assert answers[0].status_code == 200
    assert_error(answers[1], 429, "rate_limit_error", "minute")
    assert answers[1].headers["retry-after"]


@both_modes
async def test_engine_refusal_is_http_status_also_when_streamed(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.refuse_status = 503
    response = await ask(harness, stream=stream)
    assert_error(response, 503, "overloaded_error", "")
    assert response.headers["retry-after"] and response.headers["x-completion-id"]


async def test_broken_stream_ends_with_an_error_event_and_is_recorded(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    scripted.drop_after_tokens = 3
    response = await ask(harness, stream=True)
    *begun, last = read_events(response)
    assert begun[0]["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert "closed the connection" in last["error"]["message"] and last["request_id"] == response.headers["request-id"]
    turn = await harness.wait_for_turn()
    assert (turn.state, turn.finish_reason) == (TurnState.FAILED, "error")


@both_modes
async def test_client_disconnect_aborts_engine(
    harness: Harness, scripted: ScriptedEngine, live_url: str, stream: bool
) -> None:
    request, headers = REQUEST | {"max_tokens": 600}, {"x-api-key": harness.key}
    async with httpx2.AsyncClient(base_url=live_url, headers=headers, trust_env=False) as client:
        await hang_up(client, scripted, "/v1/messages", request, "text_delta" if stream else None)
    turn = await harness.wait_for_turn()
    assert (turn.state, turn.finish_reason) == (TurnState.ABORTED, "client_disconnect")
    assert turn.id in scripted.aborted and turn.output_ids and len(turn.output_ids) < 450


async def test_models_have_the_form_of_the_client(harness: Harness) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await harness.api.get("/v1/models?limit=20", headers=headers)).json()
    [first, *_] = listed["data"]
    assert listed.keys() == {"data", "has_more", "first_id", "last_id"} and listed["has_more"] is False
    assert (first["type"], first["id"], first["display_name"]) == ("model", "shop", "shop")
    assert first["created_at"].endswith("Z") and listed["first_id"] == "shop"
    assert (await harness.api.get("/v1/models/shop", headers=headers)).json() == first
    assert (await harness.api.get("/v1/models")).json()["object"] == "list"
    assert (await harness.api.get("/v1/models/shop")).json()["object"] == "model"


async def test_root_answers_a_probe_and_nothing_else(harness: Harness) -> None:
    assert (await harness.api.head("/")).status_code == 200
    for method in ("GET", "POST"):
        response = await harness.api.request(method, "/")
        assert response.status_code == 404 and f"There is no route '{method} /'" in response.json()["error"]["message"]
