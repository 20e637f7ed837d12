"""The engines that the promises of `app.inference.engine` are tested on, and what each must compute."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from app.inference.engine import EngineClient
from app.inference.keys import EngineKeys
from tests.support.scripted_engine import logprob

KEYS = EngineKeys("test-key", "-test-admin-key")
SCRIPTED, SGLANG, VLLM = "scripted", "sglang", "vllm"
KINDS = (SCRIPTED, SGLANG, VLLM)


class Reference(Protocol):
    """What the weights of a version compute, by other means than the engine."""

    def adapter(self, name: str, *, seed: int) -> Path:
        """Return the folder of a new random adapter."""
        ...

    def logprobs(
        self,
        adapter: str | None,
        ids: Sequence[int],
        *,
        temperature: float = 1.0,
        logit_bias: Mapping[str, float] | None = None,
    ) -> torch.Tensor:
        """Return the log-prob of each token but the first."""
        ...


class ScriptedReference:
    """The scripted engine's log-probs: a function of the adapter's name, the ids before, and the id."""

    def adapter(self, name: str, *, seed: int) -> Path:
        return Path("/versions") / name

    def logprobs(
        self,
        adapter: str | None,
        ids: Sequence[int],
        *,
        temperature: float = 1.0,
        logit_bias: Mapping[str, float] | None = None,
    ) -> torch.Tensor:
        return torch.tensor([logprob(adapter, ids[:at], ids[at]) for at in range(1, len(ids))])


@dataclass(frozen=True)
class ServedEngine:
    """A running engine. `never_ends` is a logit bias with which a reply ends at its limit only."""

    kind: str
    client: EngineClient
    reference: Reference
    connect: Callable[[EngineKeys], EngineClient]
    context_length: int | None
    never_ends: dict[str, float]
