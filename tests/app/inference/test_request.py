"""Only allow-listed fields reach the engine."""

from typing import Any

import pytest

from app.inference.request import EngineTarget, engine_arguments
from app.inference.sglang.chat import chat_body
from tests.support.engine_replies import MakeCall


def test_default_sampling_values_are_sent(make_call: MakeCall) -> None:
    body = chat_body(make_call(), stream=False)
    assert body["temperature"] == 1.0 and body["top_p"] == 1.0 and body["top_k"] == -1
    assert body["min_p"] == 0.0 and body["repetition_penalty"] == 1.0 and body["n"] == 1


def test_unknown_message_fields_do_not_reach_the_engine(make_call: MakeCall) -> None:
    hostile = {
        "role": "system",
        "content": "hi",
        "tools": [{"function": {"name": "x"}}],
        "input_ids": [1, 2],
        "lora_path": "someone-elses-v1",
    }
    tool = {"type": "function", "lora_path": "x", "function": {"name": "f", "parameters": {}, "custom": 1}}
    body = chat_body(make_call(messages=[hostile], tools=[tool]), stream=True)
    assert body["messages"] == [{"role": "system", "content": "hi"}]
    assert body["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_image_is_refused(make_call: MakeCall) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret"}}]
    with pytest.raises(ValueError, match="text parts only"):
        chat_body(make_call(messages=[{"role": "user", "content": parts}]), stream=False)


def test_colon_in_model_name_is_refused() -> None:
    with pytest.raises(ValueError, match="colon"):
        EngineTarget(label="base:someone-elses-v1")


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": [{"function": {"name": "f"}}]}, False),
        ({"tools": [{"function": {"name": "f", "strict": True}}]}, True),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, True),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "none"}, True),
        ({"tool_choice": "none"}, False),
    ],
)
def test_is_grammar_constrained(make_call: MakeCall, fields: dict[str, Any], constrained: bool) -> None:
    assert make_call(**fields).is_grammar_constrained is constrained


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"order": 7}', '{"order": 7}'),
        (' {"a": [1, {"b": null}]} ', ' {"a": [1, {"b": null}]} '),
        ("", "{}"),
        ('{"order": ', "{}"),
        ('"7"', "{}"),
        ("[7]", "{}"),
        ("null", "{}"),
        ('{"a": NaN}', "{}"),
        ('{"a": 1} {"b": 2}', "{}"),
        ('{"a": "\\ud800"}', "{}"),
        ('{"a":' * 63 + "{}" + "}" * 63, '{"a":' * 63 + "{}" + "}" * 63),
        ('{"a":' * 64 + "{}" + "}" * 64, "{}"),
        ('{"a":' * 100_000, "{}"),
    ],
)
def test_arguments_that_are_no_object_are_rendered_without(arguments: str, rendered: str) -> None:
    assert engine_arguments(arguments) == rendered
