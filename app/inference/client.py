"""EngineClient: all requests to one SGLang engine."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from app.inference.capture import Capture, build_capture
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.request import ChatCall, engine_messages
from app.inference.stream import ChatStream
from app.inference.transport import EngineTransport

USAGE_FIELDS = ("prompt_tokens", "completion_tokens", "total_tokens")
PROBE_SECONDS = 2.0
ADAPTER_SECONDS = 60.0
UNLOAD_SECONDS = 30.0
WEIGHTS_SECONDS = 600.0
PAUSE_SECONDS = 30.0
LOAD_FROM_TENSORS, TENSORS_FIELD_LIST, TENSORS_FIELD_TEXT = (
    "/load_lora_adapter_from_tensors",
    "serialized_named_tensors",
    "serialized_tensors",
)
TENSORS_FIELDS: dict[str, str] = {}  # the field that each engine accepts, by its URL
BASE_WEIGHTS = "default"  # SGLang's name of the weights that it was started with


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply: OpenAI's choice fields and usage for the client, and the capture for the turn's record."""

    message: dict[str, Any]
    finish_reason: str
    logprobs: dict[str, Any] | None
    usage: dict[str, int]
    created: int
    capture: Capture


@dataclass(frozen=True, slots=True)
class AdapterPayload:
    """An adapter to send in a request: PEFT's configuration, and its tensors as SGLang unpickles them, in base64."""

    config: Mapping[str, Any]
    tensors_base64: str


class EngineClient:
    """A long-lived client, one for each engine and event loop.

    `read_timeout`: the longest time without data during a chat, in seconds.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        *,
        read_timeout: float = 120.0,
    ) -> None:
        self.url = url
        self.read_timeout = read_timeout
        self._api_key = api_key
        self._admin_key = admin_key
        self._transport = EngineTransport(url)

    async def aclose(self) -> None:
        await self._transport.aclose()

    # Chat.

    async def complete(self, call: ChatCall) -> Completion:
        """Return one whole reply.

        To end it early and keep what was generated, call `abort(call.rid)` from another task: this then returns the
        tokens generated until then, with the finish reason "abort".
        """
        body = call.body(stream=False)
        response = await self._request("POST", "/v1/chat/completions", body)
        choice = response["choices"][0]
        meta = choice["meta_info"]
        message = choice["message"]
        capture = build_capture(
            call,
            prompt_ids=choice["prompt_token_ids"],
            output_ids=choice["response_token_ids"],
            logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
            text=message["content"] or "",
            tool_calls=[_to_openai_tool_call(tool_call) for tool_call in message.get("tool_calls") or ()],
            finish_reason=choice["finish_reason"],
            weight_versions=[
                {name: span[name] for name in ("version", "start", "end")} for span in meta.get("weight_versions") or ()
            ],
            interruption=_find_misalignment(choice["response_token_ids"], meta["output_token_logprobs"]),
        )
        return Completion(
            message=capture.message,
            finish_reason=choice["finish_reason"],
            logprobs=choice["logprobs"] if call.logprobs else None,
            usage={name: response["usage"][name] for name in USAGE_FIELDS},
            created=response["created"],
            capture=capture,
        )

    def stream(self, call: ChatCall) -> ChatStream:
        """Return a reply as a stream.

        Example:
            async with engine.stream(call) as reply:
                async for chunk in reply: ...       # OpenAI's chunks, as dicts
            reply.capture
        """
        return ChatStream(self._transport, call, self.abort, key=self._api_key, read_timeout=self.read_timeout)

    async def tokenize(
        self, call: ChatCall, messages: Sequence[Mapping[str, Any]] | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the prompt ids of the call, or of other messages with the call's tools.

        `add_generation_prompt` appends the start of an assistant message, as in a prompt.
        """
        body: dict[str, Any] = {
            "model": call.model,
            "messages": engine_messages(call.messages if messages is None else messages),
            **call.tool_fields(),
        }
        if not add_generation_prompt:
            body["add_generation_prompt"] = False
        response = await self._request("POST", "/v1/tokenize", body, read_timeout=PROBE_SECONDS)
        ids: list[int] = response["tokens"]
        return ids

    async def abort(self, rid: str) -> None:
        """End the reply with this id, if there is one."""
        await self._admin_request("POST", "/abort_request", {"rid": rid}, read_timeout=PROBE_SECONDS)

    # Health.

    async def is_ready(self) -> bool:
        """Return whether the engine is up and not paused. Cheap."""
        try:
            await self._transport.request("GET", "/ready", key=None, read_timeout=PROBE_SECONDS)
        except (EngineUnavailable, EngineRefused):
            return False
        return True

    async def can_generate(self, *, read_timeout: float = 25.0) -> bool:
        """Return whether the engine generates a token. Takes at least a second, and longer with a long queue."""
        try:
            await self._transport.request("GET", "/health_generate", key=None, read_timeout=read_timeout)
        except (EngineUnavailable, EngineRefused):
            return False
        return True

    # Adapters. A version never changes, so a loaded adapter of the same name is the same version.

    async def list_adapters(self) -> set[str]:
        """Return the names of the loaded adapters."""
        response = await self._request("GET", "/v1/models", None, read_timeout=PROBE_SECONDS)
        return {model["id"] for model in response["data"] if model.get("parent") is not None}

    async def load_adapter(self, name: str, adapter: Path | AdapterPayload) -> None:
        """Load an adapter from a folder that the engine reads, or from the request.

        Verify the adapter first: tensors of a wrong shape crash the engine at their first use.
        """
        try:
            if isinstance(adapter, AdapterPayload):
                await self._load_adapter_payload(name, adapter)
            else:
                body = {"lora_name": name, "lora_path": str(adapter)}
                await self._admin_request("POST", "/load_lora_adapter", body, read_timeout=ADAPTER_SECONDS)
        except EngineRefused:
            if name not in await self.list_adapters():
                raise

    async def _load_adapter_payload(self, name: str, adapter: AdapterPayload) -> None:
        """Send an adapter in the request. `expected_checksums` is left out, as a wrong one crashes SGLang; wrong
        tensors are found by comparing log-probs afterwards."""
        body = {"lora_name": name, "config_dict": adapter.config}
        try:
            # The read timeout starts after the body has been written, and an unreachable host may never accept it all.
            async with asyncio.timeout(ADAPTER_SECONDS):
                field = await self._tensors_field()
                # One copy for each tensor-parallel rank: our engines have one.
                body[field] = adapter.tensors_base64 if field == TENSORS_FIELD_TEXT else [adapter.tensors_base64]
                await self._admin_request("POST", LOAD_FROM_TENSORS, body, read_timeout=ADAPTER_SECONDS)
        except EngineRefused as refusal:
            if any(other != field and other in refusal.message for other in (TENSORS_FIELD_TEXT, TENSORS_FIELD_LIST)):
                TENSORS_FIELDS.pop(self.url, None)  # the engine now runs another release of SGLang
                raise EngineUnavailable(
                    f"The engine at {self.url} expects {name} in another field than '{field}'; try again."
                ) from refusal
            raise
        except TimeoutError as error:
            raise EngineUnavailable(f"The engine at {self.url} did not accept {name} in time.") from error

    async def _tensors_field(self) -> str:
        """Return the field for an adapter's tensors that this engine's release accepts.

        SGLang takes one text, and since 0.5.18 a list of texts. A request without either is refused with the name of
        the missing field; a refusal of a whole adapter would repeat all of its tensors.
        """
        if self.url not in TENSORS_FIELDS:
            try:
                await self._admin_request(
                    "POST", LOAD_FROM_TENSORS, {"lora_name": "", "config_dict": {}}, read_timeout=PROBE_SECONDS
                )
            except EngineRefused as refusal:
                for field in (TENSORS_FIELD_TEXT, TENSORS_FIELD_LIST):
                    if field in refusal.message:
                        TENSORS_FIELDS[self.url] = field
        if self.url not in TENSORS_FIELDS:
            raise EngineUnavailable(
                f"The engine at {self.url} does not accept adapters in a request; see ATTUNE_ADAPTER_DELIVERY."
            )
        return TENSORS_FIELDS[self.url]

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Waits for the replies that still use it."""
        try:
            await self._admin_request("POST", "/unload_lora_adapter", {"lora_name": name}, read_timeout=UNLOAD_SECONDS)
        except EngineRefused:
            if name in await self.list_adapters():
                raise

    async def warm_up_adapter(self, name: str) -> None:
        """Generate one token with an adapter, which copies it from host memory to the device."""
        [_] = await self._generate(name, [[0]], new_tokens=1)

    # Full weights. An engine holds those of one version at a time.

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause generation inside the block. Running and new requests wait and continue afterwards; none is lost.

        Running replies keep their tokens, but their key-value cache is computed again with the new weights.
        """
        try:
            await self._admin_request("POST", "/pause_generation", {"mode": "retract"}, read_timeout=PAUSE_SECONDS)
            yield
        finally:
            with anyio.CancelScope(shield=True):
                # By default SGLang empties the device's cache first, while all requests wait.
                await self._admin_request(
                    "POST", "/continue_generation", {"torch_empty_cache": False}, read_timeout=PAUSE_SECONDS
                )

    async def load_weights(self, path: Path, version: str) -> None:
        """Load full weights from a folder that the engine reads. Call it inside `paused`.

        Outside of `paused` it waits for all running replies. A folder that cannot be loaded leaves the engine without
        usable weights: check it first, and load others after a refusal. `version` is part of this request, because
        SGLang's separate request for it ends all replies.
        """
        body = {
            "model_path": str(path),
            "weight_version": version,
            "abort_all_requests": False,
            # A reply that continued across a swap leaves cache entries of two versions under one key.
            "flush_cache": True,
            "torch_empty_cache": False,
        }
        await self._admin_request("POST", "/update_weights_from_disk", body, read_timeout=WEIGHTS_SECONDS)

    async def score(
        self, adapter: str | None, sequences: Sequence[Sequence[int]], *, extra_key: str | None = None
    ) -> list[list[float]]:
        """Return, for each sequence, the log-prob of every token but the first (teacher-forced, temperature 1).

        Broken weights give NaN, not an error. `extra_key`: see ChatCall.
        """
        if any(len(sequence) < 2 for sequence in sequences):
            raise ValueError("a sequence to score needs at least two tokens")
        results = await self._generate(adapter, sequences, new_tokens=0, extra_key=extra_key)
        scores = []
        for sequence, result in zip(sequences, results, strict=True):
            tokens = result["meta_info"]["input_token_logprobs"][1:]
            # The ids are not compared: SGLang reports the vocabulary's last id as 0, though it scores it correctly.
            assert len(tokens) == len(sequence) - 1, "the engine scored another number of tokens"
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
        results: list[dict[str, Any]] = await self._request("POST", "/generate", body)
        return results

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, *, read_timeout: float | None = None
    ) -> Any:
        return await self._transport.request(
            method, path, body, key=self._api_key, read_timeout=read_timeout or self.read_timeout
        )

    async def _admin_request(self, method: str, path: str, body: dict[str, Any], *, read_timeout: float) -> Any:
        return await self._transport.request(method, path, body, key=self._admin_key, read_timeout=read_timeout)


def _to_openai_tool_call(tool_call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call without the index that SGLang adds to whole replies."""
    function = {"name": tool_call["function"]["name"], "arguments": tool_call["function"]["arguments"]}
    return {"id": tool_call["id"], "type": "function", "function": function}


def _find_misalignment(output_ids: list[int], logprobs: list[tuple[float | None, int, str | None]]) -> str | None:
    if len(output_ids) == len(logprobs) and output_ids != [token_id for _, token_id, _ in logprobs]:
        return "the engine's log-probs belong to other tokens"
    return None
