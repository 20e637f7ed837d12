"""Chat over HTTP: OpenAI's API for clients, and every turn recorded in tokens."""

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest

from app.models import Engine, EngineState, Turn, TurnState, VersionState
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trained_versions import publish

MESSAGES = [{"role": "user", "content": "When are you open?"}]


async def ask(harness: Harness, **fields: Any) -> httpx2.Response:
    return await harness.api.post("/v1/chat/completions", json={"model": "shop", "messages": MESSAGES, **fields})


def chunks(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_reply_is_recorded_exactly(harness: Harness, scripted: ScriptedEngine) -> None:
    response = await ask(harness, temperature=0.7, max_tokens=50)
    body = response.json()
    turn: Turn = await harness.get(Turn, body["id"])
    assert (response.status_code, body["model"], body["choices"][0]["finish_reason"]) == (200, "shop@v0", "stop")
    assert response.headers["x-completion-id"] == body["id"] == scripted.requests[0]["rid"]
    assert response.headers["x-policy-version"] == "shop@v0"
    assert turn.state == TurnState.DONE and turn.exclusion_reason is None
    assert len(turn.output_ids or []) == len(turn.logprobs or []) == body["usage"]["completion_tokens"]
    assert turn.own_prompt_ids and turn.reply == {"role": "assistant", "content": scripted.reply_text}
    assert (turn.sampling["temperature"], turn.sampling["max_tokens"]) == (0.7, 50)


async def test_streamed_reply_is_recorded_exactly(harness: Harness, scripted: ScriptedEngine) -> None:
    completion = await ask(harness)
    response = await ask(harness, stream=True, stream_options={"include_usage": True})
    parts = chunks(response)
    text = "".join(choice["delta"].get("content") or "" for part in parts for choice in part["choices"])
    assert text == scripted.reply_text
    assert {part["id"] for part in parts} == {response.headers["x-completion-id"]}
    assert {part["model"] for part in parts} == {"shop@v0"}
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] > 0
    assert all("sglext" not in part for part in parts)
    first, second = await harness.get(Turn, completion.json()["id"]), await harness.get(Turn, parts[0]["id"])
    assert (second.own_prompt_ids, second.output_ids, second.logprobs) == (
        first.own_prompt_ids,
        first.output_ids,
        first.logprobs,
    )
    assert (second.reply, second.finish_reason, second.exclusion_reason) == (first.reply, "stop", None)


async def test_turn_is_recorded_before_first_byte(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.seconds_per_token = 0.05
    body = {"model": "shop", "messages": MESSAGES, "stream": True}
    async with harness.api.stream("POST", "/v1/chat/completions", json=body) as response:
        assert (await harness.vote(response.headers["x-completion-id"])).status_code == 201


async def test_request_goes_to_serving_version(harness: Harness, scripted: ScriptedEngine) -> None:
    first = await publish(harness)
    await publish(harness)
    scripted.adapters = {"shop-v1": "/nowhere/shop-v1", "shop-v2": "/nowhere/shop-v2"}
    request_models = {
        "shop": "shop-v2",
        "shop@stable": "shop-v2",
        "shop@previous": "shop-v1",
        "shop@v1": "shop-v1",
        "shop@v0": None,
    }
    for model, adapter in request_models.items():
        response = await ask(harness, model=model)
        assert scripted.requests[-1].get("lora_path") == adapter
        assert response.headers["x-policy-version"] == f"shop@v{adapter[-1] if adapter else 0}"
    turn = await harness.get(Turn, (await ask(harness, model="shop@v1")).json()["id"])
    assert turn.version_id == first.id


@pytest.mark.parametrize("model", ["nobody", "shop@v9", "shop@canary", "shop@previous", "shop@", "shop@v1x"])
async def test_unknown_version_is_404(harness: Harness, scripted: ScriptedEngine, model: str) -> None:
    response = await ask(harness, model=model)
    if model == "shop@":
        assert response.status_code == 200
        return
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert await harness.all(Turn) == []


async def test_unloaded_version_is_404_and_unloaded_serving_version_503(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    version = await publish(harness, loaded=False)
    response = await ask(harness)
    assert response.status_code == 503 and "retry-after" in response.headers, "the client made no mistake"
    response = await ask(harness, model=f"shop@v{version.number}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    rejected = await harness.version(VersionState.REJECTED)
    assert (await ask(harness, model=f"shop@v{rejected.number}")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_unreachable_engine_is_503_with_retry_after_and_recorded(harness: Harness, stream: bool) -> None:
    response = await ask(harness, stream=stream)
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    turn = await harness.get(Turn, response.headers["x-completion-id"])
    assert turn.state == TurnState.FAILED and "cannot be reached" in turn.exclusion_reason


async def test_chat_without_ready_engine_is_503(harness: Harness) -> None:
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).state = EngineState.STARTING
    response = await ask(harness)
    assert response.status_code == 503 and "retry-after" in response.headers


async def test_broken_engine_connection_ends_stream_with_error(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.drop_after_tokens = 3
    response = await ask(harness, stream=True)
    parts = chunks(response)
    assert response.status_code == 200 and set(parts[-1]["error"]) == {"message", "type", "param", "code"}
    turn = await harness.get(Turn, response.headers["x-completion-id"])
    assert (turn.state, turn.finish_reason) == (TurnState.FAILED, "error")
    assert turn.exclusion_reason and turn.reply["content"], "the text until then is recorded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("engine_status", "status", "state", "finish_reason"),
    [
        (400, 400, TurnState.REFUSED, "refused"),
        (413, 400, TurnState.REFUSED, "refused"),
        (422, 400, TurnState.REFUSED, "refused"),
        (401, 502, TurnState.FAILED, "error"),  # the service's own key is wrong
        (404, 502, TurnState.FAILED, "error"),
        (429, 503, TurnState.FAILED, "error"),
        (500, 503, TurnState.FAILED, "error"),
        (503, 503, TurnState.FAILED, "error"),
    ],
)
async def test_refusal_by_the_engine_is_no_failure(
    harness: Harness,
    scripted: ScriptedEngine,
    stream: bool,
    engine_status: int,
    status: int,
    state: TurnState,
    finish_reason: str,
) -> None:
    scripted.refuse_status = engine_status
    response = await ask(harness, stream=stream, max_tokens=8)
    error_type = "invalid_request_error" if status == 400 else "server_error"
    assert (response.status_code, response.json()["error"]["type"]) == (status, error_type)
    turn = await harness.get(Turn, response.headers["x-completion-id"])
    assert (turn.state, turn.finish_reason) == (state, finish_reason)
    is_refused = state == TurnState.REFUSED
    assert (turn.exclusion_reason == "the engine refused the request: the script says no") is is_refused
    view = (await harness.api.get(f"/v1/chat/completions/{turn.id}")).json()
    assert (view["status"], view["choices"]) == (state, [])
    listed = (await harness.api.get("/v1/turns", params={"state": "refused"})).json()["data"]
    codes = [item["exclusion"]["code"] for item in listed]
    assert codes == (["refused"] if is_refused else [])


@pytest.mark.parametrize(
    ("error", "state"),
    [((0, 400), TurnState.REFUSED), ((0, 500), TurnState.FAILED), ((2, 400), TurnState.FAILED)],
)
async def test_error_within_a_stream_is_a_refusal_only_before_the_first_token(
    harness: Harness, scripted: ScriptedEngine, error: tuple[int, int], state: TurnState
) -> None:
    scripted.error_after_tokens = error
    response = await ask(harness, stream=True)
    assert response.status_code == 200 and "error" in chunks(response)[-1]
    assert (await harness.get(Turn, response.headers["x-completion-id"])).state == state


@pytest.mark.parametrize(
    ("switch", "exclusion_reason"), [({"nan_at": 2}, "not a finite number"), ({"omit_last_logprob": True}, "log-probs")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_incomplete_capture_is_answered_and_excluded(
    harness: Harness, scripted: ScriptedEngine, switch: dict[str, Any], exclusion_reason: str, stream: bool
) -> None:
    for name, value in switch.items():
        setattr(scripted, name, value)
    response = await ask(harness, stream=stream)
    assert response.status_code == 200
    assert exclusion_reason in (await harness.get(Turn, response.headers["x-completion-id"])).exclusion_reason


@pytest.mark.parametrize(
    ("fields", "exclusion_reason"),
    [
        ({"temperature": 0}, "greedy"),
        ({"top_p": 0.9}, "top-p"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"temperature": 0.7, "seed": 3, "stop": ["."]}, None),
    ],
)
async def test_modified_sampling_is_excluded(
    harness: Harness, scripted: ScriptedEngine, fields: dict[str, Any], exclusion_reason: str | None
) -> None:
    turn = await harness.get(Turn, (await ask(harness, **fields)).json()["id"])
    assert (turn.exclusion_reason is None) if exclusion_reason is None else (exclusion_reason in turn.exclusion_reason)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": []}, "invalid_value"),
        ({"messages": "hi"}, "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "invalid_value"),
        ({"messages": [{"role": "user"}]}, "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_parameter"),
        ({"temperature": 3}, "invalid_value"),
        ({"temperature": "hot"}, "invalid_value"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "invalid_value"),
        ({"stop": "x" * 257}, "invalid_value"),
        ({"stop": ["a", "x" * 257]}, "invalid_value"),
        ({"stream": "yes"}, "invalid_value"),
        ({"n": 0}, "invalid_value"),
        ({"n": 17}, "invalid_value"),
        ({"n": 16, "max_tokens": 513}, "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 400_001}]}, "context_length_exceeded"),
        ({"response_format": {"type": "yaml"}}, "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "invalid_value"),
        ({"logit_bias": {"seven": 1}}, "invalid_value"),
        ({"logit_bias": {"7": 101}}, "invalid_value"),
        ({"top_logprobs": 2}, "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value"),
        ({"tool_choice": "required"}, "invalid_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools"}}, "unsupported_parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "unsupported_parameter"),
        ({"functions": [{"name": "x"}]}, "unsupported_parameter"),
        ({"modalities": ["audio"]}, "unsupported_parameter"),
        ({"prediction": {"type": "content", "content": "x"}}, "unsupported_parameter"),
        ({"web_search_options": {}}, "unsupported_parameter"),
        ({"metadata": {"k": 7}}, "invalid_value"),
        ({"metadata": {"k": "x" * 513}}, "invalid_value"),
        ({"metadata": {str(at): "x" for at in range(17)}}, "invalid_value"),
        ({"chat_template_kwargs": {}}, "unknown_parameter"),
        ({"lora_path": "shop-v1"}, "unknown_parameter"),
        ({"input_ids": [1, 2]}, "unknown_parameter"),
        ({"custom_logit_processor": "x"}, "unknown_parameter"),
    ],
)
async def test_invalid_or_unsupported_parameter_is_named(
    harness: Harness, scripted: ScriptedEngine, fields: dict[str, Any], code: str
) -> None:
    response = await ask(harness, **fields)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)
    assert scripted.requests == [] and await harness.all(Turn) == []


def function_tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def schema_of(size: int) -> dict[str, Any]:
    """Return a JSON schema of `size` bytes."""
    return {"title": "x" * (size - len('{"title":""}'))}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}


MAX_SCHEMA = 32 * 1024


@pytest.mark.parametrize(
    ("fields", "param", "advice"),
    [
        ({"stop": ["a", "x" * 257]}, "stop", "at most 256 characters"),
        ({"tools": [function_tool(parameters=schema_of(MAX_SCHEMA + 1))]}, "tools.0.function.parameters", "32768"),
        (
            {"response_format": json_schema(schema_of(MAX_SCHEMA + 1))},
            "response_format.json_schema.schema",
            "32768",
        ),
    ],
)
async def test_engine_input_beyond_limit_is_refused_with_advice(
    harness: Harness, scripted: ScriptedEngine, fields: dict[str, Any], param: str, advice: str
) -> None:
    error = (await ask(harness, **fields)).json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert advice in error["message"]
    assert scripted.requests == []


async def test_engine_input_at_its_limit_is_accepted(harness: Harness, scripted: ScriptedEngine) -> None:
    fields = {
        "stop": ["x" * 256, "é" * 256],
        "tools": [function_tool(parameters=schema_of(MAX_SCHEMA))],
        "response_format": json_schema(schema_of(MAX_SCHEMA)),
    }
    assert (await ask(harness, **fields)).status_code == 200


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "x" * 300_000}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [function_tool(f"f{i}", parameters=schema_of(MAX_SCHEMA)) for i in range(13)]}, "tools"),
        ({"tools": [function_tool(description="x" * 400_000)]}, "tools"),
        ({"tools": [function_tool(description="x" * 400_000)], "tool_choice": "none"}, "tools"),
        (
            {
                "messages": [{"role": "user", "content": "x" * 390_000}],
                "response_format": json_schema(schema_of(9_999)),
            },
            "messages",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x" * 150_000},
                    {"role": "assistant", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "hi"},
                ]
            },
            "messages",
        ),
    ],
)
async def test_prompt_limit_counts_tools_schemas_and_tool_calls(
    harness: Harness, scripted: ScriptedEngine, fields: dict[str, Any], param: str
) -> None:
    error = (await ask(harness, **fields)).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "400000" in error["message"] and f"Shorten '{param}'" in error["message"]
    assert scripted.requests == []


@pytest.mark.parametrize(
    "content", ['{"model": "shop", "temperature": NaN}', '{"model": "\\ud800"}', "[]", "nonsense", ""]
)
async def test_invalid_json_is_400(harness: Harness, content: str) -> None:
    response = await harness.api.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_hints_are_accepted(harness: Harness, scripted: ScriptedEngine) -> None:
    response = await ask(
        harness, user="ada", metadata={"k": "v"}, n=1, store=True, service_tier="auto", temperature=None
    )
    assert response.status_code == 200
    assert "user" not in scripted.requests[0] and "metadata" not in scripted.requests[0]


async def test_stored_completion_can_be_read(harness: Harness, scripted: ScriptedEngine) -> None:
    body = (await ask(harness)).json()
    stored = (await harness.api.get(f"/v1/chat/completions/{body['id']}")).json()
    assert (stored["id"], stored["model"], stored["usage"]) == (body["id"], "shop@v0", body["usage"])
    assert stored["choices"][0]["message"]["content"] == scripted.reply_text
    assert (await harness.api.get("/v1/chat/completions/chatcmpl-nobody")).status_code == 404


async def test_every_error_has_request_id_and_error_object(harness: Harness) -> None:
    for path in ("/v1/models", "/v1/models/nobody", "/nowhere", "/readyz"):
        response = await harness.api.get(path)
        assert response.headers["x-request-id"]
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_openai_client_works(harness: Harness, scripted: ScriptedEngine, live_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live_url}/v1", api_key=harness.key) as client:
        messages: Any = MESSAGES
        completion = await client.chat.completions.create(model="shop", messages=messages)
        assert completion.choices[0].message.content == scripted.reply_text
        stream = await client.chat.completions.create(model="shop", messages=messages, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == scripted.reply_text
        assert [model.id async for model in client.models.list()] == ["shop", "shop@v0"]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody", messages=messages)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_aborts_engine_and_records_turn(
    harness: Harness, scripted: ScriptedEngine, live_url: str, stream: bool
) -> None:
    scripted.reply_text, scripted.seconds_per_token = "word " * 400, 0.02
    body = {"model": "shop", "messages": MESSAGES, "stream": stream, "max_tokens": 500}
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=live_url, headers=headers, timeout=60) as client:
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while not any(reply.output_ids for reply in list(scripted.running.values())):
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
    turn = await harness.wait_for_turn()
    assert scripted.aborted == {turn.id}
    assert (turn.state, turn.finish_reason) == (TurnState.ABORTED, "client_disconnect")
    assert turn.num_output_tokens is not None and turn.output_ids is not None and turn.logprobs is not None
    assert 0 < turn.num_output_tokens < 400 and len(turn.output_ids) == len(turn.logprobs)
    assert turn.exclusion_reason is None, "the reply until then may be trained on"


@pytest.mark.parametrize("tools", [[{}], [{"type": "function"}], [{"function": "x"}], [{"type": None}], "none", [1]])
@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_tools_are_refused(
    harness: Harness, scripted: ScriptedEngine, tools: Any, stream: bool
) -> None:
    response = await ask(harness, tools=tools, stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
    assert await harness.all(Turn) == []


async def test_tool_call_is_returned_and_recorded(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.tool_call = ("order_status", '{"order_id": "7"}')
    tools = [{"type": "function", "function": {"name": "order_status", "parameters": {"type": "object"}}}]
    for stream in (False, True):
        response = await ask(harness, tools=tools, stream=stream)
        turn = await harness.get(Turn, response.headers["x-completion-id"])
        [call] = turn.reply["tool_calls"]
        assert (turn.finish_reason, call["function"]["name"]) == ("tool_calls", "order_status")
        assert scripted.requests[-1]["tools"][0]["function"]["name"] == "order_status"


async def test_nul_is_replaced_in_text_and_kept_in_tokens(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.reply_text = "before\x00after"
    response = await ask(harness)
    turn = await harness.get(Turn, response.json()["id"])
    assert (response.status_code, turn.state, turn.reply["content"]) == (200, TurnState.DONE, "before\ufffdafter")
    assert turn.exclusion_reason is None and turn.output_ids


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/a%00b", "/v1/models/%00", "/v1/policies/%00", "/v1/feedback?completion_id=%00"]
)
async def test_path_with_nul_is_400(harness: Harness, path: str) -> None:
    response = await harness.api.get(path)
    assert response.status_code == 400 and response.headers["x-request-id"]
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("fields", [{"stop": "User:"}, {"stream": None}, {"logprobs": None}, {"stop": ["a", "b"]}])
async def test_messages_of_openai_clients_are_accepted(
    harness: Harness, scripted: ScriptedEngine, fields: dict[str, Any]
) -> None:
    assert (await ask(harness, **fields)).status_code == 200


async def test_turn_marked_lost_can_still_finish(harness: Harness, scripted: ScriptedEngine, live_url: str) -> None:
    scripted.is_blocked = lambda reply: True
    body = {"model": "shop", "messages": MESSAGES, "stream": True}
    headers = {"authorization": f"Bearer {harness.key}"}
    async with (
        httpx2.AsyncClient(base_url=live_url, headers=headers, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        async with harness.db.write() as session:
            turn = await session.get_one(Turn, response.headers["x-completion-id"])
            turn.state, turn.finish_reason = TurnState.ABORTED, "server_lost"
        scripted.is_blocked = lambda reply: False
        await response.aread()
    assert (await harness.get(Turn, turn.id)).state == TurnState.DONE


async def test_all_api_processes_follow_deployment_immediately(
    harness: Harness, scripted: ScriptedEngine, live_url: str
) -> None:
    await publish(harness)
    scripted.adapters = {"shop-v1": "/nowhere/shop-v1"}
    body = {"model": "shop", "messages": MESSAGES}
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=live_url, headers=headers, timeout=60) as other:
        for number in (0, 1, 0, 1):
            rollback = await harness.api.post("/v1/policies/shop/rollback", json={"version": number})
            assert rollback.status_code == 200
            await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)
            for api in (other, harness.api):
                response = await api.post("/v1/chat/completions", json=body)
                assert response.headers["x-policy-version"] == f"shop@v{number}"
