"""VLLMClient, which makes all requests to one vLLM engine."""

import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from app.inference.chat_format import plain_usage
from app.inference.engine import AdapterPayload, Completion
from app.inference.request import ChatCall, engine_messages
from app.inference.stream import ChatStream
from app.inference.transport import AdapterMissing, EngineRefused, EngineTransport, EngineUnavailable
from app.inference.vllm.chat import (
    BASE_MODEL,
    VLLMCompletion,
    VLLMStreamState,
    cache_salt,
    capture_response,
    chat_body,
    request_id,
)
from app.inference.vllm.errors import NotANumber, to_engine_error

PROBE_SECONDS = 2.0
CONTEXT_LENGTH_SECONDS = 60.0  # an engine that was started again at the same address may have another one
ADAPTER_SECONDS = 60.0
UNLOAD_SECONDS = 30.0
PAUSE_SECONDS = 30.0


class VLLMClient:
    """EngineClient for vLLM: its promises are those of the protocol, and not repeated here.

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
        response: VLLMCompletion = await self._request("/v1/chat/completions", chat_body(call, stream=False))
        choice = response["choices"][0]
        return Completion(
            capture_response(call, response),
            logprobs=choice.get("logprobs") if call.logprobs else None,
            usage=plain_usage(response["usage"]),
            matched_stop=choice.get("stop_reason"),
        )

    def stream(self, call: ChatCall) -> ChatStream:
        return ChatStream(self._transport, VLLMStreamState(call), chat_body, self.abort)

    async def tokenize(
        self,
        call: ChatCall,
        messages: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        body: dict[str, object] = {
            "model": BASE_MODEL,
            "messages": engine_messages(call.messages if messages is None else messages),
            "add_generation_prompt": add_generation_prompt,
        }
        if call.tools:
            body["tools"] = call.tool_fields()["tools"]
        response = await self._request("/tokenize", body, read_timeout=PROBE_SECONDS)
        ids: list[int] = response["tokens"]
        return ids

    async def context_length(self) -> int | None:
        if self._context_length is None or time.monotonic() - self._context_length[0] > CONTEXT_LENGTH_SECONDS:
            response = await self._request("/v1/models", read_timeout=PROBE_SECONDS)
            lengths = [model.get("max_model_len") for model in response["data"] if model.get("parent") is None]
            self._context_length = time.monotonic(), lengths[0] if lengths else None
        return self._context_length[1]

    async def abort(self, rid: str) -> None:
        await self._administer("/inference/v1/abort_requests", {"request_ids": [request_id(rid)]}, PROBE_SECONDS)

    # Health.

    async def is_ready(self) -> bool:
        try:  # the scheduler's process answers
            response = await self._request("/is_paused", admin=True, read_timeout=PROBE_SECONDS)
        except (EngineUnavailable, EngineRefused):
            return False
        return response["is_paused"] is False

    async def can_generate(self, *, read_timeout: float = 25.0) -> bool:
        try:
            await self._generate_token(BASE_MODEL, read_timeout)
        except (EngineUnavailable, EngineRefused):
            return False
        return True

    async def count_running(self) -> int:
        response = await self._request("/attune/running", admin=True, read_timeout=PROBE_SECONDS)
        count: int = response["running"]
        return count

    async def _generate_token(self, model: str, read_timeout: float | None = None) -> None:
        body = {"model": model, "prompt": [0], "max_tokens": 1}
        await self._request("/v1/completions", body, read_timeout=read_timeout)

    # Adapters.

    async def list_adapters(self) -> set[str]:
        response = await self._request("/v1/models", read_timeout=PROBE_SECONDS)
        return {model["id"] for model in response["data"] if model.get("parent") is not None}

    async def load_adapter(self, name: str, adapter: Path | AdapterPayload) -> None:
        """Always a new name or a new folder: vLLM's prefix cache takes an adapter of the same two for the same one."""
        if isinstance(adapter, AdapterPayload):
            raise EngineUnavailable(
                f"The engine at {self.url} (vLLM) does not accept adapters in a request; set "
                "ATTUNE_ENGINE__ADAPTER_DELIVERY=path."
            )
        try:
            body = {"lora_name": name, "lora_path": str(adapter)}
            await self._administer("/v1/load_lora_adapter", body, ADAPTER_SECONDS)
        except EngineRefused:
            if name not in await self.list_adapters():
                raise

    async def unload_adapter(self, name: str) -> None:
        """Returns at once. The replies that still use it go on."""
        try:
            await self._administer("/v1/unload_lora_adapter", {"lora_name": name}, UNLOAD_SECONDS)
        except (EngineRefused, AdapterMissing):
            if name in await self.list_adapters():
                raise

    async def warm_up_adapter(self, name: str) -> None:
        await self._generate_token(name)

    # Full weights.

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        try:
            await self._administer("/pause?mode=keep", {}, PAUSE_SECONDS)
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._administer("/resume", {}, PAUSE_SECONDS)

    async def load_weights(self, path: Path, version: str) -> None:
        """Refused: the settings refuse full weights on vLLM before anything starts."""
        raise EngineRefused(400, f"The engine at {self.url} (vLLM) does not swap full weights.")

    # Scores.

    async def score(
        self, adapter: str | None, sequences: Sequence[Sequence[int]], *, extra_key: str | None = None
    ) -> list[list[float]]:
        if any(len(sequence) < 2 for sequence in sequences):
            raise ValueError("a sequence to score needs at least two tokens")
        body: dict[str, object] = {
            "model": adapter or BASE_MODEL,
            "prompt": [list(sequence) for sequence in sequences],
            "max_tokens": 1,  # not used, but vLLM takes no 0
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        if extra_key is not None:
            body["cache_salt"] = cache_salt(extra_key)
        try:
            response = await self._request("/v1/completions", body)
        except NotANumber:
            await self._clear_cache()
            return [[math.nan] * (len(sequence) - 1) for sequence in sequences]
        choices = sorted(response["choices"], key=lambda choice: int(choice["index"]))
        return [
            [
                tokens[str(token)]["logprob"]
                for tokens, token in zip(scored["prompt_logprobs"][1:], ids[1:], strict=True)
            ]
            for scored, ids in zip(choices, sequences, strict=True)
        ]

    async def _clear_cache(self) -> None:
        """Remove what broken weights left in the key-value cache: without this, NaN reaches replies of other versions.

        Running replies wait for it, and their cache is computed again.
        """
        async with self.paused():
            await self._administer("/collective_rpc", {"method": "attune_clear_cache"}, PAUSE_SECONDS)
            await self._administer("/reset_prefix_cache?reset_running_requests=true", {}, PAUSE_SECONDS)
