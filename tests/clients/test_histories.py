"""Histories that clients send back: whatever the service has said is accepted again, and so are forms of nothing."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from demo.dialogues import ORDER_STATUS
from tests.clients.conftest import Record, Running

QUESTION = {"role": "user", "content": "Where is order 7?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "The call was not run."}
GO_ON = {"role": "user", "content": "Please go on."}
RESPONSES_TOOL = {"type": "function", **ORDER_STATUS["function"], "strict": False}
ODD_ARGUMENTS = [
    *("", '{"order": ', '"7"', "[7]", "null", "7", "{'order': 7}", '{"a": NaN}', '{"order": 7} {"order": 8}'),
    *(None, {"order": 7}, [7], {}, '{"a":' * 300 + "7" + "}" * 300, "x" * 5000),
]


@pytest.fixture(scope="module")
def http(attune: Running) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {attune.key}"}
    with httpx2.Client(base_url=attune.base_url, headers=headers, timeout=60) as client:
        yield client


def chat(http: httpx2.Client, messages: list[Any], **fields: Any) -> httpx2.Response:
    body = {"model": "shop", "max_tokens": 4, "messages": messages, "tools": [ORDER_STATUS], **fields}
    return http.post("/chat/completions", json=body)


@pytest.mark.parametrize("arguments", ODD_ARGUMENTS, ids=lambda value: repr(value)[:24])
def test_odd_arguments_of_a_past_call_are_accepted(http: httpx2.Client, arguments: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "order_status", "arguments": arguments}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    response = chat(http, [QUESTION, reply, RESULT, GO_ON])
    assert response.status_code == 200, response.text
    again = [QUESTION, reply, RESULT, GO_ON, response.json()["choices"][0]["message"], GO_ON]
    assert chat(http, again, stream=True).status_code == 200
    item = {"type": "function_call", "call_id": "call_1", "name": "order_status", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "The call was not run."}
    body = {"model": "shop", "input": [QUESTION, item, output, GO_ON], "tools": [RESPONSES_TOOL]}
    response = http.post("/responses", json=body | {"max_output_tokens": 4})
    assert response.status_code == 200, response.text


def test_what_a_client_parsed_from_the_arguments_is_ignored(http: httpx2.Client) -> None:
    function = {"name": "order_status", "arguments": '{"order": 7}', "parsed_arguments": {"order": 7}}
    call = {"id": "call_1", "type": "function", "index": 0, "function": function}
    reply = {"role": "assistant", "content": None, "refusal": None, "parsed": None, "tool_calls": [call]}
    response = chat(http, [QUESTION, reply, RESULT])
    assert response.status_code == 200, response.text


def join(response: httpx2.Response) -> tuple[dict[str, Any], str]:
    """Return the message and the finish reason of a reply, joined from its chunks if it was streamed."""
    if not response.text.startswith("data: "):
        choice = response.json()["choices"][0]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    reason = ""
    for line in response.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            delta = choice["delta"]
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            for part in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                function = calls[part["index"]]["function"]
                function["name"] += part["function"].get("name") or ""
                function["arguments"] += part["function"].get("arguments") or ""
            reason = choice["finish_reason"] or reason
    return message, reason


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "order_status"}}])
def test_own_replies_cut_at_every_length_are_accepted_back(http: httpx2.Client, choice: Any, stream: bool) -> None:
    for limit in range(1, 40):
        response = chat(http, [QUESTION], tool_choice=choice, stream=stream, max_tokens=limit, temperature=0)
        assert response.status_code == 200, response.text
        message, reason = join(response)
        results = [RESULT | {"tool_call_id": call["id"]} for call in message.get("tool_calls") or ()]
        back = chat(http, [QUESTION, message, *results, GO_ON], max_tokens=1)
        assert back.status_code == 200, (limit, message, back.text)
        if reason != "length":
            break


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_own_responses_cut_at_every_length_are_accepted_back(http: httpx2.Client, stream: bool) -> None:
    body: dict[str, Any] = {"model": "shop", "tools": [RESPONSES_TOOL], "temperature": 0}
    body["tool_choice"] = {"type": "function", "name": "order_status"}
    for limit in range(1, 40):
        sent = body | {"input": [QUESTION], "max_output_tokens": limit, "stream": stream}
        response = http.post("/responses", json=sent)
        assert response.status_code == 200, response.text
        data = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        reply = data[-1]["response"] if stream else response.json()
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "The call was not run."}
            for item in reply["output"]
            if item["type"] == "function_call"
        ]
        follow_up = {"model": "shop", "max_output_tokens": 1, "tools": [RESPONSES_TOOL]}
        for items in (
            {"input": [QUESTION, *reply["output"], *outputs, GO_ON]},
            {"input": [*outputs, GO_ON], "previous_response_id": reply["id"]},
        ):
            back = http.post("/responses", json=follow_up | items)
            assert back.status_code == 200, (limit, reply["output"], back.text)
        if reply["status"] == "completed":
            break


NOTHING: list[dict[str, Any]] = [
    {"content": None},
    {},
    {"content": None, "tool_calls": []},
    {"content": None, "tool_calls": None, "function_call": None, "audio": None, "name": None},
    {"content": ""},
    {"content": []},
    {"content": None, "refusal": "I can't help with that."},
    {"content": [{"type": "refusal", "refusal": "I can't help with that."}]},
]


@pytest.mark.parametrize("fields", NOTHING, ids=str)
def test_reply_without_content_is_accepted(http: httpx2.Client, fields: dict[str, Any]) -> None:
    response = chat(http, [QUESTION, {"role": "assistant", **fields}, GO_ON])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": []}, {"content": ""}], ids=str)
def test_response_item_without_content_is_accepted(http: httpx2.Client, fields: dict[str, Any]) -> None:
    items = [QUESTION, {"type": "message", "role": "assistant", **fields}, GO_ON]
    response = http.post("/responses", json={"model": "shop", "input": items, "max_output_tokens": 2})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tool_without_parameters_may_say_null(http: httpx2.Client, choice: str) -> None:
    function = {"name": "closing_time", "parameters": None, "description": None, "strict": None}
    tools = [{"type": "function", "function": function}]
    response = chat(http, [QUESTION], tools=tools, tool_choice=choice, max_tokens=60)
    assert response.status_code == 200, response.text
    if choice == "required":
        [call] = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "closing_time", "arguments": "{}"}


def test_null_in_options_means_the_default(http: httpx2.Client) -> None:
    options = {"include_usage": None, "include_obfuscation": None}
    assert chat(http, [QUESTION], stream=True, stream_options=options).status_code == 200
    schema_format = {"type": "json_schema", "json_schema": {"name": "any", "schema": None, "strict": None}}
    assert chat(http, [QUESTION], tools=None, response_format=schema_format).status_code == 200


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_other_messages_need_content(http: httpx2.Client, role: str) -> None:
    response = chat(http, [{"role": role, "content": None, "tool_call_id": "call_1"}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages.0")


NAMED = {"type": "function", "function": {"name": "order_status"}}


@pytest.mark.parametrize(
    ("first", "second"), [("required", "auto"), (NAMED, "auto"), ("none", "required"), (None, NAMED)]
)
def test_tool_choice_leaves_the_next_prompt_alone(http: httpx2.Client, record: Record, first: Any, second: Any) -> None:
    """The next turn begins with the exact tokens of the one before; where it cannot, the reason is the true one."""
    tools = [ORDER_STATUS, {"type": "function", "function": {"name": "opening_hours"}}]
    # At the usual temperature the arguments of so small a model may not end within the limit.
    body = chat(http, [QUESTION], tools=tools, tool_choice=first, max_tokens=160, temperature=0.1).json()
    message, reason = body["choices"][0]["message"], body["choices"][0]["finish_reason"]
    results = [RESULT | {"tool_call_id": call["id"]} for call in message.get("tool_calls") or ()]
    again = chat(http, [QUESTION, message, *results, GO_ON], tools=tools, tool_choice=second).json()
    [parent], [turn] = record.turns(body["id"]), record.turns(again["id"])
    assert turn.parent_id == parent.id
    assert turn.prefix_reuse == ("exact" if reason != "length" else "the parent turn ended early: length")
    if first in ("required", NAMED):
        assert reason == "tool_calls"
