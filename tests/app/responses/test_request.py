"""Translation of Responses requests into chat requests, and refusals that name an alternative."""

from typing import Any

import pytest

from app.core.errors import BadRequest, UnsupportedParameter
from app.responses.request import LOGPROBS, parse_responses_request, to_chat_body

WEATHER = {"type": "function", "name": "weather", "description": "Look out.", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": "{}"}


def to_chat(**fields: Any) -> dict[str, Any]:
    return to_chat_body(parse_responses_request({"model": "shop", "input": "hi", **fields}))


def test_string_input_is_user_message() -> None:
    assert to_chat() == {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}


def test_instructions_come_first() -> None:
    messages = to_chat(instructions="Be kind.")["messages"]
    assert messages == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert to_chat(instructions="")["messages"] == [{"role": "user", "content": "hi"}]


def test_parts_are_joined_and_roles_kept() -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "id": "msg_1", "status": "completed", "phase": "final_answer", "content": [
            {"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
            {"type": "output_text", "text": "c", "annotations": []},
        ]},
    ]  # fmt: skip
    assert to_chat(input=items)["messages"] == [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
    ]


def test_function_calls_belong_to_preceding_message() -> None:
    items = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "Let me see."},
        CALL,
        CALL | {"call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "wet"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "dry"}]},
        CALL | {"call_id": "call_3"},
    ]
    _, messages, first, second, calls_without_text = to_chat(input=items)["messages"]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert messages == {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call | {"id": "call_2"}]}
    assert first == {"role": "tool", "tool_call_id": "call_1", "content": "wet"}
    assert second == {"role": "tool", "tool_call_id": "call_2", "content": "dry"}
    assert calls_without_text == {"role": "assistant", "content": None, "tool_calls": [call | {"id": "call_3"}]}


def test_tools_are_converted_and_strict_only_if_requested() -> None:
    body = to_chat(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False)
    function = {"name": "weather", "description": "Look out.", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert body["parallel_tool_calls"] is False
    assert to_chat(tools=[WEATHER | {"strict": True}])["tools"][0]["function"]["strict"] is True


def test_text_format_becomes_response_format() -> None:
    schema = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}
    assert to_chat(text={"format": schema, "verbosity": "low"})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
    }
    assert to_chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in to_chat(text={"format": {"type": "text"}})


def test_sampling_and_metadata_are_copied() -> None:
    copied = {"temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s"}
    assert to_chat(**copied, max_output_tokens=9).items() >= (copied | {"max_completion_tokens": 9}).items()
    assert to_chat(top_logprobs=2).items() >= {"logprobs": True, "top_logprobs": 2}.items()
    assert to_chat(include=[LOGPROBS])["logprobs"] is True
    assert to_chat(stream=True)["stream_options"] == {"include_usage": True}


def test_hints_and_nulls_are_ignored() -> None:
    hints = {
        "store": True, "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"],
        "truncation": "disabled", "background": False, "prompt_cache_key": "k",
        "previous_response_id": None, "temperature": None, "tools": None, "text": None, "stream": None,
        "max_tool_calls": 3,
    }  # fmt: skip
    assert to_chat(**hints) == to_chat()


@pytest.mark.parametrize(
    ("fields", "param", "advice"),
    [
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"background": True}, "background", "stream"),
        ({"truncation": "auto"}, "truncation", "shorter"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice", "by its name"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "itself"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "input_text",
        ),
    ],
)
def test_unsupported_parameter_is_refused_with_alternative(fields: dict[str, Any], param: str, advice: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        to_chat(**fields)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    assert advice in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"input": 7},
        {"input": [7]},
        {"input": [{"role": "user"}]},
        {"input": [{"role": "user", "content": [7]}]},
        {"input": [{"type": 7}]},
        {"input": [{"type": "function_call", "name": "x"}]},
        {"tools": [7]},
        {"tools": [{"type": "function"}]},
        {"tool_choice": 7},
        {"temperature": 9},
        {"n": 2},
    ],
)
def test_malformed_request_is_bad_request(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        to_chat(**fields)
