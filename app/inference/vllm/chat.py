"""vLLM's chat requests and replies: the fields that it takes, and where it says which tokens it generated."""

import hashlib
from typing import NotRequired, TypedDict

from alignment.chat_messages import openai_tool_call
from app.inference.capture import Capture, build_capture, to_logprob
from app.inference.chat_format import Choice, Usage
from app.inference.request import ChatCall, engine_messages
from app.inference.stream import EngineChunk, StreamState

BASE_MODEL = "base"  # the name that the base model is served under
ID_PREFIX = "chatcmpl-"  # vLLM puts it before the id of a request, to name the reply
PROMPT_IDS_FIELD = "attune_prompt_ids"  # among the extra arguments; workers/engine/vllm_plugin reads it
CHUNK_FIELDS = frozenset({"id", "object", "created", "model", "choices", "usage"})
CHOICE_FIELDS = frozenset({"index", "delta", "logprobs", "finish_reason", "matched_stop"})
DELTA_FIELDS = frozenset({"role", "content", "tool_calls"})


class VLLMChoice(Choice):
    token_ids: list[int] | None
    stop_reason: NotRequired[str | int | None]


class VLLMCompletion(TypedDict):
    choices: list[VLLMChoice]
    usage: Usage
    prompt_token_ids: list[int] | None


def chat_body(call: ChatCall, *, stream: bool) -> dict[str, object]:
    """Return the body of the request for a reply."""
    body: dict[str, object] = {
        "request_id": call.rid.removeprefix(ID_PREFIX),
        "model": call.target.adapter or BASE_MODEL,
        "messages": engine_messages(call.messages),
        **call.sampling.body(),
        "stream": stream,
        "logprobs": True,
        "return_token_ids": True,
        **call.tool_fields(),
    }
    if stream and call.include_usage:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": call.names_stop_text}
    if call.tools and not call.is_grammar_constrained:
        # vLLM would drop further calls from the message, but not from the tokens. The capture cuts and excludes them.
        body["parallel_tool_calls"] = True
    optional = {
        "top_logprobs": call.top_logprobs or None,
        "cache_salt": cache_salt(call.target.prefix_key),
        "vllm_xargs": None if call.prompt_ids is None else {PROMPT_IDS_FIELD: list(call.prompt_ids)},
        "priority": None if call.priority is None else -call.priority,  # in vLLM the lowest comes first
        "response_format": None if call.requires_tool_call else call.response_format,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def cache_salt(extra_key: str | None) -> str | None:
    """Return the key of the prefix cache as vLLM takes it: short, and without slashes."""
    return None if extra_key is None else hashlib.sha256(extra_key.encode()).hexdigest()[:32]


def request_id(rid: str) -> str:
    """Return the id that vLLM knows a reply by."""
    return ID_PREFIX + rid.removeprefix(ID_PREFIX)


def capture_response(call: ChatCall, response: VLLMCompletion) -> Capture:
    """Return the capture of a whole reply."""
    choice = response["choices"][0]
    message, logprobs = choice["message"], choice.get("logprobs")
    received = Capture(
        prompt_ids=response["prompt_token_ids"] or [],
        output_ids=choice["token_ids"] or [],
        logprobs=[to_logprob(token["logprob"]) for token in (logprobs["content"] if logprobs else ())],
        text=message["content"] or "",
        tool_calls=[openai_tool_call(tool_call) for tool_call in message.get("tool_calls") or ()],
        finish_reason=_finish_reason(
            choice["finish_reason"], choice.get("stop_reason"), has_calls=bool(message.get("tool_calls"))
        ),
        weight_versions=[],  # its base weights never change
    )
    return build_capture(call, received)


def _finish_reason(finish_reason: str | None, stop_reason: str | int | None, *, has_calls: bool) -> str | None:
    """Return "tool_calls" for a reply that ended with a call. vLLM says "stop" where the request named the tool."""
    ended_itself = finish_reason == "stop" and stop_reason is None
    return "tool_calls" if ended_itself and has_calls else finish_reason


class VLLMStreamState(StreamState):
    """vLLM sends the prompt's ids in the first chunk, and the ids of the reply with each one."""

    def take_engine_fields(self, chunk: EngineChunk) -> None:
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        _keep(chunk, CHUNK_FIELDS)
        chunk["id"] = self.call.rid
        chunk["model"] = self.call.target.label
        for choice in chunk["choices"]:
            self.output_ids += choice.get("token_ids") or []
            has_calls = bool(self._tool_calls or choice["delta"].get("tool_calls"))
            stop_reason = choice.get("stop_reason")
            choice["finish_reason"] = _finish_reason(choice["finish_reason"], stop_reason, has_calls=has_calls)
            choice["matched_stop"] = stop_reason
            if not (choice.get("logprobs") or {}).get("content"):
                choice["logprobs"] = None
            _keep(choice, CHOICE_FIELDS)
            _keep(choice["delta"], DELTA_FIELDS)
            for part in choice["delta"].get("tool_calls") or ():
                part.setdefault("id", None)  # the later parts of a call have none


def _keep(table: dict[str, object], names: frozenset[str]) -> None:
    """Remove all other fields."""
    for name in table.keys() - names:
        del table[name]
