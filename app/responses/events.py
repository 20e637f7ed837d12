"""Telling: the chunks of a chat completion as the typed events of a streamed response."""

from typing import Any

from app.responses.rendering import INCOMPLETE, STATUS, Rendering, shown, usage
from app.responses.stream_state import Event, OpenCall, OpenMessage


class Telling:
    """Begin it, give it every chunk, end it; each step returns the events to send, numbered in order."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: OpenMessage | OpenCall | None = None
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._textless: list[dict[str, Any]] = []  # log-probs of tokens that show no text yet: the next text's

    def begin(self) -> list[Event]:
        response = self._rendering.response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": response} for kind in kinds])

    def hear(self, chunk: dict[str, Any]) -> list[Event]:
        self._usage = chunk.get("usage") or self._usage
        events: list[Event] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._textless += shown(choice)
            if delta.get("content"):
                events += self._text(delta["content"])
            for piece in delta.get("tool_calls") or ():
                events += self._call(piece)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return self._numbered(events)

    def end(self) -> list[Event]:
        status = STATUS.get(self._finish_reason or "", "failed")
        if status == "failed":
            return self.fail("The reply was broken off.")
        events = self._message()[1] if not self._output and self._open is None else []
        events += self._close("completed" if status == "completed" else "incomplete")
        response = self._rendering.response(
            status, self._output, usage=usage(self._usage), incomplete=INCOMPLETE.get(self._finish_reason or "")
        )
        return self._numbered([*events, {"type": f"response.{status}", "response": response}])

    def fail(self, message: str) -> list[Event]:
        """What was said until then is in the response; its last item is not closed, for it has no end."""
        output = self._output + ([self._open.item("incomplete")] if self._open else [])
        response = self._rendering.response("failed", output, usage=usage(self._usage), error=message)
        return self._numbered([{"type": "response.failed", "response": response}])

    def _text(self, text: str) -> list[Event]:
        message, events = self._message()
        logprobs, self._textless = self._textless, []
        return [*events, message.said(text, logprobs)]

    def _message(self) -> tuple[OpenMessage, list[Event]]:
        if isinstance(self._open, OpenMessage):
            return self._open, []
        events = self._close("completed")
        message = OpenMessage(self._rendering, len(self._output))
        return message, [*events, *self._added(message)]

    def _call(self, piece: dict[str, Any]) -> list[Event]:
        function, events = piece.get("function") or {}, []
        if not (isinstance(self._open, OpenCall) and self._open.number == piece["index"]):
            events = self._close("completed")
            call = OpenCall(
                self._rendering, len(self._output), piece["index"], piece.get("id") or "", function.get("name") or ""
            )
            events += self._added(call)
        else:
            call = self._open
        return [*events, call.said(function["arguments"])] if function.get("arguments") else events

    def _added(self, item: OpenMessage | OpenCall) -> list[Event]:
        self._open = item
        added = {"type": "response.output_item.added", "output_index": item.index, "item": item.item("in_progress")}
        return [added, *item.opened()]

    def _close(self, status: str) -> list[Event]:
        if (item := self._open) is None:
            return []
        self._open = None
        if isinstance(item, OpenMessage):
            item.logprobs, self._textless = item.logprobs + self._textless, []
        self._output.append(item.item(status))
        done = {"type": "response.output_item.done", "output_index": item.index, "item": item.item(status)}
        return [*item.closed(), done]

    def _numbered(self, events: list[Event]) -> list[Event]:
        numbered = [event | {"sequence_number": self._number + at} for at, event in enumerate(events)]
        self._number += len(events)
        return numbered
