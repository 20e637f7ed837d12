"""Log-probs from hidden states without the logits of all tokens: the widest tensor of a step is never whole.

N tokens times V words in float32 outgrow everything else (2,048 tokens, 150,000 words: 1.2 GB, and several times that
with softmax and gradient). Tokens are therefore taken a few at a time. A log-prob depends on its own hidden state
alone, so where the head is frozen d logprob_n / d hidden_n is found right in the forward pass, while that token's
logits are there, and in their place: N·D numbers to keep, and nothing is computed twice. Where the head learns, the
gradient of its weight needs what comes back from the loss, so each chunk is computed again in the backward pass (Chen
et al., 2016).

Which way is taken, and how tokens are cut, depends on the head and on the numbers of tokens and words: a step that
learns finds the very bits that were found without gradients.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def logprobs_of(hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor, chunk: int) -> Tensor:
    """log_softmax(head(hidden) / temperature) at the targets, at least in float32.  [N, D] → [N]

    No more than `chunk` logits are in memory at a time, or one token's where a token has more. `head` is linear in
    its last dimension, or anything else that treats every token by itself and does not need its output on the way
    back.
    """
    width = head(hidden_ND[:0]).shape[-1]
    rows = max(1, chunk // width)
    if not any(parameter.requires_grad for parameter in head.parameters()):
        logprobs_N: Tensor = _FrozenHead.apply(hidden_ND, head, targets_N, temperatures_N, rows)
        return logprobs_N
    if len(hidden_ND) <= rows:
        return _logprobs(hidden_ND, head, targets_N, temperatures_N)
    cut = _cut(rows, hidden_ND, targets_N, temperatures_N)
    parts = [checkpoint(_logprobs, hidden, head, *rest, use_reentrant=False) for hidden, *rest in cut]
    return torch.cat(parts)


def _logprobs(hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    logprobs_N: Tensor = _AtTargets.apply(head(hidden_ND), targets_N, temperatures_N)
    return logprobs_N


def _cut(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


class _AtTargets(torch.autograd.Function):
    """From logits to log-probs, with one tensor of their size to keep: the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
        buffer_NV = _own(logits_NV)
        logprobs_N = _softmax(buffer_NV, targets_N, temperatures_N)
        ctx.dtype = logits_NV.dtype
        ctx.save_for_backward(buffer_NV, targets_N, temperatures_N)
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities_NV, targets_N, temperatures_N = ctx.saved_tensors
        slopes_NV = _slope(probabilities_NV.clone(), targets_N, temperatures_N)
        return slopes_NV.mul_(gradients[0][:, None]).to(ctx.dtype), None, None


class _FrozenHead(torch.autograd.Function):
    """The log-probs, and beside them, if somebody will ask, their derivatives by the hidden states."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor, rows: int
    ) -> Tensor:
        logprobs: list[Tensor] = []
        slopes: list[Tensor] = []
        for hidden, targets, temperatures in _cut(rows, hidden_ND.detach(), targets_N, temperatures_N):
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                outputs_NV = head(hidden.requires_grad_(ctx.needs_input_grad[0]))
            buffer_NV = _own(outputs_NV)
            logprobs.append(_softmax(buffer_NV, targets, temperatures))
            if ctx.needs_input_grad[0]:
                slopes_NV = _slope(buffer_NV, targets, temperatures).to(outputs_NV.dtype)
                slopes += torch.autograd.grad(outputs_NV, hidden, slopes_NV)
        if slopes:
            ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slopes_ND,) = ctx.saved_tensors
        return (gradients[0][:, None] * slopes_ND).to(slopes_ND.dtype), None, None, None, None


def _own(logits_NV: Tensor) -> Tensor:
    """The logits' own memory to write in, or a wider copy."""
    return logits_NV.detach().to(torch.promote_types(logits_NV.dtype, torch.float32))


def _softmax(logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    """The targets' log-probs; the logits become probabilities, in place: a second tensor of this size is not made."""
    logits_NV.div_(temperatures_N[:, None])
    largest_N = logits_NV.amax(-1)
    target_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    total_N = logits_NV.sub_(largest_N[:, None]).exp_().sum(-1)
    logits_NV.div_(total_N[:, None])
    return target_N - largest_N - total_N.log()


def _slope(probabilities_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    """d logprob / d logits = (1 at the target − probability) / temperature, in place."""
    ones_N1 = torch.ones_like(probabilities_NV[:, :1])
    return probabilities_NV.neg_().scatter_add_(-1, targets_N[:, None], ones_N1).div_(temperatures_N[:, None])
