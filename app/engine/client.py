"""EngineClient: everything there is to ask of one SGLang replica."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.engine.capture import Capture, take
from app.engine.errors import EngineRefused, EngineUnavailable
from app.engine.request import ChatCall, plain_messages
from app.engine.stream import ChatStream
from app.engine.wire import Wire

USAGE_FIELDS = ("prompt_tokens", "completion_tokens", "total_tokens")
PROBE_SECONDS = 2.0
ADAPTER_SECONDS = 60.0
UNLOAD_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply: OpenAI's choice fields and usage for the client, the capture for the record."""

    message: dict[str, Any]
    finish_reason: str
    logprobs: dict[str, Any] | None
    usage: dict[str, int]
    created: int
    capture: Capture


class EngineClient:
    """Lives long, one per replica and event loop. `patience`: the longest silence in a chat, in seconds."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        *,
        patience: float = 120.0,
    ) -> None:
        self.url = url
        self.patience = patience
        self._api_key = api_key
        self._admin_key = admin_key
        self._wire = Wire(url)

    async def aclose(self) -> None:
        await self._wire.aclose()

    # Chat.

    async def complete(self, call: ChatCall) -> Completion:
        """One whole reply.

        To end it early and keep what was said, `abort(call.rid)` from elsewhere: this then returns the part
        that was generated, with the finish reason "abort".
        """
        body = call.body(stream=False)
        answer = await self._chat("POST", "/v1/chat/completions", body)
        choice = answer["choices"][0]
        meta = choice["meta_info"]
        message = choice["message"]
        capture = take(
            call,
            prompt_ids=choice["prompt_token_ids"],
            output_ids=choice["response_token_ids"],
            logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
            text=message["content"] or "",
            tool_calls=[_tool_call(made) for made in message.get("tool_calls") or ()],
            finish_reason=choice["finish_reason"],
            weight_versions=[span["version"] for span in meta.get("weight_versions") or ()],
            broken=_misaligned(choice["response_token_ids"], meta["output_token_logprobs"]),
        )
        return Completion(
            message=capture.message,
            finish_reason=choice["finish_reason"],
            logprobs=choice["logprobs"] if call.logprobs else None,
            usage={name: answer["usage"][name] for name in USAGE_FIELDS},
            created=answer["created"],
            capture=capture,
        )

    def stream(self, call: ChatCall) -> ChatStream:
        """A reply as it comes.

        Example:
            async with engine.stream(call) as reply:
                async for chunk in reply: ...       # OpenAI's chunks, as dicts
            reply.capture
        """
        return ChatStream(self._wire, call, self.abort, key=self._api_key, patience=self.patience)

    async def tokenize(
        self, call: ChatCall, messages: Sequence[Mapping[str, Any]] | None = None, *, open_reply: bool = True
    ) -> list[int]:
        """The prompt ids of the call, or of other messages under its tools. `open_reply` ends them as a prompt ends."""
        body: dict[str, Any] = {
            "model": call.model,
            "messages": plain_messages(call.messages if messages is None else messages),
            **call.tool_fields(),
        }
        if not open_reply:
            body["add_generation_prompt"] = False
        answer = await self._chat("POST", "/v1/tokenize", body, patience=PROBE_SECONDS)
        ids: list[int] = answer["tokens"]
        return ids

    async def abort(self, rid: str) -> None:
        """Ends the reply that has this id; no matter if there is none."""
        await self._admin("POST", "/abort_request", {"rid": rid}, patience=PROBE_SECONDS)

    # Health.

    async def ready(self) -> bool:
        """Cheap: is it up and not paused?"""
        try:
            await self._wire.ask("GET", "/ready", key=None, patience=PROBE_SECONDS)
        except (EngineUnavailable, EngineRefused):
            return False
        return True

    async def generates(self, *, patience: float = 25.0) -> bool:
        """Dear: does a token come out? Takes a second at least, and long behind a long queue."""
        try:
            await self._wire.ask("GET", "/health_generate", key=None, patience=patience)
        except (EngineUnavailable, EngineRefused):
            return False
        return True

    # Adapters. A version never changes, so a name that is held already is the version that was meant.

    async def adapters(self) -> set[str]:
        """The names it holds."""
        answer = await self._chat("GET", "/v1/models", None, patience=PROBE_SECONDS)
        return {model["id"] for model in answer["data"] if model.get("parent") is not None}

    async def load_adapter(self, name: str, path: Path) -> None:
        """The engine reads the folder itself. Verify it first: a wrong shape kills it at first use."""
        body = {"lora_name": name, "lora_path": str(path)}
        try:
            await self._admin("POST", "/load_lora_adapter", body, patience=ADAPTER_SECONDS)
        except EngineRefused:
            if name not in await self.adapters():
                raise

    async def unload_adapter(self, name: str) -> None:
        """Waits for the replies that still use it."""
        try:
            await self._admin("POST", "/unload_lora_adapter", {"lora_name": name}, patience=UNLOAD_SECONDS)
        except EngineRefused:
            if name in await self.adapters():
                raise

    async def warm(self, name: str) -> None:
        """Loading leaves an adapter in host memory; its first token carries it to the device."""
        [_] = await self._generate(name, [[0]], new_tokens=1)

    async def score(self, adapter: str | None, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Teacher-forced, at temperature 1: for each sequence, the log-prob of each token but the first.

        An adapter that computes nonsense gives NaN here, not an error.
        """
        if any(len(sequence) < 2 for sequence in sequences):
            raise ValueError("a sequence to score needs two tokens at least")
        answers = await self._generate(adapter, sequences, new_tokens=0)
        scores = []
        for sequence, answer in zip(sequences, answers, strict=True):
            tokens = answer["meta_info"]["input_token_logprobs"][1:]
            # Only counted: SGLang shows the vocabulary's last id as 0 here, though it scores it rightly.
            assert len(tokens) == len(sequence) - 1, "the engine scored other tokens"
            scores.append([math.nan if logprob is None else logprob for logprob, _, _ in tokens])
        return scores

    async def _generate(
        self, adapter: str | None, sequences: Sequence[Sequence[int]], *, new_tokens: int
    ) -> list[dict[str, Any]]:
        body: dict[str, Any] = {
            "input_ids": [list(sequence) for sequence in sequences],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": new_tokens},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapter is not None:
            body["lora_path"] = [adapter] * len(sequences)
        answers: list[dict[str, Any]] = await self._chat("POST", "/generate", body)
        return answers

    async def _chat(self, method: str, path: str, body: dict[str, Any] | None, *, patience: float | None = None) -> Any:
        return await self._wire.ask(method, path, body, key=self._api_key, patience=patience or self.patience)

    async def _admin(self, method: str, path: str, body: dict[str, Any], *, patience: float) -> Any:
        return await self._wire.ask(method, path, body, key=self._admin_key, patience=patience)


def _tool_call(made: dict[str, Any]) -> dict[str, Any]:
    """SGLang adds an index that OpenAI's whole replies do not have."""
    function = {"name": made["function"]["name"], "arguments": made["function"]["arguments"]}
    return {"id": made["id"], "type": "function", "function": function}


def _misaligned(output_ids: list[int], logprobs: list[tuple[float | None, int, str | None]]) -> str | None:
    if len(output_ids) == len(logprobs) and output_ids != [token_id for _, token_id, _ in logprobs]:
        return "the engine's log-probs belong to other tokens"
    return None
