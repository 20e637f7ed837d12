"""EngineClient, which makes all requests to one SGLang engine, and the pool with one open client for each engine."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from app.core.private_files import create_once
from app.core.settings import Settings
from app.inference.capture import Capture, capture_choice, to_logprob
from app.inference.request import ChatCall, engine_messages
from app.inference.stream import ChatStream
from app.inference.transport import EngineRefused, EngineTransport, EngineUnavailable

USAGE_FIELDS = ("prompt_tokens", "completion_tokens", "total_tokens")
PROBE_SECONDS = 2.0
CONTEXT_LENGTH_SECONDS = 60.0  # an engine that was started again at the same address may have another one
ADAPTER_SECONDS = 60.0
UNLOAD_SECONDS = 30.0
WEIGHTS_SECONDS = 600.0
PAUSE_SECONDS = 30.0
LOAD_FROM_TENSORS = "/load_lora_adapter_from_tensors"
TENSORS_FIELD_LIST = "serialized_named_tensors"
TENSORS_FIELD_TEXT = "serialized_tensors"
TENSORS_FIELDS: dict[str, str] = {}  # the field that each engine accepts, by its URL
BASE_WEIGHTS = "default"  # SGLang's name of the weights that it was started with


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole reply, and OpenAI's log-probs and usage for the client.

    `matched_stop`: the stop text that ended it, the id of the token that did, or None.
    """

    capture: Capture
    logprobs: dict[str, Any] | None
    usage: dict[str, int]
    matched_stop: str | int | None = None


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
        self, url: str, api_key: str | None = None, admin_key: str | None = None, *, read_timeout: float = 120.0
    ) -> None:
        self.url = url
        self._transport = EngineTransport(url, api_key, admin_key, read_timeout)
        self._request = self._transport.request
        self._context_length: tuple[float, int | None] | None = None  # when it was read, and its value

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _administer(self, path: str, body: dict[str, Any], seconds: float) -> None:
        """Send a request with the admin key. Raises EngineUnavailable after `seconds` without an answer."""
        await self._request(path, body, admin=True, read_timeout=seconds)

    # Chat.

    async def complete(self, call: ChatCall) -> Completion:
        """Return one whole reply.

        To end it early and keep what was generated, call `abort(call.rid)` from another task: this then returns the
        tokens generated until then, with the finish reason "abort".
        """
        response = await self._request("/v1/chat/completions", call.body(stream=False))
        choice = response["choices"][0]
        return Completion(
            capture_choice(call, choice),
            logprobs=choice["logprobs"] if call.logprobs else None,
            usage={name: response["usage"][name] for name in USAGE_FIELDS},
            matched_stop=choice.get("matched_stop"),
        )

    def stream(self, call: ChatCall) -> ChatStream:
        """Return a reply as a stream.

        Example:
            async with engine.stream(call) as reply:
                async for chunk in reply: ...       # OpenAI's chunks, as dicts
            reply.capture
        """
        return ChatStream(self._transport, call, self.abort)

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
        response = await self._request("/v1/tokenize", body, read_timeout=PROBE_SECONDS)
        ids: list[int] = response["tokens"]
        return ids

    async def context_length(self) -> int | None:
        """Return the most tokens that a prompt and its reply may have together; None if the engine does not say."""
        if self._context_length is None or time.monotonic() - self._context_length[0] > CONTEXT_LENGTH_SECONDS:
            response = await self._request("/v1/models", read_timeout=PROBE_SECONDS)
            lengths = [model.get("max_model_len") for model in response["data"] if model.get("parent") is None]
            self._context_length = time.monotonic(), lengths[0] if lengths else None
        return self._context_length[1]

    async def abort(self, rid: str) -> None:
        """End the reply with this id, if there is one."""
        await self._administer("/abort_request", {"rid": rid}, PROBE_SECONDS)

    # Health.

    async def is_ready(self) -> bool:
        """Return whether the engine is up and not paused. Cheap."""
        return await self._responds("/ready", PROBE_SECONDS)

    async def can_generate(self, *, read_timeout: float = 25.0) -> bool:
        """Return whether the engine generates a token. Takes at least a second, and longer with a long queue."""
        return await self._responds("/health_generate", read_timeout)

    async def count_running(self) -> int:
        """Return the number of requests that the engine generates or will generate. Raises EngineUnavailable."""
        response = await self._request("/v1/loads?include=core", read_timeout=PROBE_SECONDS)
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in response["loads"])

    async def _responds(self, path: str, read_timeout: float) -> bool:
        try:
            await self._request(path, read_timeout=read_timeout)
        except (EngineUnavailable, EngineRefused):
            return False
        return True

    # Adapters. A version never changes, so a loaded adapter of the same name is the same version.

    async def list_adapters(self) -> set[str]:
        """Return the names of the loaded adapters."""
        response = await self._request("/v1/models", read_timeout=PROBE_SECONDS)
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
                await self._administer("/load_lora_adapter", body, ADAPTER_SECONDS)
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
                await self._administer(LOAD_FROM_TENSORS, body, ADAPTER_SECONDS)
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
                await self._administer(LOAD_FROM_TENSORS, {"lora_name": "", "config_dict": {}}, PROBE_SECONDS)
            except EngineRefused as refusal:
                for field in (TENSORS_FIELD_TEXT, TENSORS_FIELD_LIST):
                    if field in refusal.message:
                        TENSORS_FIELDS[self.url] = field
        if self.url not in TENSORS_FIELDS:
            raise EngineUnavailable(
                f"The engine at {self.url} does not accept adapters in a request; see ATTUNE_ENGINE__ADAPTER_DELIVERY."
            )
        return TENSORS_FIELDS[self.url]

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Waits for the replies that still use it."""
        try:
            await self._administer("/unload_lora_adapter", {"lora_name": name}, UNLOAD_SECONDS)
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
            await self._administer("/pause_generation", {"mode": "retract"}, PAUSE_SECONDS)
            yield
        finally:
            with anyio.CancelScope(shield=True):
                # By default SGLang empties the device's cache first, while all requests wait.
                await self._administer("/continue_generation", {"torch_empty_cache": False}, PAUSE_SECONDS)

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
        await self._administer("/update_weights_from_disk", body, WEIGHTS_SECONDS)

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
            scores.append([to_logprob(logprob) for logprob, _, _ in tokens])
        return scores

    async def _generate(
        self, adapter: str | None, sequences: Sequence[Sequence[int]], *, new_tokens: int, extra_key: str | None = None
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
        results: list[dict[str, Any]] = await self._request("/generate", body)
        return results


@dataclass(frozen=True)
class EngineKeys:
    """The two API keys of all engines of a deployment."""

    api: str
    admin: str


def load_engine_keys(settings: Settings) -> EngineKeys:
    """Return the keys from the settings, or from a file under `home` that is created at first use.

    Machines that share engines set the keys explicitly.
    """
    if settings.engine.api_key and settings.engine.admin_key:
        return EngineKeys(settings.engine.api_key, settings.engine.admin_key)
    path = settings.home.resolve() / "engine-keys.json"
    create_once(path, lambda: json.dumps({name: secrets.token_urlsafe(32) for name in ("api", "admin")}))
    return EngineKeys(**json.loads(path.read_text()))


class EnginePool(AbstractAsyncContextManager["EnginePool"]):
    """One open client for each engine URL. As a context manager it closes them at the end of the block."""

    def __init__(self, keys: EngineKeys, *, read_timeout: float = 120.0) -> None:
        """`read_timeout`: the longest time without data while a reply is generated, in seconds."""
        self._keys, self._read_timeout = keys, read_timeout
        self._clients: dict[str, EngineClient] = {}

    def get(self, url: str) -> EngineClient:
        if url not in self._clients:
            self._clients[url] = EngineClient(url, self._keys.api, self._keys.admin, read_timeout=self._read_timeout)
        return self._clients[url]

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()
