"""SGLangClient, which makes all requests to one SGLang engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from app.inference.capture import to_logprob
from app.inference.chat_format import plain_usage
from app.inference.engine import AdapterPayload, Completion
from app.inference.request import ChatCall, engine_messages
from app.inference.sglang.chat import (
    GeneratedReply,
    SGLangCompletion,
    SGLangStreamState,
    capture_choice,
    chat_body,
)
from app.inference.sglang.errors import to_engine_error
from app.inference.stream import ChatStream
from app.inference.transport import EngineRefused, EngineTransport, EngineUnavailable

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


class SGLangClient:
    """EngineClient for SGLang: its promises are those of the protocol, and not repeated here.

    `read_timeout`: the longest time without data during a chat, in seconds.
    """

    def __init__(
        self, url: str, api_key: str | None = None, admin_key: str | None = None, read_timeout: float = 120.0
    ) -> None:
        self.url = url
        self._transport = EngineTransport(url, api_key, admin_key, read_timeout, to_engine_error)
        self._request = self._transport.request
        self._context_length: tuple[float, int | None] | None = None  # when it was read, and its value

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _administer(self, path: str, body: Mapping[str, object], seconds: float) -> None:
        """Send a request with the admin key. Raises EngineUnavailable after `seconds` without an answer."""
        await self._request(path, body, admin=True, read_timeout=seconds)

    # Chat.

    async def complete(self, call: ChatCall) -> Completion:
        response: SGLangCompletion = await self._request("/v1/chat/completions", chat_body(call, stream=False))
        choice, usage = response["choices"][0], response["usage"]
        return Completion(
            capture_choice(call, choice),
            logprobs=choice.get("logprobs") if call.logprobs else None,
            usage=plain_usage(usage),
            matched_stop=choice.get("matched_stop"),
        )

    def stream(self, call: ChatCall) -> ChatStream:
        return ChatStream(self._transport, SGLangStreamState(call), chat_body, self.abort)

    async def tokenize(
        self,
        call: ChatCall,
        messages: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        body: dict[str, object] = {
            "model": call.target.label,
            "messages": engine_messages(call.messages if messages is None else messages),
            **call.tool_fields(),
        }
        if not add_generation_prompt:
            body["add_generation_prompt"] = False
        response = await self._request("/v1/tokenize", body, read_timeout=PROBE_SECONDS)
        ids: list[int] = response["tokens"]
        return ids

    async def context_length(self) -> int | None:
        if self._context_length is None or time.monotonic() - self._context_length[0] > CONTEXT_LENGTH_SECONDS:
            response = await self._request("/v1/models", read_timeout=PROBE_SECONDS)
            lengths = [model.get("max_model_len") for model in response["data"] if model.get("parent") is None]
            self._context_length = time.monotonic(), lengths[0] if lengths else None
        return self._context_length[1]

    async def abort(self, rid: str) -> None:
        await self._administer("/abort_request", {"rid": rid}, PROBE_SECONDS)

    # Health.

    async def is_ready(self) -> bool:
        return await self._responds("/ready", PROBE_SECONDS)

    async def can_generate(self, *, read_timeout: float = 25.0) -> bool:
        return await self._responds("/health_generate", read_timeout)  # takes at least a second

    async def count_running(self) -> int:
        response = await self._request("/v1/loads?include=core", read_timeout=PROBE_SECONDS)
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in response["loads"])

    async def _responds(self, path: str, read_timeout: float) -> bool:
        try:
            await self._request(path, read_timeout=read_timeout)
        except (EngineUnavailable, EngineRefused):
            return False
        return True

    # Adapters.

    async def list_adapters(self) -> set[str]:
        response = await self._request("/v1/models", read_timeout=PROBE_SECONDS)
        return {model["id"] for model in response["data"] if model.get("parent") is not None}

    async def load_adapter(self, name: str, adapter: Path | AdapterPayload) -> None:
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
        body: dict[str, object] = {"lora_name": name, "config_dict": adapter.config}
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
        """Waits for the replies that still use it."""
        try:
            await self._administer("/unload_lora_adapter", {"lora_name": name}, UNLOAD_SECONDS)
        except EngineRefused:
            if name in await self.list_adapters():
                raise

    async def warm_up_adapter(self, name: str) -> None:
        [_] = await self._generate(name, [[0]], new_tokens=1)

    # Full weights.

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        try:
            await self._administer("/pause_generation", {"mode": "retract"}, PAUSE_SECONDS)
            yield
        finally:
            with anyio.CancelScope(shield=True):
                # By default SGLang empties the device's cache first, while all requests wait.
                await self._administer("/continue_generation", {"torch_empty_cache": False}, PAUSE_SECONDS)

    async def load_weights(self, path: Path, version: str) -> None:
        """Outside of `paused` it waits for all running replies. A folder that cannot be loaded leaves the engine
        without usable weights. `version` is part of this request, because SGLang's separate request for it ends all
        replies."""
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
    ) -> list[GeneratedReply]:
        body: dict[str, object] = {
            "input_ids": [list(sequence) for sequence in sequences],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": new_tokens},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapter is not None:
            body["lora_path"] = [adapter] * len(sequences)
        if extra_key is not None:
            body["extra_key"] = [extra_key] * len(sequences)
        results: list[GeneratedReply] = await self._request("/generate", body)
        return results
