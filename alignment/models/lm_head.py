"""Log-probs and entropies from hidden states, in chunks: the logits of all tokens are never in memory at once.

N tokens times V vocabulary entries in float32 are larger than any other tensor (2,048 tokens, 150,000 entries: 1.2 GB,
and several times that with softmax and gradient). A log-prob depends on its own hidden state only. If the head is
frozen, d logprob_n / d hidden_n is therefore computed in the forward pass, while that token's logits exist, and in
their memory: N·D numbers are kept, and nothing is computed twice. If the head is trained, the gradient of its weight
needs the gradient of the loss, so each chunk is recomputed in the backward pass (Chen et al., 2016).

The entropy of a token's distribution is computed only where it is asked for; there each chunk is recomputed too.

The method and the chunk size depend only on the head and on the number of tokens and vocabulary entries. A forward pass
with gradients therefore gives the same bits as one without.

Tensor suffixes: N scored tokens, D hidden size, V vocabulary, K tokens of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class LikelyTokens(NamedTuple):
    """The likeliest tokens at each of N places, in no order, and their log-probs in nats."""

    ids_NK: Tensor
    logprobs_NK: Tensor


def compute_logprobs(
    hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor, chunk: int
) -> Tensor:
    """Return log_softmax(head(hidden) / temperature) at the targets, in nats, at least in float32.  [N, D] → [N]

    At most `chunk` logits are in memory at a time, or one token's if the vocabulary is larger. `head` must be linear in
    the last dimension, or any other module that treats every token by itself and does not need its output in the
    backward pass.
    """
    vocabulary = head(hidden_ND[:0]).shape[-1]
    chunk_tokens = max(1, chunk // vocabulary)
    if not any(parameter.requires_grad for parameter in head.parameters()):
        logprobs_N: Tensor = _FrozenHeadLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_ND, head, targets_N, temperatures_N, chunk_tokens
        )
        return logprobs_N
    if len(hidden_ND) <= chunk_tokens:
        return _head_logprobs(hidden_ND, head, targets_N, temperatures_N)
    chunks = _split(chunk_tokens, hidden_ND, targets_N, temperatures_N)
    parts = [checkpoint(_head_logprobs, hidden, head, *rest, use_reentrant=False) for hidden, *rest in chunks]
    return torch.cat(parts)


def compute_logprobs_and_entropy(
    hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return `compute_logprobs`, with the same bits, and the entropy of softmax(head(hidden) / temperature), in nats.

    [N, D] → [N] each.
    """
    chunk_tokens = max(1, chunk // head(hidden_ND[:0]).shape[-1])
    if len(hidden_ND) <= chunk_tokens:
        return _head_logprobs_and_entropy(hidden_ND, head, targets_N, temperatures_N)
    chunks = _split(chunk_tokens, hidden_ND, targets_N, temperatures_N)
    parts = [
        checkpoint(_head_logprobs_and_entropy, hidden, head, *rest, use_reentrant=False) for hidden, *rest in chunks
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


@torch.no_grad()
def find_likely_tokens(
    hidden_ND: Tensor, head: nn.Module, temperatures_N: Tensor, chunk: int, count: int
) -> LikelyTokens:
    """Return the `count` likeliest tokens of softmax(head(hidden) / temperature), or the whole vocabulary if smaller.

    At most `chunk` logits are in memory at a time, or one token's, as in `compute_logprobs`.
    """
    chunk_tokens = max(1, chunk // head(hidden_ND[:0]).shape[-1])
    parts = []
    for hidden, temperatures in _split(chunk_tokens, hidden_ND, temperatures_N):
        logprobs_NV = _log_softmax(head(hidden), temperatures)
        logprobs_NK, ids_NK = logprobs_NV.topk(min(count, logprobs_NV.shape[-1]), sorted=False)
        parts.append((ids_NK, logprobs_NK))
    ids, logprobs = zip(*parts, strict=True)
    return LikelyTokens(torch.cat(ids), torch.cat(logprobs))


@torch.no_grad()
def compute_logprobs_at(
    hidden_ND: Tensor, head: nn.Module, ids_NK: Tensor, temperatures_N: Tensor, chunk: int
) -> Tensor:
    """Return log_softmax(head(hidden) / temperature) at K tokens of each place, in chunks as above.  → [N, K]"""
    chunk_tokens = max(1, chunk // head(hidden_ND[:0]).shape[-1])
    chunks = _split(chunk_tokens, hidden_ND, ids_NK, temperatures_N)
    parts = [_log_softmax(head(hidden), temperatures).gather(-1, ids) for hidden, ids, temperatures in chunks]
    return torch.cat(parts)


def _log_softmax(logits_NV: Tensor, temperatures_N: Tensor) -> Tensor:
    return (_to_float32(logits_NV) / temperatures_N[:, None]).log_softmax(-1)


def _head_logprobs_and_entropy(
    hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs_N, entropy_N = _LogprobsAndEntropy.apply(  # type: ignore[no-untyped-call]
        head(hidden_ND), targets_N, temperatures_N
    )
    return logprobs_N, entropy_N


def _head_logprobs(hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    logprobs_N: Tensor = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        head(hidden_ND), targets_N, temperatures_N
    )
    return logprobs_N


def _split(chunk_tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor, chunk_tokens) for tensor in tensors), strict=True)


class _TargetLogprobs(torch.autograd.Function):
    """Log-probs from logits. One tensor of the logits' size is kept: the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
        buffer_NV = _to_float32(logits_NV)
        logprobs_N = _softmax_in_place(buffer_NV, targets_N, temperatures_N)
        ctx.dtype = logits_NV.dtype
        ctx.save_for_backward(buffer_NV, targets_N, temperatures_N)
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities_NV, targets_N, temperatures_N = ctx.saved_tensors
        derivatives_NV = _derivative_in_place(probabilities_NV.clone(), targets_N, temperatures_N)
        return derivatives_NV.mul_(gradients[0][:, None]).to(ctx.dtype), None, None


class _LogprobsAndEntropy(torch.autograd.Function):
    """Log-probs and entropies from logits. The probabilities are kept."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
        buffer_NV = _to_float32(logits_NV)
        logprobs_N = _softmax_in_place(buffer_NV, targets_N, temperatures_N)
        entropy_N = torch.special.entr(buffer_NV).sum(-1)
        ctx.dtype = logits_NV.dtype
        ctx.save_for_backward(buffer_NV, targets_N, temperatures_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d entropy / d logits = −p · (log p + entropy) / temperature"""
        probabilities_NV, targets_N, temperatures_N, entropy_N = ctx.saved_tensors
        logprob_gradient_N, entropy_gradient_N = gradients
        derivatives_NV = torch.special.entr(probabilities_NV).sub_(probabilities_NV * entropy_N[:, None])
        derivatives_NV.mul_((entropy_gradient_N / temperatures_N)[:, None])
        of_logprobs_NV = _derivative_in_place(probabilities_NV.clone(), targets_N, temperatures_N)
        derivatives_NV.add_(of_logprobs_NV.mul_(logprob_gradient_N[:, None]))
        return derivatives_NV.to(ctx.dtype), None, None


class _FrozenHeadLogprobs(torch.autograd.Function):
    """Log-probs from hidden states and, if a gradient is needed, their derivatives by the hidden states."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor, chunk_tokens: int
    ) -> Tensor:
        logprobs: list[Tensor] = []
        derivatives: list[Tensor] = []
        for hidden, targets, temperatures in _split(chunk_tokens, hidden_ND.detach(), targets_N, temperatures_N):
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                logits_NV = head(hidden.requires_grad_(ctx.needs_input_grad[0]))
            buffer_NV = _to_float32(logits_NV)
            logprobs.append(_softmax_in_place(buffer_NV, targets, temperatures))
            if ctx.needs_input_grad[0]:
                derivatives_NV = _derivative_in_place(buffer_NV, targets, temperatures).to(logits_NV.dtype)
                derivatives += torch.autograd.grad(logits_NV, hidden, derivatives_NV)
        if derivatives:
            ctx.save_for_backward(torch.cat(derivatives))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (derivatives_ND,) = ctx.saved_tensors
        return (gradients[0][:, None] * derivatives_ND).to(derivatives_ND.dtype), None, None, None, None


def _to_float32(logits_NV: Tensor) -> Tensor:
    """Return the logits in float32 or wider: the same memory if they are that already, else a copy."""
    return logits_NV.detach().to(torch.promote_types(logits_NV.dtype, torch.float32))


def _softmax_in_place(logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    """Return the log-probs of the targets, and turn the logits into probabilities in place.  [N, V] → [N]"""
    logits_NV.div_(temperatures_N[:, None])
    largest_N = logits_NV.amax(-1)
    target_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    total_N = logits_NV.sub_(largest_N[:, None]).exp_().sum(-1)
    logits_NV.div_(total_N[:, None])
    return target_N - largest_N - total_N.log()


def _derivative_in_place(probabilities_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    """Return d logprob / d logits = (1 at the target − probability) / temperature, in the given memory."""
    ones_N1 = torch.ones_like(probabilities_NV[:, :1])
    return probabilities_NV.neg_().scatter_add_(-1, targets_N[:, None], ones_N1).div_(temperatures_N[:, None])
