"""Log-probs from hidden states without the logits of all tokens: the widest tensor of a step is never whole.

N tokens times V words in float32 outgrow everything else (2,048 tokens, 150,000 words: 1.2 GB, and as much again
for the gradient). Tokens are therefore taken a few at a time. A log-prob depends on its own hidden state alone, so
where the head is frozen d logprob_n / d hidden_n is found right in the forward pass, while that token's logits are
there: N·D numbers to keep, and nothing is computed twice. Where the head learns, the gradient of its weight needs
what comes back from the loss, so each chunk is computed again in the backward pass (Chen et al., 2016).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint


def logprobs_of(hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor, chunk: int) -> Tensor:
    """log_softmax(head(hidden) / temperature) at the targets, at least in float32.  [N, D] → [N]

    No more than `chunk` logits are in memory at a time, or one token's where a token has more. `head` is linear in
    its last dimension, or anything else that treats every token by itself.
    """
    width = head(hidden_ND[:0]).shape[-1]
    if len(hidden_ND) * width <= chunk:
        return _at_once(hidden_ND, head, targets_N, temperatures_N)
    rows = max(1, chunk // width)
    grad = torch.is_grad_enabled()
    if grad and any(parameter.requires_grad for parameter in head.parameters()):
        parts = [
            checkpoint(_at_once, hidden, head, targets, temperatures, use_reentrant=False)
            for hidden, targets, temperatures in _cut(rows, hidden_ND, targets_N, temperatures_N)
        ]
        return torch.cat(parts)
    if grad and hidden_ND.requires_grad:
        logprobs_N: Tensor = _FrozenHead.apply(hidden_ND, head, targets_N, temperatures_N, rows)
        return logprobs_N
    return torch.cat(
        [_at_once(hidden, head, *rest) for hidden, *rest in _cut(rows, hidden_ND, targets_N, temperatures_N)]
    )


def _at_once(hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    logits_NV = head(hidden_ND)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).div_(temperatures_N[:, None])
    return -cross_entropy(logits_NV, targets_N, reduction="none")


def _cut(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


class _FrozenHead(torch.autograd.Function):
    """The log-probs, and beside them their derivatives by the hidden states, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor, rows: int
    ) -> Tensor:
        logprobs: list[Tensor] = []
        slopes: list[Tensor] = []
        for hidden, targets, temperatures in _cut(rows, hidden_ND.detach(), targets_N, temperatures_N):
            with torch.enable_grad():
                chunk_N = _at_once(hidden.requires_grad_(), head, targets, temperatures)
                # Each log-prob knows only its own row of `hidden`, so the sum's gradient is each one's.
                slopes += torch.autograd.grad(chunk_N.sum(), hidden)
            logprobs.append(chunk_N.detach())
        ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slopes_ND,) = ctx.saved_tensors
        return (gradients[0][:, None] * slopes_ND).to(slopes_ND.dtype), None, None, None, None
