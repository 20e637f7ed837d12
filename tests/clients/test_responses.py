"""The `openai` client's responses: created, streamed, parsed, with tools, and feedback on them."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from demo.dialogues import ORDER_STATUS, SYSTEM
from tests.clients.conftest import CONSTRAINED, Record, Running
from tests.clients.retries import with_retries

QUESTION = "When are you open on Friday?"
ORDER = "Where is my order 4321?"
TOOL: Any = {"type": "function", **ORDER_STATUS["function"], "strict": False}
NAMED: Any = {"type": "function", "name": "order_status"}


class Opening(BaseModel):
    day: Literal["Friday", "Saturday"]
    open: bool


@pytest.fixture
def client(attune: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=attune.base_url, api_key=attune.key, max_retries=0, timeout=60) as client:
        yield client


def completion_id(response: Response) -> str:
    assert response.id.startswith("resp_")
    return "chatcmpl-" + response.id.removeprefix("resp_")


@with_retries
def test_response_is_recorded_as_completion(client: openai.OpenAI, record: Record) -> None:
    raw = client.responses.with_raw_response.create(
        model="shop", instructions=SYSTEM, input=QUESTION, metadata={"visit": "responses"}
    )
    response = raw.parse()
    Response.model_validate(json.loads(raw.text))
    turn = record.turn(completion_id(response))
    assert raw.headers["x-completion-id"] == turn.id
    assert (response.status, response.model, response.metadata) == ("completed", "shop@v0", {"visit": "responses"})
    assert turn.reply == {"role": "assistant", "content": response.output_text}
    assert turn.own_messages == [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    assert response.usage is not None and response.usage.output_tokens == turn.num_output_tokens
    assert turn.request_metadata == {"visit": "responses"}


@with_retries
def test_streamed_response_has_typed_events(client: openai.OpenAI, record: Record) -> None:
    with client.responses.stream(model="shop", instructions=SYSTEM, input=QUESTION) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.completed" and final.output_text == text
    turn = record.turn(completion_id(final))
    assert turn.stream and turn.reply == {"role": "assistant", "content": text}
    assert final.usage is not None and final.usage.output_tokens == turn.num_output_tokens


@with_retries
def test_structured_output(client: openai.OpenAI, record: Record) -> None:
    response = client.responses.parse(model="shop", input=QUESTION, text_format=Opening, max_output_tokens=64)
    assert isinstance(response.output_parsed, Opening)
    record.turn(completion_id(response), exclusion_reason=CONSTRAINED)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@with_retries
def test_tool_loop_is_one_conversation(client: openai.OpenAI, record: Record, stream: bool) -> None:
    params: Any = {"model": "shop", "instructions": SYSTEM, "tools": [TOOL], "temperature": 0.3}
    input_items: list[Any] = [{"role": "user", "content": ORDER}]
    forced = {**params, "input": input_items, "tool_choice": NAMED}
    if stream:
        with client.responses.stream(**forced) as events:
            first: Response = events.get_final_response()
    else:
        first = client.responses.create(**forced)
    [call] = first.output
    assert isinstance(call, ResponseFunctionToolCall) and call.name == "order_status"
    assert json.loads(call.arguments).keys() == {"order_id"}
    input_items += [
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"state": "shipped"}'},
    ]
    second = client.responses.create(**params, input=input_items, max_output_tokens=160)
    assert second.status == "completed" and second.output
    before = record.turn(completion_id(first), exclusion_reason=CONSTRAINED)
    after = record.turn(completion_id(second))
    assert after.parent_id == before.id


def test_named_one_of_several_tools_is_called(client: openai.OpenAI) -> None:
    day = {
        "type": "object",
        "properties": {"day": {"enum": ["Friday", "Saturday"]}},
        "required": ["day"],
        "additionalProperties": False,
    }
    hours: Any = {"type": "function", "name": "opening_hours", "parameters": day, "strict": False}
    choice: Any = {"type": "function", "name": "opening_hours"}
    params: Any = {"model": "shop", "instructions": SYSTEM, "input": ORDER, "tools": [TOOL, hours]}
    [call] = client.responses.create(**params, tool_choice=choice).output
    assert call.type == "function_call" and call.name == "opening_hours"
    assert json.loads(call.arguments).keys() == {"day"}


def test_response_at_token_limit_is_incomplete(client: openai.OpenAI, record: Record) -> None:
    response = client.responses.create(model="shop", input=QUESTION, max_output_tokens=3, top_logprobs=2)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    [message] = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    tokens = message.content[0].logprobs or []
    turn = record.turn(completion_id(response))
    assert [token.logprob for token in tokens] == pytest.approx(turn.logprobs, abs=1e-6)
    assert all(len(token.top_logprobs) == 2 for token in tokens)


def test_feedback_on_response(client: openai.OpenAI, record: Record) -> None:
    response: Any = client.responses.create(model="shop", input=QUESTION, max_output_tokens=8)
    assert response.completion_id == completion_id(response)
    body = {"completion_id": response.completion_id, "kind": "binary", "value": True}
    client.post("/feedback", body=body, cast_to=object)
    assert [row.value for row in record.feedback(response.completion_id)] == [1.0]


def test_errors_name_the_alternative(client: openai.OpenAI) -> None:
    wrong: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str]] = [
        ({"conversation": "conv_1"}, openai.BadRequestError, "conversation", "unsupported_parameter"),
        ({"background": True}, openai.BadRequestError, "background", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools.0", "unsupported_parameter"),
        ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
    ]
    for fields, kind, param, code in wrong:
        params: Any = {"model": "shop", "input": QUESTION, **fields}
        with pytest.raises(kind) as refused:
            client.responses.create(**params)
        assert isinstance(refused.value.body, dict)
        assert refused.value.body.keys() == {"message", "type", "param", "code"}
        assert (refused.value.param, refused.value.code) == (param, code)


def test_response_is_retrieved_and_continued(client: openai.OpenAI, record: Record) -> None:
    first = client.responses.create(model="shop", instructions=SYSTEM, input=QUESTION, max_output_tokens=24)
    read = client.responses.retrieve(first.id)
    assert read.output == first.output and read.usage == first.usage
    params: Any = {"model": "shop", "instructions": SYSTEM, "max_output_tokens": 8}
    second = client.responses.create(**params, input="And on Saturday?", previous_response_id=first.id)
    turn = record.turns(completion_id(second))[0]
    assert turn.parent_id == completion_id(first) and turn.num_messages == 4


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_too_long_context_has_its_own_code(client: openai.OpenAI, stream: bool) -> None:
    text = "When are you open on Friday? " * 600
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="shop", messages=[{"role": "user", "content": text}], max_tokens=8, stream=stream
        )
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="shop", input=text, max_output_tokens=8, stream=stream)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
