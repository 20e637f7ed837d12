"""What every formula asks of its arguments before it computes."""

from typing import Any, get_args

from torch import Tensor


def same_shape(**tensors: Tensor) -> None:
    """All of one shape, or ValueError with every name and shape: broadcasting hides mistakes that sums then bury."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes do not match: {shapes}")


def known(what: str, name: str, kinds: Any) -> None:
    """`name` is one of the Literal type `kinds`, or ValueError that names them all."""
    if name not in get_args(kinds):
        raise ValueError(f"unknown {what} {name!r}: one of {', '.join(get_args(kinds))}")
