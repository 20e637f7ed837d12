"""Translate a chat completion into a response object, and its chunks into the typed events of a streamed response."""

import time
from collections.abc import Mapping
from typing import Literal, TypedDict, cast

from alignment.json_values import as_object
from app.chat.typed_events import Event
from app.core.errors import AttuneError
from app.inference.chat_format import (
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    TokenLogprob,
    ToolCallPart,
    Usage,
    to_chunk,
)
from app.models import ServiceTier
from app.responses.request import ResponsesRequest

STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "content_filter": "incomplete"}
INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


def render_response(request: ResponsesRequest, completion: Mapping[str, object]) -> dict[str, object]:
    """Return a whole chat completion as a response object: the one that ends the stream of the same reply."""
    chat = cast(ChatCompletion, completion)
    events = ResponseEvents(request, chat["id"], chat["model"], chat["created"])
    events.add_chunk(to_chunk(chat))
    return as_object(events.finish()[-1]["response"])


class TextPart(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[object]
    logprobs: list[TokenLogprob]


class MessageItem(TypedDict):
    id: str
    status: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[TextPart]


class CallItem(TypedDict):
    id: str
    status: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseEvents:
    """Call `start`, `add_chunk` for every chunk, then `finish` or `fail`; each returns the numbered events to send."""

    def __init__(self, request: ResponsesRequest, completion_id: str, model: str, created: int) -> None:
        self._response = _new_response(request, completion_id, model, created)
        self._id_suffix = completion_id.partition("-")[2]
        self._sequence_number = 0
        self._output: list[MessageItem | CallItem] = []  # the items that are complete
        self._item: MessageItem | CallItem | None = None  # the item that is still generated, if any
        self._call_index: int | None = None  # of that item in the chat's tool calls
        self._finish_reason = ""
        self._usage: Usage | None = None
        self._pending_logprobs: list[TokenLogprob] = []  # of tokens without text yet; they go with the next text

    def start(self) -> list[Event]:
        return [self._event(type, response=self._response) for type in ("created", "in_progress")]

    def add_chunk(self, chunk: ChatChunk) -> list[Event]:
        self._usage = chunk.get("usage") or self._usage
        events: list[Event] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._pending_logprobs += _response_logprobs(choice)
            if content := delta.get("content"):
                events += self._add_text(content)
            for piece in delta.get("tool_calls") or ():
                events += self._add_tool_call(piece)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return events

    def finish(self) -> list[Event]:
        status = STATUS.get(self._finish_reason, "failed")
        if status == "failed":
            return self.fail(AttuneError("The reply ended before it was complete."))
        events = [] if self._output or self._item else self._open_message()[1]
        events += self._close_item(status)
        reason = INCOMPLETE_REASONS.get(self._finish_reason)
        response = self._response | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": self._output,
            "usage": response_usage(self._usage),
        }
        return [*events, self._event(status, response=response)]

    def fail(self, error: AttuneError) -> list[Event]:
        """Return the failure event. The response holds the output so far; its last item stays incomplete."""
        output = [*self._output]
        if self._item is not None:
            self._item["status"] = "incomplete"
            output.append(self._item)
        response = self._response | {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
            "output": output,
            "usage": response_usage(self._usage),
        }
        return [self._event("failed", response=response)]

    def _add_text(self, text: str) -> list[Event]:
        part, events = self._open_message()
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        part["text"] += text
        part["logprobs"] += logprobs
        return [*events, self._item_event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _open_message(self) -> tuple[TextPart, list[Event]]:
        """Return the text of the message that is generated, and the events of a new one."""
        if self._item is not None and self._item["type"] == "message":
            return self._item["content"][0], []
        events = self._close_item("completed")
        item: MessageItem = {
            "id": self._new_id("msg"),
            "status": "in_progress",
            "type": "message",
            "role": "assistant",
            "content": [],
        }
        events.append(self._open_item(item))
        part = _text_part()
        item["content"] = [part]
        return part, [*events, self._item_event("content_part.added", content_index=0, part=_text_part())]

    def _add_tool_call(self, piece: ToolCallPart) -> list[Event]:
        function = piece.get("function") or {}
        events: list[Event] = []
        if self._call_index != piece["index"]:
            events = self._close_item("completed")
            call: CallItem = {
                "id": self._new_id("fc"),
                "status": "in_progress",
                "type": "function_call",
                "call_id": piece.get("id") or "",
                "name": function.get("name") or "",
                "arguments": "",
            }
            events.append(self._open_item(call))
            self._call_index = piece["index"]
        arguments = function.get("arguments")
        if arguments and self._item is not None and self._item["type"] == "function_call":
            self._item["arguments"] += arguments
            events.append(self._item_event("function_call_arguments.delta", delta=arguments))
        return events

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id_suffix}_{len(self._output)}"

    def _open_item(self, item: MessageItem | CallItem) -> Event:
        self._item = item
        return self._event("output_item.added", output_index=len(self._output), item=dict(item))

    def _close_item(self, status: str) -> list[Event]:
        if self._item is None:
            return []
        item = self._item
        item["status"] = status
        if item["type"] == "message":
            [part] = item["content"]
            part["logprobs"] += self._pending_logprobs
            events = [
                self._item_event("output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]),
                self._item_event("content_part.done", content_index=0, part=part),
            ]
            self._pending_logprobs = []
        else:
            events = [self._item_event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])]
        events.append(self._event("output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._item, self._call_index = None, None
        return events

    def _item_event(self, type: str, **fields: object) -> Event:
        assert self._item is not None, "an event about no item"
        return self._event(type, item_id=self._item["id"], output_index=len(self._output), **fields)

    def _event(self, type: str, **fields: object) -> Event:
        event: Event = {"type": f"response.{type}", **fields, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return event


def _new_response(request: ResponsesRequest, completion_id: str, model: str, created: int) -> dict[str, object]:
    """Return the response object before there is any output. Its id is "resp_9f2c…" for "chatcmpl-9f2c…"."""
    choice = request.tool_choice
    text_format = request.text.format if request.text else None
    return {
        "id": "resp_" + completion_id.partition("-")[2],  # feedback accepts both ids
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "completion_id": completion_id,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier or ServiceTier.DEFAULT,
        "store": True,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": text_format.model_dump(by_alias=True) if text_format else {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "tools": [tool.model_dump() | {"strict": bool(tool.strict)} for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _text_part() -> TextPart:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _response_logprobs(choice: ChunkChoice) -> list[TokenLogprob]:
    """Return the log-probs of a choice. The Responses API requires `bytes` and `top_logprobs` for every token."""
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return []
    return [
        {**_with_bytes(token), "top_logprobs": [_with_bytes(other) for other in token.get("top_logprobs") or ()]}
        for token in logprobs["content"]
    ]


def _with_bytes(token: TokenLogprob) -> TokenLogprob:
    return {**token, "bytes": token.get("bytes") or []}


def response_usage(usage: Usage | None) -> dict[str, object] | None:
    """Return a chat completion's usage in the form of the Responses API."""
    if usage is None:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
