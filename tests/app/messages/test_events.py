"""Streamed and unary replies give the same message; the order of events is the one that Anthropic's clients expect."""

import json
from typing import Any

import pytest

from app.core.errors import BadRequest, Unavailable
from app.inference.chat_format import ChatChunk, Delta, ToolCallPart, Usage
from app.messages.events import MessageBody, MessageEvents, read_input, render_message

USAGE: Usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
ID = "chatcmpl-" + "0" * 32
STOP = ["END"]


def chunk(delta: Delta, *, finish: str | None = None, matched: str | int | None = None) -> ChatChunk:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "matched_stop": matched}]}


def call(index: int, arguments: str, name: str | None = None) -> ChatChunk:
    piece: ToolCallPart = {"index": index, "function": {"arguments": arguments}}
    if name is not None:
        piece["id"] = f"call_{index}"
        piece["function"]["name"] = name
    return chunk({"tool_calls": [piece]})


def end(finish: str, matched: str | int | None = None) -> list[ChatChunk]:
    return [chunk({}, finish=finish, matched=matched), {"choices": [], "usage": USAGE}]


def stream(*chunks: ChatChunk) -> list[dict[str, Any]]:
    first, *others = chunks
    first = {**first, "usage": {**USAGE, "completion_tokens": 1}}
    events = MessageEvents(ID, "shop@v3", STOP, "req-1")
    sent = events.start()
    for piece in (chunk({"role": "assistant"}), first, *others):
        sent += events.add_chunk(piece)
    sent += events.finish()
    assert events.message == put_together(sent)
    return sent


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message as a client puts it together; assert the rules of the order of events."""
    message: dict[str, Any] = {}
    opened, partial_json = -1, ""
    is_open = False
    for event in events:
        match event["type"]:
            case "message_start":
                assert message == {} and event["message"]["content"] == []
                message = event["message"] | {"content": []}
            case "content_block_start":
                opened += 1
                assert not is_open and event["index"] == opened
                is_open, partial_json = True, ""
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                assert is_open and event["index"] == opened
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        partial_json += delta["partial_json"]
                    case other:
                        raise AssertionError(other)
            case "content_block_stop":
                assert is_open and event["index"] == opened
                is_open = False
                if partial_json:
                    message["content"][-1]["input"] = json.loads(partial_json)
            case "message_delta":
                assert not is_open
                message |= event["delta"] | {"usage": event["usage"]}
            case "message_stop":
                assert event is events[-1] and message["stop_reason"]
            case "ping":
                assert message
            case other:
                raise AssertionError(other)
    return message


def render(message: dict[str, Any], finish: str, matched: str | int | None = None) -> MessageBody:
    choice = {"index": 0, "message": message, "finish_reason": finish, "matched_stop": matched}
    return render_message({"id": ID, "model": "shop@v3", "created": 17, "choices": [choice], "usage": USAGE}, STOP)


def event_types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def tool_call(index: int, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{index}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def test_text_arrives_as_deltas_of_one_block() -> None:
    events = stream(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hel"}),
        chunk({"content": "lo"}),
        *end("stop", 2),
    )
    assert event_types(events) == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["usage"] == {
        "input_tokens": 3, "output_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    }  # fmt: skip
    message = put_together(events)
    assert message == render({"role": "assistant", "content": "Hello", "refusal": None}, "stop", 2)
    assert message["id"] == "msg_" + "0" * 32 and message["model"] == "shop@v3" and message["role"] == "assistant"
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    assert message["usage"]["output_tokens"] == 2


def test_tool_calls_follow_text_as_blocks_of_their_own() -> None:
    events = stream(
        chunk({"role": "assistant", "content": "Let me see."}),
        call(0, "", "weather"),
        call(0, '{"at":'),
        call(0, "1}"),
        call(1, "", "weather"),
        *end("tool_calls"),
    )
    assert event_types(events)[2:] == [
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[5]["content_block"]["input"] == {} and events[6]["delta"]["partial_json"] == '{"at":1}'
    message = put_together(events)
    assert message == render({"content": "Let me see.", "tool_calls": [tool_call(0, '{"at":1}'), tool_call(1, "")]},
                             "tool_calls")  # fmt: skip
    assert message["stop_reason"] == "tool_use"
    assert [block.get("input") for block in message["content"]] == [None, {"at": 1}, {}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"at": 1, "place": "Par', {"at": 1}),
        ('{"at": ', {}),
        ("", {}),
        ('{"at": 1} and', {"at": 1}),
        ("[1]", {}),
        ("{at: 1}", {}),
        ('{"at": NaN}', {}),
        ('{"a": "\\ud800"}', {}),
        ('{"at":' + "[" * 900 + "]" * 900 + "}", {}),
        ('{"at": 123456789012345678901234567890}', {"at": 1.2345678901234568e29}),
    ],
)
@pytest.mark.parametrize("finish", ["length", "tool_calls", "stop"])
def test_input_is_an_object_whatever_the_model_wrote(finish: str, arguments: str, expected: dict[str, Any]) -> None:
    """A call that the limit cut has the stop reason max_tokens, so that no client runs it."""
    assert read_input(arguments)[0] == expected
    streamed = put_together(stream(call(0, "", "weather"), call(0, arguments), *end(finish)))
    assert streamed == render({"content": None, "tool_calls": [tool_call(0, arguments)]}, finish)
    assert streamed["stop_reason"] == ("max_tokens" if finish == "length" else "tool_use")
    assert streamed["content"] == [{"type": "tool_use", "id": "call_0", "name": "weather", "input": expected}]


def test_stop_sequence_is_named() -> None:
    for matched, reason in (("END", ("stop_sequence", "END")), (2, ("end_turn", None)), ("<eot>", ("end_turn", None))):
        message = put_together(stream(chunk({"content": "Hi"}), *end("stop", matched)))
        assert message == render({"content": "Hi"}, "stop", matched)
        assert (message["stop_reason"], message["stop_sequence"]) == reason


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_tokens"), ("content_filter", "refusal")])
def test_empty_reply_is_one_empty_text(finish: str, reason: str) -> None:
    message = put_together(stream(chunk({"content": ""}), *end(finish)))
    assert message == render({"content": ""}, finish)
    assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": ""}], reason)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_thinking_is_a_block_without_signature_however_it_is_cut(size: int) -> None:
    text = "<think>\nRain?\n</think>\n\nWet."
    parts = [chunk({"content": text[at : at + size]}) for at in range(0, len(text), size)]
    message = put_together(stream(*parts, call(0, "{}", "weather"), *end("tool_calls")))
    assert message == render({"content": text, "tool_calls": [tool_call(0, "{}")]}, "tool_calls")
    assert message["content"][:2] == [
        {"type": "thinking", "thinking": "\nRain?\n\n\n", "signature": ""},
        {"type": "text", "text": "Wet."},
    ]


def test_call_behind_thinking_has_no_empty_text_before_it() -> None:
    message = render({"content": "<think>\nA\n</think>\n\n", "tool_calls": [tool_call(0, "{}")]}, "tool_calls")
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]


def test_failure_is_an_error_event() -> None:
    events = MessageEvents(ID, "shop@v3", request_id="req-1")
    events.add_chunk(chunk({"content": "We are op"}))
    for error, type in ((Unavailable("It broke."), "overloaded_error"), (BadRequest("no"), "invalid_request_error")):
        [event] = events.fail(error)
        assert event == {"type": "error", "error": {"type": type, "message": error.message}, "request_id": "req-1"}


def test_reply_without_finish_reason_is_an_error() -> None:
    events = MessageEvents(ID, "shop@v3")
    events.add_chunk(chunk({"content": "We"}))
    assert [event["type"] for event in events.finish()] == ["error"]
    with pytest.raises(Unavailable):
        render({"content": "We"}, "abort")


def test_ping_is_sent_while_a_long_call_is_held_back() -> None:
    now = 100.0
    events = MessageEvents(ID, "shop@v3", clock=lambda: now)
    events.add_chunk(call(0, "{", "weather"))
    sent = []
    for _ in range(12):
        now += 1.0
        sent.append(event_types(events.add_chunk(call(0, " "))))
    assert sent.count(["ping"]) == 2 and sent.count([]) == 10
