"""Translate a chat completion into a message of Anthropic's API, and its chunks into the events of a streamed one."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Required, TypedDict, cast

import orjson
from pydantic_core import from_json

from alignment.json_values import JsonObject
from app.chat.typed_events import Event
from app.core.errors import AttuneError, Unavailable
from app.inference.chat_format import ChatChunk, ChatCompletion, ChunkChoice, ToolCallPart, Usage, to_chunk
from app.messages.errors import error_body
from app.messages.thinking import Kind, ThinkingSplitter

PREFIX = "msg_"
# "stop" is "stop_sequence" if a stop text of the request ended the reply, and "tool_use" if the reply holds calls.
STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
PING_SECONDS = 5.0
INCOMPLETE = "The reply ended before it was complete."


class Block(TypedDict, total=False):
    """A part of a message's content: of the type "text", "thinking" or "tool_use", each with fields of its own."""

    type: Required[Literal["text", "thinking", "tool_use"]]
    text: str
    thinking: str
    signature: str
    id: str
    name: str
    input: JsonObject


class MessageUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageBody(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


def render_message(completion: Mapping[str, object], stop_sequences: Sequence[str] | None) -> MessageBody:
    """Return a whole chat completion as a message: the one that the stream of the same reply adds up to.

    Raises Unavailable if the engine ended the reply before it was complete.
    """
    chat = cast(ChatCompletion, completion)
    events = MessageEvents(chat["id"], chat["model"], stop_sequences)
    events.add_chunk(to_chunk(chat))
    if events.finish()[-1]["type"] == "error":
        raise Unavailable(INCOMPLETE)
    return events.message


class MessageEvents:
    """Call `start`, `add_chunk` for every chunk, then `finish` or `fail`; each returns the events to send.

    `message` is what a client has put together from the events so far. The input of a call is sent in one piece when
    the call ends: a model may write what is no JSON object, which clients cannot read, and only the end shows that.
    """

    def __init__(
        self,
        completion_id: str,
        model: str,
        stop_sequences: Sequence[str] | None = None,
        request_id: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.message: MessageBody = {
            "id": PREFIX + completion_id.partition("-")[2],  # feedback accepts both ids
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(None),
        }
        self._stop_sequences, self._request_id, self._clock = stop_sequences or (), request_id, clock
        self._splitter = ThinkingSplitter()
        self._is_started = False
        self._is_open = False  # the last block of the content is
        self._call_index: int | None = None  # of the open block in the chat's tool calls
        self._arguments = ""  # of that call
        self._finish_reason = ""
        self._matched_stop: str | int | None = None
        self._sent_at = 0.0

    def start(self) -> list[Event]:
        """Return nothing: the first event says how many tokens the prompt has, which a chunk with usage tells."""
        return []

    def add_chunk(self, chunk: ChatChunk) -> list[Event]:
        if usage := chunk.get("usage"):
            self.message["usage"] = message_usage(usage)
        elif not self._is_started and not any(map(_has_output, chunk["choices"])):
            return []  # the engine's first chunk has neither text nor usage
        events = [] if self._is_started else self._start()
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for kind, text in self._splitter.add(delta.get("content") or ""):
                events += self._add_text(kind, text)
            for piece in delta.get("tool_calls") or ():
                events += self._add_tool_call(piece)
            if finish_reason := choice.get("finish_reason"):
                self._finish_reason, self._matched_stop = finish_reason, choice.get("matched_stop")
        return self._ping_or(events)

    def finish(self) -> list[Event]:
        events = [] if self._is_started else self._start()
        if self._finish_reason not in STOP_REASONS:
            return [*events, *self.fail(AttuneError(INCOMPLETE))]
        events += self._flush_text()
        if not self.message["content"]:
            events += self._open_block({"type": "text", "text": ""})
        events += self._close_block()
        reason, sequence = self._stop_reason()
        self.message["stop_reason"] = reason
        self.message["stop_sequence"] = sequence
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": dict(self.message["usage"])},
            {"type": "message_stop"},
        ]

    def fail(self, error: AttuneError) -> list[Event]:
        return [error_body(error, self._request_id)]

    def _start(self) -> list[Event]:
        self._is_started = True
        snapshot = {**self.message, "content": [], "usage": dict(self.message["usage"])}
        return [{"type": "message_start", "message": snapshot}, {"type": "ping"}]

    def _ping_or(self, events: list[Event]) -> list[Event]:
        """Return the events, or a ping if there were none for some time: proxies close silent connections."""
        now = self._clock()
        if not events and now - self._sent_at < PING_SECONDS:
            return []
        self._sent_at = now
        return events or [{"type": "ping"}]

    def _stop_reason(self) -> tuple[str, str | None]:
        """Return the stop reason, and the stop sequence if one ended the reply."""
        if self._finish_reason == "stop":
            if self._matched_stop in self._stop_sequences:
                return "stop_sequence", str(self._matched_stop)
            if any(block["type"] == "tool_use" for block in self.message["content"]):
                return "tool_use", None
        return STOP_REASONS[self._finish_reason], None

    def _add_text(self, kind: Kind, text: str) -> list[Event]:
        events: list[Event] = []
        if not (self._is_open and self.message["content"][-1]["type"] == kind):
            # Only what Anthropic signed has a signature; Claude Code drops a block whose signature it cannot check.
            thinking: Block = {"type": "thinking", "thinking": "", "signature": ""}
            block: Block = thinking if kind == "thinking" else {"type": "text", "text": ""}
            events = [*self._close_block(), *self._open_block(block)]
        if not text:
            return events
        self.message["content"][-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _flush_text(self) -> list[Event]:
        return [event for kind, text in self._splitter.finish() for event in self._add_text(kind, text)]

    def _add_tool_call(self, piece: ToolCallPart) -> list[Event]:
        function = piece.get("function") or {}
        events: list[Event] = []
        if self._call_index != piece["index"]:
            events = [*self._flush_text(), *self._close_block()]
            name = function.get("name") or ""
            events += self._open_block({"type": "tool_use", "id": piece.get("id") or "", "name": name, "input": {}})
            self._call_index = piece["index"]
        self._arguments += function.get("arguments") or ""
        return events

    def _open_block(self, block: Block) -> list[Event]:
        self.message["content"].append(block)
        self._is_open = True
        return [{"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _close_block(self) -> list[Event]:
        if not self._is_open:
            return []
        block = self.message["content"][-1]
        events: list[Event] = []
        if block["type"] == "tool_use":
            block["input"], sent = read_input(self._arguments)
            if sent:
                events = [self._delta({"type": "input_json_delta", "partial_json": sent})]
        self._is_open, self._call_index, self._arguments = False, None, ""
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, object]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1


def _has_output(choice: ChunkChoice) -> bool:
    delta = choice["delta"]
    return bool(delta.get("content") or delta.get("tool_calls") or choice.get("finish_reason"))


def read_input(arguments: str) -> tuple[JsonObject, str]:
    """Return a call's input, and the JSON that a stream sends for it; "" for none.

    The arguments of a call that was cut are read as far as they came. What is no JSON object is the empty input, and
    the tool's own check of it tells the model.
    """
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = _read_beginning(arguments)
    if not isinstance(value, dict) or not value:
        return {}, ""
    try:
        return value, orjson.dumps([[[[value]]]])[4:-4].decode()  # orjson reads deeper nesting than it writes
    except orjson.JSONEncodeError:
        return {}, ""


def _read_beginning(arguments: str) -> object:
    try:
        return from_json(arguments, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return None


def message_usage(usage: Usage | None) -> MessageUsage:
    """Return a chat's usage as Anthropic's. Tokens that the engine's prefix cache held count as input."""
    return {
        "input_tokens": usage["prompt_tokens"] if usage else 0,
        "output_tokens": usage["completion_tokens"] if usage else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
