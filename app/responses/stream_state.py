"""The output items of a response while they are generated, and the events of each."""

from abc import ABC, abstractmethod
from typing import Any

from app.responses.rendering import ResponseRenderer, text_part

Event = dict[str, Any]


class OpenItem(ABC):
    """An output item that is still being generated. `position` identifies it in every event."""

    def __init__(self, rendering: ResponseRenderer, index: int) -> None:
        self.rendering, self.index = rendering, index

    @property
    def position(self) -> dict[str, Any]:
        return {"item_id": self.item("in_progress")["id"], "output_index": self.index}

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]: ...

    @abstractmethod
    def opening_events(self) -> list[Event]: ...

    @abstractmethod
    def closing_events(self) -> list[Event]: ...


class OpenMessage(OpenItem):
    def __init__(self, rendering: ResponseRenderer, index: int) -> None:
        super().__init__(rendering, index)
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self._has_part = False

    @property
    def position(self) -> dict[str, Any]:
        return super().position | {"content_index": 0}

    def part(self) -> dict[str, Any]:
        return text_part(self.text, self.logprobs)

    def item(self, status: str) -> dict[str, Any]:
        return self.rendering.message(self.index, status, [self.part()] if self._has_part else [])

    def opening_events(self) -> list[Event]:
        self._has_part = True
        return [{"type": "response.content_part.added", **self.position, "part": self.part()}]

    def append(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        self.text += text
        self.logprobs += logprobs
        return {"type": "response.output_text.delta", **self.position, "delta": text, "logprobs": logprobs}

    def closing_events(self) -> list[Event]:
        content = {"text": self.text, "logprobs": self.logprobs}
        return [
            {"type": "response.output_text.done", **self.position, **content},
            {"type": "response.content_part.done", **self.position, "part": self.part()},
        ]


class OpenCall(OpenItem):
    def __init__(self, rendering: ResponseRenderer, index: int, number: int, call_id: str, name: str) -> None:
        super().__init__(rendering, index)
        self.number, self.call_id, self.name = number, call_id, name
        self.arguments = ""

    def item(self, status: str) -> dict[str, Any]:
        return self.rendering.function_call(self.index, status, self.call_id, self.name, self.arguments)

    def opening_events(self) -> list[Event]:
        return []

    def append(self, arguments: str) -> Event:
        self.arguments += arguments
        return {"type": "response.function_call_arguments.delta", **self.position, "delta": arguments}

    def closing_events(self) -> list[Event]:
        content = {"name": self.name, "arguments": self.arguments}
        return [{"type": "response.function_call_arguments.done", **self.position, **content}]
