"""Transcript: what grows while a reply streams. Each chunk goes in; what may be relayed comes out."""

from typing import Any

from app.inference.capture import Capture, take
from app.inference.request import ChatCall

ENGINE_ONLY_CHOICE = ("matched_stop", "hidden_states")


class StreamState:
    def __init__(self, call: ChatCall) -> None:
        self.call = call
        self.prompt_ids: list[int] | None = None
        self.output_ids: list[int] | None = None
        self.logprobs: list[float | None] = []
        self.finish_reason: str | None = None
        self._text: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def absorb(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk as OpenAI would send it, or None when it holds nothing for the client."""
        if (extra := chunk.pop("sglext", None)) is not None:
            self.prompt_ids = extra["input_ids"]
            self.output_ids = extra["output_ids"][0]
        if not chunk["choices"]:
            return chunk if self.call.include_usage and chunk.get("usage") else None
        choice = chunk["choices"][0]
        self._record(choice)
        delta = choice["delta"]
        if (pieces := delta.get("tool_calls")) is not None:
            kept = [piece for piece in pieces if piece["index"] < self.call.most_tool_calls]
            delta.pop("tool_calls") if not kept else delta.update(tool_calls=kept)
        if delta.get("reasoning_content") is None:
            delta.pop("reasoning_content", None)
        for name in ENGINE_ONLY_CHOICE:
            choice.pop(name, None)
        if not self.call.logprobs:
            choice["logprobs"] = None
        # The engine sends log-probs of tokens that show no text yet in chunks of their own.
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
        for piece in delta.get("tool_calls") or ():
            self._record_tool_call(piece)
        if choice["finish_reason"] is not None:
            self.finish_reason = choice["finish_reason"]

    def _record_tool_call(self, piece: dict[str, Any]) -> None:
        """A call's name comes first, its arguments in pieces."""
        call = self._tool_calls.setdefault(
            piece["index"], {"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}}
        )
        function = piece["function"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def capture(self, *, broken: str | None = None) -> Capture:
        return take(
            self.call,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            logprobs=self.logprobs,
            text="".join(self._text),
            tool_calls=[self._tool_calls[index] for index in sorted(self._tool_calls)],
            finish_reason=self.finish_reason,
            weight_versions=[],  # SGLang tells them only when it does not stream
            broken=broken,
        )
