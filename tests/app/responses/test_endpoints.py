"""POST /v1/responses over HTTP: the Responses wire outside, a recorded chat inside, however it ends."""

import asyncio
import json
from typing import Any

import httpx2
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.models import Turn, TurnState
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

ASKED: dict[str, Any] = {"model": "shop", "input": "When are you open?"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "order_status", "parameters": {"type": "object"}}


async def ask(harness: Harness, **fields: Any) -> httpx2.Response:
    return await harness.api.post("/v1/responses", json=ASKED | fields)


def happened(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = answer.text.splitlines()
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [event["type"] for event in told]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    for event in told:
        EVENT.validate_python(event)
    return told


async def test_a_response_is_recorded_as_the_completion_it_is(harness: Harness, scripted: ScriptedEngine) -> None:
    answer = await ask(harness, instructions="Be kind.", temperature=0.7, max_output_tokens=50, metadata={"visit": "1"})
    body = answer.json()
    Response.model_validate(body)
    turn: Turn = await harness.get(Turn, body["completion_id"])
    assert (answer.status_code, body["status"], body["model"]) == (200, "completed", "shop@v0")
    assert answer.headers["x-completion-id"] == turn.id == "chatcmpl-" + body["id"].removeprefix("resp_")
    assert answer.headers["x-policy-version"] == "shop@v0"
    assert turn.state == TurnState.DONE and turn.exclusion_reason is None and not turn.stream
    assert (turn.sampling["temperature"], turn.sampling["max_tokens"]) == (0.7, 50)
    assert body["output"][0]["content"][0]["text"] == scripted.say
    assert len(turn.output_ids or []) == len(turn.logprobs or []) == body["usage"]["output_tokens"]
    assert turn.request_metadata == {"visit": "1"} == body["metadata"]


async def test_streamed_it_ends_in_the_same_response(harness: Harness, scripted: ScriptedEngine) -> None:
    whole = (await ask(harness)).json()
    told = happened(await ask(harness, stream=True))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    ended = told[-1]["response"]
    assert told[-1]["type"] == "response.completed"
    text = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
    assert text == ended["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"] == scripted.say
    assert ended["usage"] == whole["usage"] and ended.keys() == whole.keys()
    assert {event["response"]["id"] for event in told if "response" in event} == {ended["id"]}
    turn: Turn = await harness.get(Turn, ended["completion_id"])
    assert turn.stream and (turn.state, turn.exclusion_reason) == (TurnState.DONE, None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_is_an_item_and_its_output_goes_on(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.tool_call = ("order_status", '{"order_id": "7"}')
    answer = await ask(harness, tools=[TOOL], stream=stream)
    first = happened(answer)[-1]["response"] if stream else answer.json()
    assert answer.status_code == 200, answer.text
    [call] = first["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "order_status", '{"order_id": "7"}')
    scripted.tool_call = None
    said = [{"role": "user", "content": ASKED["input"]}, call]
    said.append({"type": "function_call_output", "call_id": call["call_id"], "output": "shipped"})
    second = (await ask(harness, tools=[TOOL], input=said)).json()
    turn: Turn = await harness.get(Turn, second["completion_id"])
    assert turn.parent_id == first["completion_id"]
    assert [message["role"] for message in turn.messages] == ["user", "assistant", "tool"]


async def test_a_conversation_goes_on_under_its_own_name(harness: Harness, scripted: ScriptedEngine) -> None:
    body = (await ask(harness, metadata={"conversation_id": "ada-1"})).json()
    turn: Turn = await harness.get(Turn, body["completion_id"])
    assert turn.conversation_id == "ada-1"


async def test_feedback_finds_it_by_its_completion_and_by_its_metadata(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    body = (await ask(harness, metadata={"visit": "1"})).json()
    assert (await harness.thumb(body["completion_id"])).status_code == 201
    target = {"target": {"metadata": {"visit": "1"}}, "kind": "binary", "value": False}
    answer = await harness.api.post("/v1/feedback", json=target)
    assert (answer.status_code, answer.json()["completion_id"]) == (201, body["completion_id"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_the_engine_refuses_is_a_status_even_if_streamed(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.refuse = 503
    answer = await ask(harness, stream=stream)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.headers["x-completion-id"] == (await harness.settled()).id


async def test_a_stream_that_breaks_off_says_so_and_is_recorded(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.die_after = 3
    told = happened(await ask(harness, stream=True))
    assert told[-1]["type"] == "response.failed" and told[-1]["response"]["status"] == "failed"
    assert "broke off" in told[-1]["response"]["error"]["message"]
    [message] = told[-1]["response"]["output"]
    assert message["status"] == "incomplete" and scripted.say.startswith(message["content"][0]["text"])
    turn = await harness.settled()
    assert (turn.state, turn.finish_reason) == (TurnState.FAILED, "error")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_who_hangs_up_ends_the_engines_work(
    harness: Harness, scripted: ScriptedEngine, served: str, stream: bool
) -> None:
    scripted.pace, scripted.say = 0.05, "word " * 500
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=served, headers=headers, trust_env=False) as client:
        if stream:
            async with client.stream("POST", "/v1/responses", json=ASKED | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if "output_text.delta" in line:
                        break
        else:
            asking = asyncio.create_task(client.post("/v1/responses", json=ASKED, timeout=60))
            while not any(reply.output_ids for reply in list(scripted.running.values())):
                await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.wait([asking])
    turn = await harness.settled(60.0)
    assert (turn.state, turn.finish_reason) == (TurnState.ABORTED, "client_disconnect")
    assert turn.id in scripted.aborted
    assert turn.output_ids and len(turn.output_ids) < 450


async def test_who_is_gone_before_the_first_byte_leaves_nothing_running(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    """The server cancels such a stream before it has begun."""
    scripted.pace, scripted.say = 0.05, "word " * 500
    body = json.dumps(ASKED | {"stream": True}).encode()
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
    turn = await harness.settled(60.0)
    assert (turn.state, turn.finish_reason) == (TurnState.ABORTED, "client_disconnect")
    assert turn.id in scripted.aborted


async def test_refusals_have_four_keys_and_name_the_field(harness: Harness, scripted: ScriptedEngine) -> None:
    wrong = {
        "previous_response_id": ({"previous_response_id": "resp_1"}, 400, "unsupported_parameter"),
        "temperature": ({"temperature": 9}, 400, "invalid_value"),
        "model": ({"model": "nobody"}, 404, "model_not_found"),
        "surprise": ({"surprise": 1}, 400, "unknown_parameter"),
    }
    for param, (fields, status, code) in wrong.items():
        answer = await ask(harness, **fields)
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert (answer.status_code, answer.json()["error"]["param"], answer.json()["error"]["code"]) == (
            status,
            param,
            code,
        )
    assert scripted.heard == [] and await harness.all(Turn) == []


async def test_a_key_is_needed(harness: Harness) -> None:
    answer = await harness.api.post("/v1/responses", json=ASKED, headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 401
