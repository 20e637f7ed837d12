"""The state of a streamed reply: collects tokens from the engine's chunks and returns the chunks for the client."""

from typing import Any

from app.inference.capture import Capture, build_capture
from app.inference.request import ChatCall

ENGINE_ONLY_FIELDS = ("matched_stop", "hidden_states")


class StreamState:
    def __init__(self, call: ChatCall) -> None:
        self.call = call
        self.prompt_ids: list[int] | None = None
        self.output_ids: list[int] | None = None
        self.logprobs: list[float | None] = []
        self.finish_reason: str | None = None
        self._text: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def add_chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Return the chunk as OpenAI sends it, or None if it holds nothing for the client."""
        if (extra := chunk.pop("sglext", None)) is not None:
            self.prompt_ids = extra["input_ids"]
            self.output_ids = extra["output_ids"][0]
        if not chunk["choices"]:
            return chunk if self.call.include_usage and chunk.get("usage") else None
        choice = chunk["choices"][0]
        self._record(choice)
        delta = choice["delta"]
        if (tool_calls := delta.get("tool_calls")) is not None:
            allowed = [part for part in tool_calls if part["index"] < self.call.max_tool_calls]
            delta.pop("tool_calls") if not allowed else delta.update(tool_calls=allowed)
        if delta.get("reasoning_content") is None:
            delta.pop("reasoning_content", None)
        for name in ENGINE_ONLY_FIELDS:
            choice.pop(name, None)
        if not self.call.logprobs:
            choice["logprobs"] = None
        # The engine sends the log-probs of tokens without text in separate chunks.
        if not delta and choice["finish_reason"] is None and choice["logprobs"] is None:
            return None
        if self.call.include_usage:
            chunk.setdefault("usage", None)
        return chunk

    def _record(self, choice: dict[str, Any]) -> None:
        if choice.get("logprobs") is not None:
            self.logprobs += [token["logprob"] for token in choice["logprobs"]["content"]]
        delta = choice["delta"]
        if delta.get("content"):
            self._text.append(delta["content"])
        for part in delta.get("tool_calls") or ():
            self._record_tool_call(part)
        if choice["finish_reason"] is not None:
            self.finish_reason = choice["finish_reason"]

    def _record_tool_call(self, part: dict[str, Any]) -> None:
        """Add a part of a tool call: its name comes first, then its arguments in several parts."""
        call = self._tool_calls.setdefault(
            part["index"], {"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}}
        )
        function = part["function"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def capture(self, *, interruption: str | None = None) -> Capture:
        return build_capture(
            self.call,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            logprobs=self.logprobs,
            text="".join(self._text),
            tool_calls=[self._tool_calls[index] for index in sorted(self._tool_calls)],
            finish_reason=self.finish_reason,
            weight_versions=[],  # SGLang reports them only for replies that are not streamed
            interruption=interruption,
        )
