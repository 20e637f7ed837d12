"""One formula and the peers that have it too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tests.parity import ours
from tests.parity.draws import Kind, Tensors

VERSIONS = {"verl": "0.9.1", "trl": "1.16.0", "openrlhf": "0.11.2", "areal": "1.0.4"}
TAME: tuple[Kind, ...] = ("plain", "holes", "empty")
FULL: tuple[Kind, ...] = ("plain", "holes")  # for peers that count a sequence without tokens, or divide by its length
ALL: tuple[Kind, ...] = ("plain", "holes", "empty", "wild")


class Refused(Exception):
    """The peer gives no answer for this batch."""


@dataclass(frozen=True)
class Case:
    """`call` names a function of `ours` and of each peer's module; both are given the batch and `settings`.

    `leaf` names what gradients are taken to: none for what has none anywhere. `bound64` and `bound32` are on the
    largest difference over max(1, the peer's largest value), for values and gradients alike; what is not 1e-9 and
    1e-6 says why.
    """

    function: str
    title: str
    call: str
    peers: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    leaf: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = TAME
    bound64: float = 1e-9
    bound32: float = 1e-6
    why: str = ""

    def ours(self, batch: Tensors) -> Tensor:
        answer: Callable[..., Tensor] = getattr(ours, self.call)
        return answer(batch, **self.settings)

    def theirs(self, peer: str, batch: Tensors) -> Tensor:
        answer: Callable[..., Tensor] = getattr(import_module(f"tests.parity.peers.{peer}"), self.call)
        return answer(batch, **self.settings)


def gradients(value: Tensor, batch: Tensors, leaf: tuple[str, ...]) -> list[Tensor]:
    """Of a scalar, or of a fixed mixture of a tensor's elements, so that every one of them is looked at."""
    if not leaf:
        return []
    mixture = torch.cos(torch.arange(value.numel(), dtype=value.dtype)).reshape(value.shape)
    (value * mixture).sum().backward()
    found = [batch[name].grad for name in leaf]
    return [torch.zeros_like(batch[name]) if grad is None else grad for name, grad in zip(leaf, found, strict=True)]
