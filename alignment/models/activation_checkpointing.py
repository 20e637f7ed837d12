"""Activation checkpointing: a decoder layer stores its input only and recomputes the rest in the backward pass."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from alignment.models.roles import ActiveRole


def enable_activation_checkpointing(layers: Iterable[nn.Module], active_role: ActiveRole) -> None:
    """Wrap the `forward` of every layer, in place.

    The wrapper runs inside the hooks of FSDP, so a layer is gathered once in the backward pass. The switch of
    transformers is not used: it requires training mode, which enables dropout.
    """
    for layer in layers:
        layer.forward = partial(_checkpointed_forward, layer.forward, active_role)


def _checkpointed_forward(forward: Callable[..., Any], active_role: ActiveRole, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    role = active_role.role  # during the backward pass another role may be active

    def forward_with_same_role(*args: Any) -> Any:
        with active_role.acting_as(role):
            return forward(*args, **kwargs)

    # The forward pass draws no random numbers, so no generator state needs to be kept.
    return checkpoint(forward_with_same_role, *args, use_reentrant=False, preserve_rng_state=False)
