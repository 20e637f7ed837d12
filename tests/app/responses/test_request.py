"""A Responses request says the same as the chat request it becomes; what it cannot say is refused with advice."""

from typing import Any

import pytest

from app.core.errors import BadRequest, UnsupportedParameter
from app.responses import schemas
from app.responses.request import chat_body

WEATHER = {"type": "function", "name": "weather", "description": "Look out.", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": "{}"}


def asked(**fields: Any) -> dict[str, Any]:
    return chat_body(schemas.read({"model": "shop", "input": "hi", **fields}))


def test_a_string_is_a_message_of_the_user() -> None:
    assert asked() == {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}


def test_instructions_come_first() -> None:
    said = asked(instructions="Be kind.")["messages"]
    assert said == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert asked(instructions="")["messages"] == [{"role": "user", "content": "hi"}]


def test_parts_are_joined_and_roles_kept() -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "id": "msg_1", "status": "completed", "phase": "final_answer", "content": [
            {"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
            {"type": "output_text", "text": "c", "annotations": []},
        ]},
    ]  # fmt: skip
    assert asked(input=items)["messages"] == [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
    ]


def test_calls_belong_to_the_message_they_were_made_in() -> None:
    items = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "Let me see."},
        CALL,
        CALL | {"call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "wet"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "dry"}]},
        CALL | {"call_id": "call_3"},
    ]
    _, said, first, second, silent = asked(input=items)["messages"]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert said == {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call | {"id": "call_2"}]}
    assert first == {"role": "tool", "tool_call_id": "call_1", "content": "wet"}
    assert second == {"role": "tool", "tool_call_id": "call_2", "content": "dry"}
    assert silent == {"role": "assistant", "content": None, "tool_calls": [call | {"id": "call_3"}]}


def test_tools_are_unfolded_and_strict_only_when_asked_for() -> None:
    body = asked(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False)
    function = {"name": "weather", "description": "Look out.", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert body["parallel_tool_calls"] is False
    assert asked(tools=[WEATHER | {"strict": True}])["tools"][0]["function"]["strict"] is True


def test_the_format_of_the_text_is_the_response_format() -> None:
    schema = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}
    assert asked(text={"format": schema, "verbosity": "low"})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
    }
    assert asked(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in asked(text={"format": {"type": "text"}})


def test_sampling_and_bookkeeping_are_handed_on() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s"}
    assert asked(**given, max_output_tokens=9).items() >= (given | {"max_completion_tokens": 9}).items()
    assert asked(top_logprobs=2).items() >= {"logprobs": True, "top_logprobs": 2}.items()
    assert asked(include=[schemas.LOGPROBS])["logprobs"] is True
    assert asked(stream=True)["stream_options"] == {"include_usage": True}


def test_hints_and_nulls_change_nothing() -> None:
    hints = {
        "store": True, "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"],
        "service_tier": "auto", "truncation": "disabled", "background": False, "prompt_cache_key": "k",
        "previous_response_id": None, "temperature": None, "tools": None, "text": None, "stream": None,
        "max_tool_calls": 3,
    }  # fmt: skip
    assert asked(**hints) == asked()


@pytest.mark.parametrize(
    ("fields", "param", "advice"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation"),
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
def test_what_changes_meaning_is_refused_with_advice(fields: dict[str, Any], param: str, advice: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        asked(**fields)
    assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")
    assert advice in refused.value.message


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
def test_what_is_malformed_is_a_bad_request(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        asked(**fields)
