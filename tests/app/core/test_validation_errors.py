"""What a client reads about an invalid body: the place as in its JSON, and no word of the validator."""

import re
from typing import Any

import pytest
from pydantic import BaseModel, Field, RootModel

from app.chat.schemas import parse_chat_request
from app.core.errors import BadRequest
from app.core.http import parse_body
from app.core.settings import Settings
from app.feedback.kinds import parse_feedback
from app.policies.override_checks import check
from app.responses.request import parse_responses_request
from app.training.policy_config import parse_rewards
from app.training.rollouts import PlanRequest
from tests.support.deployment import Harness

USER = {"role": "user", "content": "hi"}
COMPLETION_ID = "chatcmpl-" + "0" * 32
LEAKS = re.compile(
    r"list\[|union|literal\[|function-|discriminator|\btag\b|instance of|dictionary|pydantic|Value error|\[key\]"
    r"|\.str\b|TextPart|NamedToolChoice|~"
)


def text_part(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER | {"content": [{"type": "text", "text": "a"} | fields]}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


CHATS: list[tuple[dict[str, Any], str, str]] = [
    (text_part(bold=True), "messages.0.content.0.bold", "Unknown parameter"),
    (text_part(type="image"), "messages.0.content.0.type", "one of 'text', 'refusal', not 'image'"),
    (text_part(text=None), "messages.0.content.0.text", "valid string"),
    ({"messages": [USER | {"content": [{"text": "a"}]}]}, "messages.0.content.0.type", "required"),
    ({"messages": [USER | {"content": ["a"]}]}, "messages.0.content.0", "an object"),
    ({"messages": [USER | {"content": 5}]}, "messages.0.content", "a valid string or a list"),
    ({"messages": [5]}, "messages.0", "an object"),
    ({"messages": "hi"}, "messages", "a list"),
    (tool(colour="red"), "tools.0.function.colour", "Unknown parameter"),
    ({"stop": [1]}, "stop.0", "valid string"),
    ({"stop": {"text": "a"}}, "stop", "a valid string or a list"),
    ({"tool_choice": "always"}, "tool_choice", "'none', 'auto' or 'required' or an object"),
    ({"tool_choice": {"type": "function", "strict": True}}, "tool_choice.function", "required"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
        "tool_choice.function.x",
        "Unknown parameter",
    ),
    ({"response_format": "json"}, "response_format", "an object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "not 'xml'"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", "required"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "Unknown parameter"),
    ({"logit_bias": {"word": 1}}, "logit_bias.word", "name is not allowed"),
    ({"metadata": {"k": 5}}, "metadata.k", "valid string"),
    ({"metadata": {str(index): "v" for index in range(17)}}, "metadata", "Object should have at most 16 items"),
]


def require_plain(error: BadRequest, param: str, words: str) -> None:
    assert error.param == param and words in error.message
    assert LEAKS.search(error.message) is None and LEAKS.search(param) is None


@pytest.mark.parametrize(("fields", "param", "words"), CHATS)
def test_chat_error_names_place_in_body(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_chat_request({"model": "shop", "messages": [USER]} | fields)
    require_plain(error.value, param, words)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": [5]}, "input.0", "message, function_call, function_call_output"),
        ({"input": [{"type": 7}]}, "input.0", "message, function_call, function_call_output"),
        ({"input": 5}, "input", "a list"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text", "required"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "required"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "not 'grammar'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
        ({"tool_choice": {"type": "function", "name": "f", "x": 1}}, "tool_choice.x", "Unknown parameter"),
    ],
)
def test_responses_error_names_place_in_body(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_responses_request({"model": "shop", "input": "hi"} | fields)
    require_plain(error.value, param, words)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"kind": "binary", "value": True, "target": {"conversation_id": 5}}, "target.conversation_id", "string"),
        ({"kind": "binary", "value": True, "target": {"metadata": {}}}, "target.metadata", "Object should have"),
        ({"kind": "binary", "value": True, "target": 5}, "target", "an object"),
        ({"kind": "binary", "value": "good", "completion_id": COMPLETION_ID}, "value", "'up', 'down'"),
        ({"kind": "binary", "value": True, "source": {"id": "u", "age": 7}}, "source.age", "Unknown parameter"),
        ({"kind": "ranking", "value": [[[COMPLETION_ID]]]}, "value.0.0", "a tie holds no other tie"),
        ({"kind": "ranking", "value": [[{"completion_id": 5}, "x"]]}, "value.0.0.completion_id", "string"),
        ({"kind": "rating", "value": 3, "scale": [1], "completion_id": COMPLETION_ID}, "scale.1", "required"),
    ],
)
def test_feedback_error_names_place_in_body(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_feedback(body)
    require_plain(error.value, param, words)


@pytest.mark.parametrize(
    ("source", "param", "words"),
    [
        ({"type": "oracle"}, "sources.0.type", "not 'oracle'"),
        ({}, "sources.0.type", "required"),
        ({"type": "judge", "model": "m"}, "sources.0.url", "required"),
        (5, "sources.0", "an object"),
    ],
)
def test_rewards_error_names_place_in_body(source: Any, param: str, words: str) -> None:
    settings = Settings()
    with pytest.raises(BadRequest) as error:
        parse_rewards({"sources": [source]}, settings, settings.algorithm)
    require_plain(error.value, param, words)
    with pytest.raises(BadRequest) as error:
        check({"rewards": {"sources": [source]}}, settings)
    assert f"rewards.{param}:" in error.value.message and LEAKS.search(error.value.message) is None


@pytest.mark.parametrize(
    ("verifier", "param"),
    [
        ({}, "verifier.type"),
        ({"type": "x"}, "verifier.type"),
        ({"type": "number", "x": 1}, "verifier.x"),
        (5, "verifier"),
    ],
)
def test_plan_error_names_place_in_body(verifier: Any, param: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_body(PlanRequest, {"dataset": "d", "verifier": verifier})
    require_plain(error.value, param, "")


class Leaf(BaseModel):
    text: int = Field(alias="Text")


class Nested(BaseModel):
    leaves: dict[str, list[Leaf | None] | bool] | tuple[Leaf, ...] | None = None
    child: "Nested | None" = None


class Root(RootModel[dict[str, Nested]]):
    """A body whose names are the client's."""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"a": {"leaves": {"b": [None, {"Text": "x"}]}}}, "a.leaves.b.1.Text"),
        ({"a": {"leaves": [{"Text": "x"}]}}, "a.leaves.0.Text"),
        ({"a": {"leaves": {"b": 5.5}}}, "a.leaves.b"),
        ({"a": {"child": {"child": {"leaves": 7}}}}, "a.child.child.leaves"),
        ({"a": {"child": 7}}, "a.child"),
        ({"text": {"leaves": {"dict": [{}]}}}, "text.leaves.dict.0.Text"),
    ],
)
def test_unions_within_unions_and_recursive_models(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_body(Root, body)
    require_plain(error.value, param, "")


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/chat/completions?limit=many", "limit"),
        ("/v1/chat/completions?limit=0", "limit"),
        ("/v1/chat/completions?order=up", "order"),
        (f"/v1/feedback?completion_id={COMPLETION_ID}&limit=1.5", "limit"),
    ],
)
async def test_parameter_of_an_address_is_named(harness: Harness, path: str, param: str) -> None:
    response = await harness.api.get(path)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert LEAKS.search(error["message"]) is None
