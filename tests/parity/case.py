"""A formula and the peers that implement it."""

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
FULL: tuple[Kind, ...] = ("plain", "holes")  # for peers that count empty sequences, or divide by their length
ALL: tuple[Kind, ...] = ("plain", "holes", "empty", "wild")


class Refused(Exception):
    """The peer does not support this batch."""


@dataclass(frozen=True)
class Case:
    """`call` is the name of a function of `ours` and of each peer's module; both get the batch and `settings`.

    `leaf` names the tensors whose gradients are compared; it is empty for formulas without gradients. `bound64` and
    `bound32` limit the largest difference over max(1, the peer's largest value), for values and gradients. `why` gives
    the reason for a bound other than 1e-9 and 1e-6.
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
        formula: Callable[..., Tensor] = getattr(ours, self.call)
        return formula(batch, **self.settings)

    def theirs(self, peer: str, batch: Tensors) -> Tensor:
        formula: Callable[..., Tensor] = getattr(import_module(f"tests.parity.peers.{peer}"), self.call)
        return formula(batch, **self.settings)


def gradients(value: Tensor, batch: Tensors, leaf: tuple[str, ...]) -> list[Tensor]:
    """Return the gradients of a scalar, or of a fixed weighted sum of a tensor's elements, so all of them count."""
    if not leaf:
        return []
    mixture = torch.cos(torch.arange(value.numel(), dtype=value.dtype)).reshape(value.shape)
    (value * mixture).sum().backward()
    grads = [batch[name].grad for name in leaf]
    return [torch.zeros_like(batch[name]) if grad is None else grad for name, grad in zip(leaf, grads, strict=True)]
