"""POST /v1/responses: OpenAI's Responses API for clients, and a recorded chat behind it."""

import json
from typing import Any

import httpx2
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.models import Turn, TurnState
from tests.support.deployment import Harness
from tests.support.hang_up import hang_up
from tests.support.scripted_engine import ScriptedEngine

REQUEST: dict[str, Any] = {"model": "shop", "input": "When are you open?"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "order_status", "parameters": {"type": "object"}}


async def ask(harness: Harness, **fields: Any) -> httpx2.Response:
    return await harness.api.post("/v1/responses", json=REQUEST | fields)


def read_events(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = response.text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


async def test_response_is_recorded_as_completion(harness: Harness, scripted: ScriptedEngine) -> None:
    response = await ask(
        harness, instructions="Be kind.", temperature=0.7, max_output_tokens=50, metadata={"visit": "1"}
    )
    body = response.json()
    Response.model_validate(body)
    turn: Turn = await harness.get(Turn, body["completion_id"])
    assert (response.status_code, body["status"], body["model"]) == (200, "completed", "shop@v0")
    assert response.headers["x-completion-id"] == turn.id == "chatcmpl-" + body["id"].removeprefix("resp_")
    assert response.headers["x-policy-version"] == "shop@v0"
    assert turn.state == TurnState.DONE and turn.exclusion_reason is None and not turn.stream
    assert (turn.sampling["temperature"], turn.sampling["max_tokens"]) == (0.7, 50)
    assert body["output"][0]["content"][0]["text"] == scripted.reply_text
    assert len(turn.output_ids or []) == len(turn.logprobs or []) == body["usage"]["output_tokens"]
    assert turn.request_metadata == {"visit": "1"} == body["metadata"]


async def test_stream_ends_with_same_response(harness: Harness, scripted: ScriptedEngine) -> None:
    completed = (await ask(harness)).json()
    events = read_events(await ask(harness, stream=True))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    streamed = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert (
        text
        == streamed["output"][0]["content"][0]["text"]
        == completed["output"][0]["content"][0]["text"]
        == scripted.reply_text
    )
    assert streamed["usage"] == completed["usage"] and streamed.keys() == completed.keys()
    assert {event["response"]["id"] for event in events if "response" in event} == {streamed["id"]}
    turn: Turn = await harness.get(Turn, streamed["completion_id"])
    assert turn.stream and (turn.state, turn.exclusion_reason) == (TurnState.DONE, None)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_function_call_is_item_and_output_continues_conversation(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.tool_call = ("order_status", '{"order_id": "7"}')
    response = await ask(harness, tools=[TOOL], stream=stream)
    first = read_events(response)[-1]["response"] if stream else response.json()
    assert response.status_code == 200, response.text
    [call] = first["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "order_status", '{"order_id": "7"}')
    scripted.tool_call = None
    input_items = [{"role": "user", "content": REQUEST["input"]}, call]
    input_items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "shipped"})
    second = (await ask(harness, tools=[TOOL], input=input_items)).json()
    turn: Turn = await harness.get(Turn, second["completion_id"])
    assert turn.parent_id == first["completion_id"]
    assert [message["role"] for message in await harness.messages(turn.id)] == ["user", "assistant", "tool"]


async def test_conversation_id_is_kept(harness: Harness, scripted: ScriptedEngine) -> None:
    body = (await ask(harness, metadata={"conversation_id": "ada-1"})).json()
    turn: Turn = await harness.get(Turn, body["completion_id"])
    assert turn.conversation_id == "ada-1"


async def test_feedback_by_completion_and_by_metadata(harness: Harness, scripted: ScriptedEngine) -> None:
    body = (await ask(harness, metadata={"visit": "1"})).json()
    assert (await harness.vote(body["completion_id"])).status_code == 201
    target = {"target": {"metadata": {"visit": "1"}}, "kind": "binary", "value": False}
    response = await harness.api.post("/v1/feedback", json=target)
    assert (response.status_code, response.json()["completion_id"]) == (201, body["completion_id"])


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_engine_refusal_is_http_status_also_when_streamed(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.refuse_status = 503
    response = await ask(harness, stream=stream)
    assert response.status_code == 503 and response.headers["retry-after"]
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-completion-id"] == (await harness.wait_for_turn()).id


async def test_broken_stream_reports_failure_and_is_recorded(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.drop_after_tokens = 3
    events = read_events(await ask(harness, stream=True))
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert "closed the connection" in events[-1]["response"]["error"]["message"]
    [message] = events[-1]["response"]["output"]
    assert message["status"] == "incomplete" and scripted.reply_text.startswith(message["content"][0]["text"])
    turn = await harness.wait_for_turn()
    assert (turn.state, turn.finish_reason) == (TurnState.FAILED, "error")


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_client_disconnect_aborts_engine(
    harness: Harness, scripted: ScriptedEngine, live_url: str, stream: bool
) -> None:
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=live_url, headers=headers, trust_env=False) as client:
        await hang_up(client, scripted, "/v1/responses", REQUEST, "output_text.delta" if stream else None)
    turn = await harness.wait_for_turn()
    assert (turn.state, turn.finish_reason) == (TurnState.ABORTED, "client_disconnect")
    assert turn.id in scripted.aborted
    assert turn.output_ids and len(turn.output_ids) < 450


async def test_disconnect_before_first_byte_aborts_engine(harness: Harness, scripted: ScriptedEngine) -> None:
    """The server cancels the stream of such a client before it has started."""
    scripted.seconds_per_token, scripted.reply_text = 0.05, "word " * 500
    body = json.dumps(REQUEST | {"stream": True}).encode()
    coming = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/responses", "raw_path": b"/v1/responses", "query_string": b"",
        "headers": [(b"authorization", f"Bearer {harness.key}".encode())],
    }  # fmt: skip

    async def receive() -> Any:
        return coming.pop() if coming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    await harness.api._transport.app(scope, receive, send)  # type: ignore[attr-defined]
    turn = await harness.wait_for_turn()
    assert (turn.state, turn.finish_reason) == (TurnState.ABORTED, "client_disconnect")
    assert turn.id in scripted.aborted


async def test_errors_have_four_keys_and_name_the_field(harness: Harness, scripted: ScriptedEngine) -> None:
    wrong: dict[str, tuple[dict[str, Any], int, str]] = {
        "previous_response_id": ({"previous_response_id": "resp_1"}, 400, "previous_response_not_found"),
        "conversation": ({"conversation": "conv_1"}, 400, "unsupported_parameter"),
        "temperature": ({"temperature": 9}, 400, "invalid_value"),
        "model": ({"model": "nobody"}, 404, "model_not_found"),
        "surprise": ({"surprise": 1}, 400, "unknown_parameter"),
    }
    for param, (fields, status, code) in wrong.items():
        response = await ask(harness, **fields)
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert (response.status_code, response.json()["error"]["param"], response.json()["error"]["code"]) == (
            status,
            param,
            code,
        )
    assert scripted.requests == [] and await harness.all(Turn) == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "x" * 400_001}, "input"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"title": "x" * 33_000}}]}, "tools.0.parameters"),
        (
            {"text": {"format": {"type": "json_schema", "name": "f", "schema": {"title": "x" * 33_000}}}},
            "text.format.schema",
        ),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ],
)
async def test_limit_names_parameter_of_this_api(
    harness: Harness, scripted: ScriptedEngine, fields: dict[str, Any], param: str
) -> None:
    error = (await ask(harness, **fields)).json()["error"]
    assert error["param"] == param
    assert scripted.requests == []


async def test_api_key_is_required(harness: Harness) -> None:
    response = await harness.api.post("/v1/responses", json=REQUEST, headers={"authorization": "Bearer wrong"})
    assert response.status_code == 401


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_response_is_read_as_it_was_sent(harness: Harness, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.tool_call = ("order_status", '{"order_id": "7"}')
    fields: dict[str, Any] = {
        "instructions": "Be kind.",
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "order_status"},
        "text": {"format": {"type": "json_schema", "name": "order", "schema": {"type": "object"}}},
        "temperature": 0.7,
        "max_output_tokens": 50,
        "metadata": {"visit": "1"},
        "user": "ada",
    }
    response = await ask(harness, **fields, stream=stream)
    assert response.status_code == 200, response.text
    sent = read_events(response)[-1]["response"] if stream else response.json()
    read = (await harness.api.get(f"/v1/responses/{sent['id']}")).json()
    Response.model_validate(read)
    for one in (sent, read):
        del one["created_at"], one["completed_at"]
    assert read == sent and read["store"] is True


async def test_previous_response_is_continued(harness: Harness, scripted: ScriptedEngine) -> None:
    first = (await ask(harness, instructions="Be kind.")).json()
    second = (await ask(harness, input="And on Sunday?", previous_response_id=first["id"])).json()
    assert second["previous_response_id"] == first["id"]
    more = {"input": "Thanks!", "previous_response_id": second["id"], "instructions": "Be brief."}
    third = read_events(await ask(harness, **more, stream=True))[-1]["response"]
    turns = [await harness.get(Turn, one["completion_id"]) for one in (first, second, third)]
    assert len({turn.conversation_id for turn in turns}) == 1 and turns[2].parent_id == turns[1].id
    assert await harness.messages(turns[2].id) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": REQUEST["input"]},
        {"role": "assistant", "content": scripted.reply_text},
        {"role": "user", "content": "And on Sunday?"},
        {"role": "assistant", "content": scripted.reply_text},
        {"role": "user", "content": "Thanks!"},
    ]
    assert (await harness.api.get(f"/v1/responses/{third['id']}")).json()["previous_response_id"] == second["id"]


async def test_unknown_and_unfinished_responses(harness: Harness, scripted: ScriptedEngine) -> None:
    turn = await harness.turn(state=TurnState.OPEN, reply=None, finish_reason=None)
    open_id = turn.id.replace("chatcmpl-", "resp_")
    assert (await harness.api.get(f"/v1/responses/{open_id}")).json()["status"] == "in_progress"
    refused = await ask(harness, previous_response_id=open_id)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    for unknown in ("resp_nobody", turn.id):
        assert (await harness.api.get(f"/v1/responses/{unknown}")).status_code == 404
        error = (await ask(harness, previous_response_id=unknown)).json()["error"]
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
        assert error["message"] == f"There is no response '{unknown}'."
