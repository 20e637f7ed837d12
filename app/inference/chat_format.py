"""OpenAI's chat completions and their chunks, as the dicts that engines send and clients get.

They are not validated: an engine keeps the format, and what it adds to it stays in its package.
"""

from typing import NotRequired, TypedDict

from alignment.chat_messages import AssistantMessage


class TokenLogprob(TypedDict):
    """A token and its log-prob; null where the engine did not report it. `top_logprobs` are the most probable ones."""

    token: str
    logprob: float | None
    bytes: NotRequired[list[int] | None]
    top_logprobs: NotRequired[list["TokenLogprob"] | None]


class Logprobs(TypedDict):
    content: list[TokenLogprob]


class CachedTokens(TypedDict, total=False):
    cached_tokens: int | None


class ReasoningTokens(TypedDict, total=False):
    reasoning_tokens: int | None


class Usage(TypedDict):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[CachedTokens | None]
    completion_tokens_details: NotRequired[ReasoningTokens | None]


class FunctionPart(TypedDict, total=False):
    """The name comes in the first part of a call, the arguments in all of them."""

    name: str | None
    arguments: str | None


class ToolCallPart(TypedDict):
    index: int
    id: NotRequired[str | None]
    type: NotRequired[str | None]
    function: FunctionPart


class Delta(TypedDict, total=False):
    role: str | None
    content: str | None
    tool_calls: list[ToolCallPart] | None


class ChunkChoice(TypedDict):
    """`matched_stop`: the stop text that ended the reply, or the id of the token that did."""

    delta: Delta
    finish_reason: str | None
    index: NotRequired[int]
    logprobs: NotRequired[Logprobs | None]
    matched_stop: NotRequired[str | int | None]


class ChatChunk(TypedDict):
    """The last chunk of a stream may have no choices, and the usage."""

    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    id: NotRequired[str]
    object: NotRequired[str]
    created: NotRequired[int]
    model: NotRequired[str]
    system_fingerprint: NotRequired[str | None]


class Choice(TypedDict):
    message: AssistantMessage
    finish_reason: str | None
    index: NotRequired[int]
    logprobs: NotRequired[Logprobs | None]
    matched_stop: NotRequired[str | int | None]


class ChatCompletion(TypedDict):
    id: str
    model: str
    created: int
    choices: list[Choice]
    usage: Usage
    object: NotRequired[str]
    system_fingerprint: NotRequired[str | None]


def plain_usage(usage: Usage) -> Usage:
    """Return the three numbers alone: engines add fields of their own."""
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }


def to_chunk(completion: ChatCompletion) -> ChatChunk:
    """Return the chunk that holds the whole of a completion with one choice."""
    [choice] = completion["choices"]
    message = choice["message"]
    delta: Delta = {"content": message.get("content")}
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [
            {
                "index": index,
                "id": call["id"],
                "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            }
            for index, call in enumerate(calls)
        ]
    return {
        "choices": [
            {
                "delta": delta,
                "finish_reason": choice["finish_reason"],
                "logprobs": choice.get("logprobs"),
                "matched_stop": choice.get("matched_stop"),
            }
        ],
        "usage": completion["usage"],
    }
