"""Run cases: both sides on random batches, values and gradients, in both precisions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.parity.case import Case, Refused, gradients
from tests.parity.draws import SHAPES, Tensors, cast, draw

DTYPES = (torch.float64, torch.float32)


@dataclass
class Row:
    """The largest differences of one case, one peer and one precision."""

    case: Case
    peer: str
    dtype: torch.dtype
    value: float = 0.0
    gradient: float | None = None
    batches: int = 0
    refused: int = 0
    magnitude: float = 0.0  # the largest of the peer's values and gradients; with only zeros nothing is compared

    @property
    def bound(self) -> float:
        return self.case.bound64 if self.dtype == torch.float64 else self.case.bound32

    @property
    def is_within_bound(self) -> bool:
        return self.magnitude > 0 and self.value <= self.bound and (self.gradient or 0.0) <= self.bound  # False for NaN

    def compare(self, batch: Tensors) -> None:
        case, our_batch, their_batch = self.case, *(cast(batch, self.dtype, self.case.leaf) for _ in range(2))
        with precision(self.dtype):
            ours, theirs = case.ours(our_batch), case.theirs(self.peer, their_batch)
            pairs = zip(gradients(ours, our_batch, case.leaf), gradients(theirs, their_batch, case.leaf), strict=True)
            self.value = worst(self.value, distance(ours, theirs))
            largest = [float(theirs.abs().max())]
            for our_gradient, their_gradient in pairs:
                self.gradient = worst(self.gradient or 0.0, distance(our_gradient, their_gradient))
                largest.append(float(their_gradient.abs().max()))
            self.magnitude = max(self.magnitude, min(largest))
        self.batches += 1


def rows(cases: list[Case], seed: int, repeats: int) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(seed)
    for case in cases:
        batches = [
            draw(kind, shape, generator)
            for kind in case.kinds
            for shape in (SHAPES if kind == "plain" else SHAPES[:2])
            for _ in range(repeats)
        ]
        for peer in case.peers:
            for dtype in DTYPES:
                row = Row(case, peer, dtype)
                for batch in batches:
                    try:
                        row.compare(batch)
                    except Refused:
                        row.refused += 1
                yield row


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference over max(1, largest value of theirs); inf for other shapes or infinite values."""
    if ours.shape != theirs.shape or not (ours.isfinite().all() and theirs.isfinite().all()):
        return float("inf")
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))


def worst(a: float, b: float) -> float:
    return b if b > a or b != b else a


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype, so scalars that a formula turns into tensors have the batch's precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
