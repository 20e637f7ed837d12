"""Translate the chunks of a chat completion into the typed events of a streamed response."""

from typing import Any

from app.responses.rendering import INCOMPLETE_REASONS, STATUS, ResponseRenderer, choice_logprobs, response_usage
from app.responses.stream_state import Event, OpenCall, OpenMessage


class ResponseEvents:
    """Call `start`, `add_chunk` for every chunk, then `finish` or `fail`; each returns the numbered events to send."""

    def __init__(self, rendering: ResponseRenderer) -> None:
        self._rendering = rendering
        self._sequence_number = 0
        self._output: list[dict[str, Any]] = []
        self._open_item: OpenMessage | OpenCall | None = None
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._pending_logprobs: list[dict[str, Any]] = []  # of tokens without text yet; they go with the next text

    def start(self) -> list[Event]:
        response = self._rendering.response("in_progress", [])
        types = ("response.created", "response.in_progress")
        return self._number_events([{"type": type, "response": response} for type in types])

    def add_chunk(self, chunk: dict[str, Any]) -> list[Event]:
        self._usage = chunk.get("usage") or self._usage
        events: list[Event] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._pending_logprobs += choice_logprobs(choice)
            if delta.get("content"):
                events += self._add_text(delta["content"])
            for piece in delta.get("tool_calls") or ():
                events += self._add_tool_call(piece)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return self._number_events(events)

    def finish(self) -> list[Event]:
        status = STATUS.get(self._finish_reason or "", "failed")
        if status == "failed":
            return self.fail("The reply ended before it was complete.")
        events = self._ensure_message()[1] if not self._output and self._open_item is None else []
        events += self._close_item("completed" if status == "completed" else "incomplete")
        response = self._rendering.response(
            status,
            self._output,
            usage=response_usage(self._usage),
            incomplete=INCOMPLETE_REASONS.get(self._finish_reason or ""),
        )
        return self._number_events([*events, {"type": f"response.{status}", "response": response}])

    def fail(self, message: str) -> list[Event]:
        """Return the failure event. The response holds the output so far; its last item stays incomplete."""
        output = self._output + ([self._open_item.item("incomplete")] if self._open_item else [])
        response = self._rendering.response("failed", output, usage=response_usage(self._usage), error=message)
        return self._number_events([{"type": "response.failed", "response": response}])

    def _add_text(self, text: str) -> list[Event]:
        message, events = self._ensure_message()
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        return [*events, message.append(text, logprobs)]

    def _ensure_message(self) -> tuple[OpenMessage, list[Event]]:
        if isinstance(self._open_item, OpenMessage):
            return self._open_item, []
        events = self._close_item("completed")
        message = OpenMessage(self._rendering, len(self._output))
        return message, [*events, *self._open_new(message)]

    def _add_tool_call(self, piece: dict[str, Any]) -> list[Event]:
        function, events = piece.get("function") or {}, []
        if not (isinstance(self._open_item, OpenCall) and self._open_item.number == piece["index"]):
            events = self._close_item("completed")
            call = OpenCall(
                self._rendering, len(self._output), piece["index"], piece.get("id") or "", function.get("name") or ""
            )
            events += self._open_new(call)
        else:
            call = self._open_item
        return [*events, call.append(function["arguments"])] if function.get("arguments") else events

    def _open_new(self, item: OpenMessage | OpenCall) -> list[Event]:
        self._open_item = item
        added = {"type": "response.output_item.added", "output_index": item.index, "item": item.item("in_progress")}
        return [added, *item.opening_events()]

    def _close_item(self, status: str) -> list[Event]:
        if (item := self._open_item) is None:
            return []
        self._open_item = None
        if isinstance(item, OpenMessage):
            item.logprobs, self._pending_logprobs = item.logprobs + self._pending_logprobs, []
        self._output.append(item.item(status))
        done = {"type": "response.output_item.done", "output_index": item.index, "item": item.item(status)}
        return [*item.closing_events(), done]

    def _number_events(self, events: list[Event]) -> list[Event]:
        numbered = [event | {"sequence_number": self._sequence_number + index} for index, event in enumerate(events)]
        self._sequence_number += len(events)
        return numbered
