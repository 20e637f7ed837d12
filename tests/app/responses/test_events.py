"""Streamed and unary replies give the same response, in the types of OpenAI's client."""

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from alignment.json_values import as_object, as_objects
from app.core.errors import AttuneError
from app.inference.chat_format import ChatChunk, Delta, Logprobs, TokenLogprob, ToolCallPart, Usage
from app.responses.events import ResponseEvents, render_response
from app.responses.request import parse_responses_request

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
REQUEST = parse_responses_request({
    "model": "shop", "input": "hi", "metadata": {"a": "b"}, "tool_choice": "auto",
    "tools": [{"type": "function", "name": "weather"}],
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
})  # fmt: skip
USAGE: Usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
ID = "chatcmpl-" + "0" * 32


def token(text: str) -> TokenLogprob:
    top: TokenLogprob = {"token": text, "bytes": None, "logprob": -1.0}
    return {**top, "top_logprobs": [top]}


def chunk(delta: Delta, *, finish: str | None = None, tokens: tuple[str, ...] = ()) -> ChatChunk:
    logprobs: Logprobs | None = {"content": [token(text) for text in tokens]} if tokens else None
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]}


def call(number: int, arguments: str, name: str | None = None) -> ChatChunk:
    piece: ToolCallPart = {"index": number, "function": {"arguments": arguments}}
    if name is not None:
        piece["id"] = f"call_{number}"
        piece["function"]["name"] = name
    return chunk({"tool_calls": [piece]})


def new_response_events() -> ResponseEvents:
    return ResponseEvents(REQUEST, ID, "shop@v3", 17)


def stream_events(*chunks: ChatChunk) -> list[dict[str, Any]]:
    response_events = new_response_events()
    events = response_events.start()
    for piece in chunks:
        events += response_events.add_chunk(piece)
    events += response_events.finish()
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
    return events


def event_types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def render(message: dict[str, Any], finish: str, tokens: tuple[str, ...] = ()) -> dict[str, Any]:
    logprobs = {"content": [token(text) for text in tokens]} if tokens else None
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}
    completion = {"id": ID, "model": "shop@v3", "created": 17, "choices": [choice], "usage": USAGE}
    response = render_response(REQUEST, completion)
    Response.model_validate(response)
    return response


def assert_equal(streamed: dict[str, Any], rendered: dict[str, Any]) -> None:
    assert streamed | {"completed_at": 0} == rendered | {"completed_at": 0}


def test_text_arrives_as_deltas_of_one_part() -> None:
    events = stream_events(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hel"}, tokens=("Hel",)),
        chunk({}, tokens=("?",)),
        chunk({"content": "lo"}, tokens=("lo",)),
        chunk({}, finish="stop", tokens=("",)),
        {"choices": [], "usage": USAGE},
    )
    assert event_types(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [len(event["logprobs"]) for event in events[4:7]] == [1, 2, 4]
    assert events[3]["part"]["logprobs"] == [] and len(events[7]["part"]["logprobs"]) == 4
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert_equal(events[-1]["response"], render(message, "stop", ("Hel", "?", "lo", "")))


def test_tool_calls_follow_text_as_separate_items() -> None:
    events = stream_events(
        chunk({"role": "assistant", "content": "Let me see."}),
        call(0, "", "weather"),
        call(0, '{"at":'),
        call(0, "1}"),
        call(1, "{}", "weather"),
        chunk({}, finish="tool_calls"),
        {"choices": [], "usage": USAGE},
    )
    assert event_types(events)[2:] == [
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    tool_calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for number, arguments in enumerate(('{"at":1}', "{}"))
    ]
    response = render({"content": "Let me see.", "tool_calls": tool_calls}, "tool_calls")
    assert_equal(events[-1]["response"], response)
    message, *calls = response["output"]
    assert (message["status"], message["content"][0]["text"]) == ("completed", "Let me see.")
    assert [(call["call_id"], call["arguments"]) for call in calls] == [("call_0", '{"at":1}'), ("call_1", "{}")]


def test_tool_call_without_text_has_no_message() -> None:
    tool_calls = [{"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": ""}}]
    events = stream_events(call(0, "", "weather"), chunk({}, finish="tool_calls"), {"choices": [], "usage": USAGE})
    assert_equal(events[-1]["response"], render({"content": None, "tool_calls": tool_calls}, "tool_calls"))
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["function_call"]


@pytest.mark.parametrize("text", ["", "We are op"])
def test_reply_at_token_limit_is_incomplete(text: str) -> None:
    events = stream_events(chunk({"content": text}), chunk({}, finish="length"), {"choices": [], "usage": USAGE})
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert_equal(response, render({"content": text}, "length"))


def test_interrupted_reply_is_failed_and_keeps_output() -> None:
    response_events = new_response_events()
    response_events.start()
    response_events.add_chunk(chunk({"content": "We are op"}))
    [event] = response_events.fail(AttuneError("The engine broke off."))
    EVENT.validate_python(event)
    response = as_object(event["response"])
    assert event["type"] == "response.failed" and response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "The engine broke off."}
    [item] = as_objects(response["output"])
    assert as_objects(item["content"])[0]["text"] == "We are op"


def test_reply_without_finish_reason_is_failed() -> None:
    response_events = new_response_events()
    response_events.add_chunk(chunk({"content": "We"}))
    assert [event["type"] for event in response_events.finish()] == ["response.failed"]
    assert render({"content": "We"}, "abort")["status"] == "failed"


def test_request_parameters_are_echoed() -> None:
    response = render({"content": "x"}, "stop")
    assert response["id"] == "resp_" + "0" * 32 and response["completion_id"] == ID
    assert response["metadata"] == {"a": "b"} and response["tools"][0]["strict"] is False
    assert response["text"]["format"]["schema"] == {"type": "object"}
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
