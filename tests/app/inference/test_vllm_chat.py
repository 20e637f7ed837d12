"""vLLM's requests, replies and errors, without vLLM."""

from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.inference.chat_format import ChatChunk
from app.inference.engine import AdapterPayload
from app.inference.transport import AdapterMissing, EngineRefused, EngineUnavailable
from app.inference.vllm.chat import VLLMCompletion, VLLMStreamState, cache_salt, capture_response, chat_body, request_id
from app.inference.vllm.client import VLLMClient
from app.inference.vllm.errors import NotANumber, to_engine_error
from tests.support.engine_replies import MakeCall
from tests.support.scripted_engine import serve

TOOL = {"type": "function", "function": {"name": "f"}}


def test_only_listed_fields_reach_the_engine(make_call: MakeCall) -> None:
    hostile = {"role": "user", "content": "hi", "lora_path": "x", "vllm_xargs": {"attune_prompt_ids": [1]}}
    body = chat_body(make_call(messages=[hostile], prefix_key="/versions/shop-v1", priority=-1), stream=True)
    assert body["messages"] == [{"role": "user", "content": "hi"}] and "vllm_xargs" not in body
    assert body["model"] == "base" and body["temperature"] == 1.0 and body["top_k"] == -1 and body["n"] == 1
    assert body["priority"] == 1, "in vLLM the lowest comes first"
    assert body["cache_salt"] == cache_salt("/versions/shop-v1") and "/" not in str(body["cache_salt"])


def test_call_names_its_version_its_id_and_its_prompt(make_call: MakeCall) -> None:
    call = make_call(adapter="shop-v1", prompt_ids=[5, 6])
    body = chat_body(call, stream=False)
    assert body["model"] == "shop-v1" and body["vllm_xargs"] == {"attune_prompt_ids": [5, 6]}
    assert request_id(call.rid) == f"chatcmpl-{body['request_id']}" == call.rid


def test_further_tool_calls_are_cut_by_the_capture_not_by_vllm(make_call: MakeCall) -> None:
    """vLLM would cut them from the message, and the turn would be trained on with all their tokens."""
    free = make_call(tools=[TOOL], parallel_tool_calls=False)
    forced = make_call(tools=[TOOL], parallel_tool_calls=False, tool_choice="required")
    assert chat_body(free, stream=False)["parallel_tool_calls"] is True
    assert chat_body(forced, stream=False)["parallel_tool_calls"] is False
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(2)]
    capture = capture_response(free, response(tool_calls=calls))
    assert len(capture.tool_calls) == 1 and "several tool calls" in (capture.exclusion_reason or "")


def response(**message: Any) -> VLLMCompletion:
    choice = {
        "message": {"content": "Hello", "refusal": None, **message},
        "token_ids": [7, 8],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]},
        "finish_reason": "stop",
    }
    return cast(VLLMCompletion, {"prompt_token_ids": [5, 6], "choices": [choice]})


def test_whole_reply_is_captured(make_call: MakeCall) -> None:
    capture = capture_response(make_call(), response())
    assert (capture.prompt_ids, capture.output_ids, capture.logprobs) == ([5, 6], [7, 8], [-0.5, -1.5])
    assert (capture.text, capture.finish_reason, capture.exclusion_reason) == ("Hello", "stop", None)


@pytest.mark.parametrize(("stop_reason", "finish_reason"), [(None, "tool_calls"), ("END", "stop")])
def test_reply_with_a_named_call_ends_with_tool_calls(
    make_call: MakeCall, stop_reason: str | None, finish_reason: str
) -> None:
    """vLLM says "stop"; a stop text may have cut the call."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    whole = response(tool_calls=[call])
    whole["choices"][0]["stop_reason"] = stop_reason
    assert capture_response(make_call(), whole).finish_reason == finish_reason
    state = VLLMStreamState(make_call())
    for delta, finish in (({"tool_calls": [{"index": 0, **call}]}, None), ({}, "stop")):
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop_reason}
        state.add_chunk({"choices": [choice], "usage": None})
    assert state.capture().finish_reason == finish_reason


def test_stream_is_captured_and_passed_on_with_openai_fields_only(make_call: MakeCall) -> None:
    call = make_call(logprobs=True, include_usage=True)
    state = VLLMStreamState(call)

    def chunk(delta: dict[str, Any], ids: list[int], finish: str | None = None, **more: Any) -> ChatChunk | None:
        logprobs = {"content": [{"token": "x", "logprob": -1.0} for _ in ids]} if ids else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "token_ids": ids}
        frame = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "shop-v1"}
        return state.add_chunk(frame | {"choices": [choice | {"stop_reason": None}], "metrics": {}} | more)

    first = chunk({"role": "assistant", "content": ""}, [], prompt_token_ids=[5, 6])
    sent = [chunk({"content": "Hel", "reasoning": None}, [7]), chunk({}, [8, 9], "stop")]
    assert first is not None and set(first) == {"id", "object", "created", "model", "choices", "usage"}
    assert all(part is not None and part["model"] == call.target.label and part["id"] == call.rid for part in sent)
    choices = [part["choices"][0] for part in sent if part is not None]
    assert {*choices[0]} == {"index", "delta", "logprobs", "finish_reason"}
    assert choices[0]["delta"] == {"content": "Hel"}
    capture = state.capture()
    assert (capture.prompt_ids, capture.output_ids, capture.logprobs) == ([5, 6], [7, 8, 9], [-1.0] * 3)
    assert (capture.text, capture.finish_reason, capture.exclusion_reason) == ("Hel", "stop", None)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (404, "The model `shop-v9` does not exist.", AdapterMissing),
        (400, "Out of range float values are not JSON compliant: nan", NotANumber),
        (500, "Call to add_lora method failed: Worker failed with error", EngineRefused),
        (500, "EngineCore encountered an issue.", EngineUnavailable),
        (400, "This model's maximum context length is 2048 tokens.", EngineRefused),
        (401, "Unauthorized", EngineRefused),
    ],
)
def test_errors_are_told_apart(status: int, message: str, kind: type[Exception]) -> None:
    error = to_engine_error(status, orjson.dumps({"error": {"message": message, "code": status}}))
    assert type(error) is kind
    assert (error.code == "context_length_exceeded") == ("context length" in message)


async def test_scores_that_are_not_numbers_clear_the_cache_while_requests_wait() -> None:
    seen: list[str] = []

    async def answer(request: Request) -> Response:
        seen.append(request.url.path)
        if request.url.path == "/v1/completions":
            return JSONResponse({"error": {"message": "Out of range float values are not JSON compliant"}}, 400)
        return JSONResponse({})

    with serve(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])) as url:
        client = VLLMClient(url)
        [scores] = await client.score("shop-v1", [[1, 2, 3]])
        await client.aclose()
    assert len(scores) == 2 and all(value != value for value in scores)
    assert seen == ["/v1/completions", "/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]


async def test_adapter_in_a_request_is_unavailable() -> None:
    client = VLLMClient("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable, match="ATTUNE_ENGINE__ADAPTER_DELIVERY"):
        await client.load_adapter("shop-v1", AdapterPayload({}, ""))
    await client.aclose()


async def test_answers_in_plain_text_are_no_errors() -> None:
    async def answer(request: Request) -> Response:
        return Response("Success: LoRA adapter 'shop-v1' added successfully.")

    with serve(Starlette(routes=[Route("/v1/load_lora_adapter", answer, methods=["POST"])])) as url:
        client = VLLMClient(url)
        await client.load_adapter("shop-v1", Path("/versions/shop-v1"))
        await client.aclose()
