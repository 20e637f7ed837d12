"""What a serving engine must do for Attune: the protocol that each kind of engine implements, with its promises.

`tests/contract/engine/` holds every engine to these promises. What an engine may refuse instead is said here, and
`docs/engines.md` says which does.

Errors are the same for all engines (see `app.inference.transport`):

- EngineUnavailable: the engine cannot be reached, is stopping, or failed. Nothing is known about the request; another
  replica may answer it, or the same one later. EngineTimeout is one, for an answer that did not come in time.
- AdapterMissing, an EngineUnavailable: the engine runs, but does not hold the version that the request names.
- EngineRefused: the engine read the request and rejects it; a retry will not help. It keeps the engine's status.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.inference.capture import Capture
from app.inference.chat_format import Logprobs, Usage
from app.inference.request import ChatCall
from app.inference.stream import ChatStream

BASE_WEIGHTS = "default"  # the name of the weights that an engine was started with, whatever its kind


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole reply, and OpenAI's log-probs and usage for the client.

    `matched_stop`: the stop text that ended it, the id of the token that did, or None.
    """

    capture: Capture
    logprobs: Logprobs | None
    usage: Usage
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class AdapterPayload:
    """An adapter to send in a request: PEFT's configuration, and its tensors as SGLang unpickles them, in base64."""

    config: Mapping[str, object]
    tensors_base64: str


class EngineAddress(Protocol):
    """What it takes to reach an engine. A row of `engines` is one."""

    @property
    def url(self) -> str: ...

    @property
    def kind(self) -> str: ...


class EngineClient(Protocol):
    """A long-lived client of one engine. It belongs to one event loop, and is closed at the end."""

    url: str

    async def aclose(self) -> None: ...

    # Replies.

    async def complete(self, call: ChatCall) -> Completion:
        """Return one whole reply.

        Exact: the capture has the prompt ids that the engine computed (`call.prompt_ids` if they were given), the ids
        that it sampled, the end-of-turn token included, and one log-prob for each, that of the distribution it was
        sampled from: temperature and logit bias are applied. (Under top-p, top-k or a grammar engines differ; such
        turns are not trained on.) A reply that is not exact has an exclusion reason.

        The version that the call names generates all of it, or the base model. A swap of full weights during the reply
        excludes it; `weight_versions` has the spans.

        To end it early and keep what was generated, call `abort(call.rid)` from another task: this then returns the
        tokens generated until then, with the finish reason "abort".
        """
        ...

    def stream(self, call: ChatCall) -> ChatStream:
        """Return a reply as a stream. Its capture is as exact as that of `complete`.

        Entering waits for the engine's answer and raises its refusal. Leaving early, by a break or because the client
        has gone, ends the work in the engine.

        Example:
            async with engine.stream(call) as reply:
                async for chunk in reply: ...       # OpenAI's chunks, as dicts
            reply.capture
        """
        ...

    async def abort(self, rid: str) -> None:
        """End the reply with this id, if there is one. An abort that arrives before the request is ignored."""
        ...

    # Prompts.

    async def tokenize(
        self,
        call: ChatCall,
        messages: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the prompt ids of the call, or of other messages with the call's tools: those of `complete`.

        `add_generation_prompt` appends the start of an assistant message, as in a prompt.
        """
        ...

    async def context_length(self) -> int | None:
        """Return the most tokens that a prompt and its reply may have together; None if the engine does not say."""
        ...

    async def score(
        self, adapter: str | None, sequences: Sequence[Sequence[int]], *, extra_key: str | None = None
    ) -> list[list[float]]:
        """Return, for each sequence, the log-prob of every token but the first (teacher-forced, temperature 1).

        Exact: these are the log-probs of this version's weights, computed from the ids as given. Broken weights give
        NaN, not an error. `extra_key`: see `EngineTarget.prefix_key`.

        Raises:
            ValueError: a sequence has fewer than two tokens.
        """
        ...

    # Health and metrics.

    async def is_ready(self) -> bool:
        """Return whether the engine is up and not paused. Cheap; never raises."""
        ...

    async def can_generate(self, *, read_timeout: float = 25.0) -> bool:
        """Return whether the engine generates a token. Never raises. Takes longer with a long queue."""
        ...

    async def count_running(self) -> int:
        """Return the number of requests that the engine generates or will generate."""
        ...

    # Versions as adapters. A version never changes, so a loaded adapter of the same name is the same version.

    async def list_adapters(self) -> set[str]:
        """Return the names of the loaded adapters."""
        ...

    async def load_adapter(self, name: str, adapter: Path | AdapterPayload) -> None:
        """Load an adapter from a folder that the engine reads, or from the request. Idempotent.

        Running replies are not affected. Verify the files first: an engine may end at the first use of tensors of a
        wrong shape.

        Raises:
            EngineRefused: the folder is missing, or the engine cannot use what is in it.
            EngineUnavailable: also if the engine does not take adapters in a request.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Idempotent. Replies that still use it end as they would have."""
        ...

    async def warm_up_adapter(self, name: str) -> None:
        """Generate one token with an adapter, so that the first user does not wait for its copy to the device."""
        ...

    # Versions as full weights. An engine holds those of one version at a time.

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Pause generation inside the block. Running and new requests wait and continue afterwards; none is lost.

        Running replies keep their tokens, but their key-value cache is computed again with the new weights.
        """
        ...

    async def load_weights(self, path: Path, version: str) -> None:
        """Load full weights from a folder that the engine reads. Call it inside `paused`.

        No cache entry of older weights is used afterwards. A folder that cannot be loaded may leave the engine without
        usable weights: check it first, and load others after a refusal.

        Raises:
            EngineRefused: the weights cannot be loaded.
        """
        ...
