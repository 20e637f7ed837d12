"""The `openai` client's chat completions: sync, async, streamed, structured, with tools, and errors."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from alignment.json_values import as_object
from app.core.settings import DEMO_MODEL
from demo.dialogues import ORDER_STATUS, SYSTEM
from tests.clients.conftest import CONSTRAINED, Record, Running, assert_exact
from tests.clients.retries import with_retries
from tests.support.engine_adapters import bias_without_end

BIASED = "a logit bias changed the sampling distribution"
MESSAGES: list[Any] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "When are you open on Friday?"},
]
ORDER: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is my order 4321?"}]
NAMED: Any = {"type": "function", "function": {"name": "order_status"}}
DAY = {
    "type": "object",
    "properties": {"day": {"enum": ["Friday", "Saturday"]}},
    "required": ["day"],
    "additionalProperties": False,
}
OPENING_HOURS: Any = {"type": "function", "function": {"name": "opening_hours", "parameters": DAY}}


class Opening(BaseModel):
    day: Literal["Friday", "Saturday"]
    open: bool


@pytest.fixture
def client(attune: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=attune.base_url, api_key=attune.key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(attune: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=attune.base_url, api_key=attune.key, max_retries=0, timeout=60) as client:
        yield client


def test_reply_is_recorded(client: openai.OpenAI, record: Record) -> None:
    reply = client.chat.completions.create(model="shop", messages=MESSAGES)
    assert (reply.object, reply.model) == ("chat.completion", "shop@v0")
    assert reply.usage is not None
    turn = record.turn(reply.id)
    assert turn.reply == {"role": "assistant", "content": reply.choices[0].message.content}
    assert (turn.num_prompt_tokens, turn.num_output_tokens) == (
        reply.usage.prompt_tokens,
        reply.usage.completion_tokens,
    )


def test_headers_name_completion_and_version(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="shop@v0", messages=MESSAGES, max_tokens=8)
    assert raw.headers["x-completion-id"] == raw.parse().id
    assert raw.headers["x-policy-version"] == "shop@v0"
    assert raw.headers["x-request-id"] == raw.parse()._request_id


def test_streamed_reply_is_recorded(client: openai.OpenAI, record: Record) -> None:
    stream = client.chat.completions.create(
        model="shop", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    turn = record.turn(chunks[0].id)
    assert turn.stream and turn.reply == {"role": "assistant", "content": text}
    assert turn.num_output_tokens == chunks[-1].usage.completion_tokens


def test_streamed_reply_comes_in_pieces(client: openai.OpenAI) -> None:
    never_ends: Any = {"logit_bias": bias_without_end(DEMO_MODEL)}  # else the reply may have one token or two
    stream = client.chat.completions.create(
        model="shop", messages=MESSAGES, stream=True, max_tokens=32, extra_body=never_ends
    )
    assert len(list(stream)) > 4


async def test_async_client(async_client: openai.AsyncOpenAI, record: Record) -> None:
    params: Any = {"model": "shop", "messages": MESSAGES, "max_tokens": 16}
    reply = await async_client.chat.completions.create(**params)
    record.turn(reply.id)
    stream = await async_client.chat.completions.create(**params, stream=True)
    chunks = [chunk async for chunk in stream]
    record.turn(chunks[0].id)


def test_stream_helper(client: openai.OpenAI, record: Record) -> None:
    with client.chat.completions.stream(model="shop", messages=MESSAGES) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.done"} <= kinds
    assert ("content.delta" in kinds) == bool(final.choices[0].message.content), "a reply may be empty"
    turn = record.turn(final.id)
    assert turn.reply is not None and turn.reply["content"] == final.choices[0].message.content


@with_retries
def test_structured_output(client: openai.OpenAI, record: Record) -> None:
    reply = client.chat.completions.parse(model="shop", messages=MESSAGES, response_format=Opening, max_tokens=64)
    assert isinstance(reply.choices[0].message.parsed, Opening)
    turn = record.turn(reply.id, exclusion_reason=CONSTRAINED)
    assert as_object(turn.request_params["response_format"]["json_schema"])["strict"] is True


@with_retries
def test_streamed_structured_output(client: openai.OpenAI, record: Record) -> None:
    with client.chat.completions.stream(
        model="shop", messages=MESSAGES, response_format=Opening, max_tokens=64
    ) as stream:
        final = stream.until_done().get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Opening)
    record.turn(final.id, exclusion_reason=CONSTRAINED)


def test_json_object_format(client: openai.OpenAI, record: Record) -> None:
    reply = client.chat.completions.create(
        model="shop", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=80
    )
    if reply.choices[0].finish_reason == "stop":
        json.loads(reply.choices[0].message.content or "")
    record.turn(reply.id, exclusion_reason=CONSTRAINED)


@with_retries
def test_tool_call_and_result(client: openai.OpenAI, record: Record) -> None:
    tools: Any = [ORDER_STATUS]
    for seed in range(8):
        reply = client.chat.completions.create(model="shop", messages=ORDER, tools=tools, seed=seed, temperature=0.7)
        record.turn(reply.id)
        if reply.choices[0].message.tool_calls:
            break
    [call] = reply.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "order_status"
    assert json.loads(call.function.arguments).keys() == {"order_id"}
    assert reply.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"state": "shipped"}'}
    conversation: Any = [*ORDER, reply.choices[0].message, result]
    answer = client.chat.completions.create(model="shop", messages=conversation, tools=tools, max_tokens=24)
    assert answer.choices[0].message.content
    turn = record.turn(answer.id)
    assert turn.parent_id == reply.id, "the messages identify the parent turn"


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@with_retries
def test_required_tool_is_called(client: openai.OpenAI, record: Record, choice: Any, stream: bool) -> None:
    params: Any = {
        "model": "shop",
        "messages": ORDER,
        "tools": [ORDER_STATUS],
        "tool_choice": choice,
        "temperature": 0.3,
    }
    if stream:
        with client.chat.completions.stream(**params) as events:
            reply: Any = events.until_done().get_final_completion()
    else:
        reply = client.chat.completions.create(**params)
    call = reply.choices[0].message.tool_calls[0]
    assert call.function.name == "order_status" and json.loads(call.function.arguments).keys() == {"order_id"}
    turn = record.turn(reply.id, exclusion_reason=CONSTRAINED)
    assert turn.reply is not None and turn.reply["tool_calls"][0]["function"]["name"] == "order_status"


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_named_one_of_several_tools_is_called(client: openai.OpenAI, record: Record, stream: bool) -> None:
    """The model calls `order_status` for this question wherever the grammar leaves it the choice."""
    params: Any = {
        "model": "shop",
        "messages": ORDER,
        "tools": [ORDER_STATUS, OPENING_HOURS],
        "tool_choice": {"type": "function", "function": {"name": "opening_hours"}},
        "response_format": {"type": "json_object"},  # without effect, as the reply is a call
    }
    if stream:
        with client.chat.completions.stream(**params) as events:
            reply: Any = events.until_done().get_final_completion()
    else:
        reply = client.chat.completions.create(**params)
    [call] = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments).keys()) == ("opening_hours", {"day"})
    assert reply.choices[0].finish_reason == "tool_calls" and not reply.choices[0].message.content
    record.turn(reply.id, exclusion_reason=CONSTRAINED)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_three_choices_are_three_turns(client: openai.OpenAI, record: Record, stream: bool) -> None:
    if stream:
        with client.chat.completions.stream(model="shop", messages=MESSAGES, n=3) as events:
            reply: Any = events.until_done().get_final_completion()
    else:
        reply = client.chat.completions.create(model="shop", messages=MESSAGES, n=3, max_tokens=24)
    turns = record.turns(reply.id)
    assert [choice.index for choice in reply.choices] == [turn.choice_index for turn in turns] == [0, 1, 2]
    for choice, turn in zip(reply.choices, turns, strict=True):
        assert_exact(turn)
        assert turn.reply is not None and turn.reply["content"] == choice.message.content
    if not stream:
        assert reply.usage.completion_tokens == sum(turn.num_output_tokens or 0 for turn in turns)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_returned_log_probs_equal_recorded_ones(client: openai.OpenAI, record: Record, stream: bool) -> None:
    params: Any = {"model": "shop", "messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "max_tokens": 16}
    if stream:
        chunks = list(client.chat.completions.create(**params, stream=True))
        logprobs = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
        tokens, completion_id = [token for each in logprobs for token in each.content or ()], chunks[0].id
    else:
        reply = client.chat.completions.create(**params)
        tokens, completion_id = reply.choices[0].logprobs.content, reply.id
    turn = record.turn(completion_id)
    assert [token.logprob for token in tokens] == pytest.approx(turn.logprobs, abs=1e-6)
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    best = [max(token.top_logprobs, key=lambda other: other.logprob) for token in tokens]
    assert all(other.logprob >= token.logprob - 1e-6 for other, token in zip(best, tokens, strict=True))


def test_sampling_parameters(client: openai.OpenAI, record: Record) -> None:
    never_ends: Any = {"logit_bias": bias_without_end(DEMO_MODEL)}
    capped = client.chat.completions.create(
        model="shop", messages=MESSAGES, max_completion_tokens=3, extra_body=never_ends
    )
    assert capped.choices[0].finish_reason == "length"
    assert record.turn(capped.id, exclusion_reason=BIASED).num_output_tokens == 3
    params: Any = {"model": "shop", "messages": MESSAGES, "temperature": 0}
    greedy = client.chat.completions.create(**params)
    text = greedy.choices[0].message.content or ""
    assert record.turn(greedy.id, exclusion_reason="greedy decoding: the reply was not sampled")
    stopped = client.chat.completions.create(**params, stop=[text[10:13]])
    assert stopped.choices[0].message.content == text[: text.index(text[10:13])]
    [first, *_] = record.turn(greedy.id, exclusion_reason="greedy decoding: the reply was not sampled").output_ids or []
    banned = client.chat.completions.create(**params, logit_bias={str(first): -100}, max_tokens=4)
    assert first not in (record.turns(banned.id)[0].output_ids or [])


def test_errors_name_code_and_parameter(client: openai.OpenAI) -> None:
    wrong: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str]] = [
        ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
        ({"model": "shop@v9"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"extra_body": {"best_of": 2}}, openai.BadRequestError, "best_of", "unknown_parameter"),
        ({"function_call": "auto"}, openai.BadRequestError, "function_call", "unsupported_parameter"),
    ]
    for fields, kind, param, code in wrong:
        params: Any = {"model": "shop", "messages": MESSAGES, **fields}
        with pytest.raises(kind) as refused:
            client.chat.completions.create(**params)
        assert isinstance(refused.value.body, dict)
        assert refused.value.body.keys() == {"message", "type", "param", "code"}
        assert (refused.value.param, refused.value.code) == (param, code)


def test_wrong_key_is_authentication_error(attune: Running) -> None:
    with openai.OpenAI(base_url=attune.base_url, api_key="sk-attune-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()
        assert refused.value.code == "invalid_api_key"


def test_list_and_get_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["shop", "shop@v0"]
    assert client.models.retrieve("shop").owned_by == "attune"
    assert client.models.retrieve("shop@v0").id == "shop@v0"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_stored_completions(client: openai.OpenAI, record: Record) -> None:
    marks = {"visit": "stored"}
    created_completions = [
        client.chat.completions.create(model="shop", messages=MESSAGES, metadata=marks, store=True, max_tokens=8)
        for _ in range(3)
    ]
    stored = client.chat.completions
    retrieved = stored.retrieve(created_completions[0].id)
    assert retrieved.choices[0].message.content == created_completions[0].choices[0].message.content
    assert (retrieved.model, retrieved.usage and retrieved.usage.total_tokens) == (
        "shop@v0",
        created_completions[0].usage and created_completions[0].usage.total_tokens,
    )
    assert [message.content for message in stored.messages.list(created_completions[0].id)] == [
        m["content"] for m in MESSAGES
    ]
    ids = {completion.id for completion in created_completions}
    assert {completion.id for completion in stored.list(metadata=marks)} == ids
    assert {completion.id for completion in stored.list(metadata=marks, limit=2)} == ids, "the list is read in pages"
    assert list(stored.list(metadata={"visit": "nobody's"})) == []
    deleted = stored.delete(created_completions[0].id)
    assert deleted.deleted and deleted.id == created_completions[0].id
    with pytest.raises(openai.NotFoundError):
        stored.retrieve(created_completions[0].id)
    assert {completion.id for completion in stored.list(metadata=marks)} == ids - {created_completions[0].id}


def test_conversation_is_recognized(client: openai.OpenAI, record: Record) -> None:
    first = client.chat.completions.create(model="shop", messages=MESSAGES, max_tokens=24)
    history: Any = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "And on Sunday?"}]
    second = client.chat.completions.create(model="shop", messages=history, max_tokens=8)
    before, after = record.turn(first.id), record.turn(second.id)
    assert after.parent_id == before.id and after.conversation_id == before.conversation_id
    assert after.prefix_reuse is not None
    named = client.chat.completions.create(
        model="shop", messages=MESSAGES, max_tokens=8, metadata={"conversation_id": "mine"}
    )
    assert record.turn(named.id).conversation_id == "mine"
