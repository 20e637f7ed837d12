"""Gradient checkpointing: a decoder layer keeps its input only, and computes the rest again on the way back."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from alignment.models.roles import ActiveRole


def recompute(layers: Iterable[nn.Module], acting: ActiveRole) -> None:
    """In place, and inside FSDP's hooks, so that a layer is gathered once on the way back.

    transformers' own switch needs a model in training mode, and so turns dropout on.
    """
    for layer in layers:
        layer.forward = partial(_run, layer.forward, acting)


def _run(forward: Callable[..., Any], acting: ActiveRole, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    hat = acting.hat  # on the way back, somebody else may be acting

    def under_the_same_hat(*args: Any) -> Any:
        with acting.wearing(hat):
            return forward(*args, **kwargs)

    # Nothing here draws random numbers, so there is no state of a generator to keep.
    return checkpoint(under_the_same_hat, *args, use_reentrant=False, preserve_rng_state=False)
