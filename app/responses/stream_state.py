"""Growing: the items of a response while they are being said, and what is told of each."""

from abc import ABC, abstractmethod
from typing import Any

from app.responses.rendering import Rendering, text_part

Event = dict[str, Any]


class OpenItem(ABC):
    """An item of the output while it grows. `place` names it in every event."""

    def __init__(self, rendering: Rendering, index: int) -> None:
        self.rendering, self.index = rendering, index

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.item("in_progress")["id"], "output_index": self.index}

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]: ...

    @abstractmethod
    def opened(self) -> list[Event]: ...

    @abstractmethod
    def closed(self) -> list[Event]: ...


class OpenMessage(OpenItem):
    def __init__(self, rendering: Rendering, index: int) -> None:
        super().__init__(rendering, index)
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self._begun = False

    @property
    def place(self) -> dict[str, Any]:
        return super().place | {"content_index": 0}

    def part(self) -> dict[str, Any]:
        return text_part(self.text, self.logprobs)

    def item(self, status: str) -> dict[str, Any]:
        return self.rendering.message(self.index, status, [self.part()] if self._begun else [])

    def opened(self) -> list[Event]:
        self._begun = True
        return [{"type": "response.content_part.added", **self.place, "part": self.part()}]

    def said(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        self.text += text
        self.logprobs += logprobs
        return {"type": "response.output_text.delta", **self.place, "delta": text, "logprobs": logprobs}

    def closed(self) -> list[Event]:
        whole = {"text": self.text, "logprobs": self.logprobs}
        return [
            {"type": "response.output_text.done", **self.place, **whole},
            {"type": "response.content_part.done", **self.place, "part": self.part()},
        ]


class OpenCall(OpenItem):
    def __init__(self, rendering: Rendering, index: int, number: int, call_id: str, name: str) -> None:
        super().__init__(rendering, index)
        self.number, self.call_id, self.name = number, call_id, name
        self.arguments = ""

    def item(self, status: str) -> dict[str, Any]:
        return self.rendering.function_call(self.index, status, self.call_id, self.name, self.arguments)

    def opened(self) -> list[Event]:
        return []

    def said(self, arguments: str) -> Event:
        self.arguments += arguments
        return {"type": "response.function_call_arguments.delta", **self.place, "delta": arguments}

    def closed(self) -> list[Event]:
        whole = {"name": self.name, "arguments": self.arguments}
        return [{"type": "response.function_call_arguments.done", **self.place, **whole}]
