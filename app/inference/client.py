"""EngineClient: everything there is to ask of one SGLang replica."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from app.inference.capture import Capture, take
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.request import ChatCall, plain_messages
from app.inference.stream import ChatStream
from app.inference.transport import EngineTransport

USAGE_FIELDS = ("prompt_tokens", "completion_tokens", "total_tokens")
PROBE_SECONDS = 2.0
ADAPTER_SECONDS = 60.0
UNLOAD_SECONDS = 30.0
WEIGHTS_SECONDS = 600.0
PAUSE_SECONDS = 30.0
FROM_TENSORS, NEWER, OLDER = "/load_lora_adapter_from_tensors", "serialized_named_tensors", "serialized_tensors"
SHAPES: dict[str, str] = {}  # which of them an engine takes, by its address
BASE_WEIGHTS = "default"  # what SGLang calls the weights that it was started with


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply: OpenAI's choice fields and usage for the client, the capture for the record."""

    message: dict[str, Any]
    finish_reason: str
    logprobs: dict[str, Any] | None
    usage: dict[str, int]
    created: int
    capture: Capture


@dataclass(frozen=True, slots=True)
class Payload:
    """An adapter whole: PEFT's configuration, and its tensors as SGLang unpickles them, in base64."""

    config: Mapping[str, Any]
    coded: str


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
        self._wire = EngineTransport(url)

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
            weight_versions=[
                {name: span[name] for name in ("version", "start", "end")} for span in meta.get("weight_versions") or ()
            ],
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

    async def load_adapter(self, name: str, adapter: Path | Payload) -> None:
        """From a folder, which the engine reads itself, or within the call. Verify it first: a wrong shape kills the
        engine at first use."""
        try:
            if isinstance(adapter, Payload):
                await self._load_payload(name, adapter)
            else:
                body = {"lora_name": name, "lora_path": str(adapter)}
                await self._admin("POST", "/load_lora_adapter", body, patience=ADAPTER_SECONDS)
        except EngineRefused:
            if name not in await self.adapters():
                raise

    async def _load_payload(self, name: str, adapter: Payload) -> None:
        """Without `expected_checksums`: SGLang dies of one that is wrong. The probe finds wrong tensors, too."""
        body = {"lora_name": name, "config_dict": adapter.config}
        try:
            # The patience of the wire begins when the body is written; a host that is lost may never take all of it.
            async with asyncio.timeout(ADAPTER_SECONDS):
                shape = await self._tensors_shape()
                # A copy for each rank of a group: ours have one.
                body[shape] = adapter.coded if shape == OLDER else [adapter.coded]
                await self._admin("POST", FROM_TENSORS, body, patience=ADAPTER_SECONDS)
        except EngineRefused as refusal:
            if any(other != shape and other in refusal.message for other in (OLDER, NEWER)):
                SHAPES.pop(self.url, None)  # another release is there now
                raise EngineUnavailable(f"The engine at {self.url} takes {name} in another shape.") from refusal
            raise
        except TimeoutError as error:
            raise EngineUnavailable(f"The engine at {self.url} did not take {name} in time.") from error

    async def _tensors_shape(self) -> str:
        """SGLang has taken them as one text, and since 0.5.18 as a list of them. Asked without any, it says which it
        misses; whole adapters would come back within the refusal."""
        if self.url not in SHAPES:
            try:
                await self._admin("POST", FROM_TENSORS, {"lora_name": "", "config_dict": {}}, patience=PROBE_SECONDS)
            except EngineRefused as refusal:
                for shape in (OLDER, NEWER):
                    if shape in refusal.message:
                        SHAPES[self.url] = shape
        if self.url not in SHAPES:
            raise EngineUnavailable(
                f"The engine at {self.url} takes no adapters within the call (ATTUNE_ADAPTER_DELIVERY)."
            )
        return SHAPES[self.url]

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

    # Full weights. An engine has one version's at a time.

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Replies under way wait, and so do those that are asked for; none is lost. However it is left, they go on.

        They keep their tokens and forget what the old weights made of them: that is computed anew.
        """
        try:
            await self._admin("POST", "/pause_generation", {"mode": "retract"}, patience=PAUSE_SECONDS)
            yield
        finally:
            with anyio.CancelScope(shield=True):
                # By default it empties the device's cache first, while everybody waits.
                await self._admin("POST", "/continue_generation", {"torch_empty_cache": False}, patience=PAUSE_SECONDS)

    async def load_weights(self, path: Path, version: str) -> None:
        """Only within `paused`: else it waits for every reply that runs. The engine reads the folder itself; one that
        it cannot load costs it the weights that it had, so check it first, and put others there after a refusal.

        `version` goes along in this very call: told in another, it would end all replies.
        """
        body = {
            "model_path": str(path),
            "weight_version": version,
            "abort_all_requests": False,
            # A reply that ran on across an exchange has left states of two versions under the key of one.
            "flush_cache": True,
            "torch_empty_cache": False,
        }
        await self._admin("POST", "/update_weights_from_disk", body, patience=WEIGHTS_SECONDS)

    async def score(
        self, adapter: str | None, sequences: Sequence[Sequence[int]], *, extra_key: str | None = None
    ) -> list[list[float]]:
        """Teacher-forced, at temperature 1: for each sequence, the log-prob of each token but the first.

        A version that computes nonsense gives NaN here, not an error. `extra_key`: as of a ChatCall.
        """
        if any(len(sequence) < 2 for sequence in sequences):
            raise ValueError("a sequence to score needs two tokens at least")
        answers = await self._generate(adapter, sequences, new_tokens=0, extra_key=extra_key)
        scores = []
        for sequence, answer in zip(sequences, answers, strict=True):
            tokens = answer["meta_info"]["input_token_logprobs"][1:]
            # Only counted: SGLang shows the vocabulary's last id as 0 here, though it scores it rightly.
            assert len(tokens) == len(sequence) - 1, "the engine scored other tokens"
            scores.append([math.nan if logprob is None else logprob for logprob, _, _ in tokens])
        return scores

    async def _generate(
        self,
        adapter: str | None,
        sequences: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        extra_key: str | None = None,
    ) -> list[dict[str, Any]]:
        body: dict[str, Any] = {
            "input_ids": [list(sequence) for sequence in sequences],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": new_tokens},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapter is not None:
            body["lora_path"] = [adapter] * len(sequences)
        if extra_key is not None:
            body["extra_key"] = [extra_key] * len(sequences)
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
