"""Chunked log-probs equal unchunked ones, without all logits in memory."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from alignment.models.lm_head import (
    compute_logprobs,
    compute_logprobs_and_entropy,
    compute_logprobs_at,
    find_likely_tokens,
)

N, D, V = 13, 8, 32
CHUNKS = [1, V, 3 * V + 5, N * V - 1, N * V]  # one token per chunk, uneven chunks, all tokens but one, all tokens


def make_inputs(dtype: torch.dtype = torch.float32, *, frozen: bool) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(D, V, bias=False, dtype=dtype).requires_grad_(not frozen)
    hidden_ND = torch.randn(N, D, dtype=dtype, requires_grad=True)
    return hidden_ND, head, torch.randint(V, (N,)), torch.rand(N) + 0.5


def unchunked_logprobs(hidden_ND: Tensor, head: nn.Module, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    logits_NV = head(hidden_ND)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperatures_N[:, None]
    return logits_NV.log_softmax(-1).gather(-1, targets_N[:, None]).squeeze(-1)


def gradients(logprobs_N: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((logprobs_N * torch.linspace(-1, 2, N)).sum(), tensors)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_logprobs_and_gradients_match_unchunked_computation(
    chunk: int, frozen: bool, dtype: torch.dtype, tolerance: float
) -> None:
    hidden_ND, head, targets_N, temperatures_N = make_inputs(dtype, frozen=frozen)
    parameters_with_grad = [hidden_ND, *(parameter for parameter in head.parameters() if parameter.requires_grad)]
    actual_N, expected_N = (
        compute_logprobs(hidden_ND, head, targets_N, temperatures_N, chunk),
        unchunked_logprobs(hidden_ND, head, targets_N, temperatures_N),
    )
    assert actual_N.dtype == torch.float32
    torch.testing.assert_close(actual_N, expected_N, atol=1e-6, rtol=0)
    for actual, expected in zip(
        gradients(actual_N, *parameters_with_grad), gradients(expected_N, *parameters_with_grad), strict=True
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_match_finite_differences(chunk: int, frozen: bool) -> None:
    hidden_ND, head, targets_N, temperatures_N = make_inputs(torch.float64, frozen=frozen)

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        if not frozen:
            head.weight = nn.Parameter(weight)
        return compute_logprobs(hidden, head, targets_N, temperatures_N, chunk)

    if frozen:
        assert torch.autograd.gradcheck(lambda hidden: logprobs(hidden, head.weight), (hidden_ND,))
    else:
        expected = gradients(unchunked_logprobs(hidden_ND, head, targets_N, temperatures_N), head.weight)
        torch.testing.assert_close(
            gradients(compute_logprobs(hidden_ND, head, targets_N, temperatures_N, chunk), head.weight), expected
        )
        assert torch.autograd.gradcheck(lambda hidden: logprobs(hidden, head.weight), (hidden_ND,))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("frozen", [True, False])
def test_logprobs_without_gradients_are_bit_identical(chunk: int, frozen: bool) -> None:
    hidden_ND, head, targets_N, temperatures_N = make_inputs(frozen=frozen)
    with torch.no_grad():
        before_N = compute_logprobs(hidden_ND, head, targets_N, temperatures_N, chunk)
    assert torch.equal(compute_logprobs(hidden_ND, head, targets_N, temperatures_N, chunk), before_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trainable_and_frozen_heads_give_identical_bits(dtype: torch.dtype) -> None:
    for chunk in CHUNKS:
        trainable_N, frozen_N = (
            compute_logprobs(*make_inputs(dtype, frozen=frozen), chunk) for frozen in (False, True)
        )
        assert torch.equal(trainable_N, frozen_N)


def unchunked_entropy(hidden_ND: Tensor, head: nn.Module, temperatures_N: Tensor) -> Tensor:
    logprobs_NV = (head(hidden_ND) / temperatures_N[:, None]).log_softmax(-1)
    return -(logprobs_NV.exp() * logprobs_NV).sum(-1)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("frozen", [True, False])
def test_entropy_and_its_gradient_match_unchunked_computation(chunk: int, frozen: bool) -> None:
    hidden_ND, head, targets_N, temperatures_N = make_inputs(torch.float64, frozen=frozen)
    logprobs_N, entropy_N = compute_logprobs_and_entropy(hidden_ND, head, targets_N, temperatures_N, chunk)
    expected_N = unchunked_entropy(hidden_ND, head, temperatures_N)
    torch.testing.assert_close(entropy_N, expected_N)
    with_grad = [hidden_ND, *(parameter for parameter in head.parameters() if parameter.requires_grad)]
    expected_logprobs_N = unchunked_logprobs(hidden_ND, head, targets_N, temperatures_N)
    for actual, expected in zip(
        gradients(logprobs_N + 3 * entropy_N, *with_grad),
        gradients(expected_logprobs_N + 3 * expected_N, *with_grad),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("frozen", [True, False])
def test_logprobs_with_the_entropy_have_the_same_bits(chunk: int, frozen: bool) -> None:
    inputs = make_inputs(torch.bfloat16, frozen=frozen)
    with torch.no_grad():
        expected_N = compute_logprobs(*inputs, chunk)
    assert torch.equal(compute_logprobs_and_entropy(*inputs, chunk)[0], expected_N)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("frozen", [True, False])
def test_likely_tokens_are_those_of_the_unchunked_distribution(chunk: int, frozen: bool) -> None:
    hidden_ND, head, _, temperatures_N = make_inputs(torch.float64, frozen=frozen)
    logprobs_NV = (head(hidden_ND) / temperatures_N[:, None]).log_softmax(-1).detach()
    likely = find_likely_tokens(hidden_ND, head, temperatures_N, chunk, 5)
    expected_NK = logprobs_NV.sort(-1, descending=True).values[:, :5]
    torch.testing.assert_close(likely.logprobs_NK.sort(-1, descending=True).values, expected_NK)
    torch.testing.assert_close(logprobs_NV.gather(-1, likely.ids_NK), likely.logprobs_NK)
    actual_NK = compute_logprobs_at(hidden_ND, head, likely.ids_NK, temperatures_N, chunk)
    assert torch.equal(actual_NK, likely.logprobs_NK) and not actual_NK.requires_grad
    assert find_likely_tokens(hidden_ND, head, temperatures_N, chunk, 2 * V).ids_NK.shape == (N, V)


def test_entropy_of_a_certain_token_is_zero_with_a_finite_gradient() -> None:
    hidden_ND = torch.full((1, 1), 1e4, requires_grad=True)
    head = nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0], [0.0], [-1.0]]))
    _, entropy_N = compute_logprobs_and_entropy(hidden_ND, head, torch.tensor([2]), torch.ones(1), 3)
    entropy_N.sum().backward()
    assert entropy_N.tolist() == [0.0] and hidden_ND.grad is not None and hidden_ND.grad.isfinite().all()


def test_second_backward_gives_the_same_gradient() -> None:
    hidden_ND, head, targets_N, temperatures_N = make_inputs(frozen=False)
    logprobs_N = compute_logprobs(hidden_ND, head, targets_N, temperatures_N, N * V)
    first, second = (torch.autograd.grad(logprobs_N.sum(), head.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("frozen", [True, False])
def test_at_most_one_chunk_of_logits_is_created_or_saved(frozen: bool) -> None:
    chunk = 3 * V + 5
    computed: list[int] = []
    saved: list[int] = []
    hidden_ND, head, targets_N, temperatures_N = make_inputs(frozen=frozen)
    head.register_forward_hook(lambda _module, _inputs, output: computed.append(output.numel()))

    def record_size(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
        logprobs_N = compute_logprobs(hidden_ND, head, targets_N, temperatures_N, chunk)
    forward = len(computed)
    logprobs_N.sum().backward()
    assert max(computed) == 3 * V
    assert max(saved) <= max(N * D, V * D)
    assert sum(computed[:forward]) == N * V
    assert sum(computed[forward:]) == (0 if frozen else N * V)  # recomputed only if the weight needs a gradient


def test_tied_head_accumulates_gradients_of_head_and_embedding() -> None:
    def embedding_gradient(chunk: int) -> Tensor:
        torch.manual_seed(0)
        embedding, head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        head.weight = embedding.weight
        compute_logprobs(
            embedding(torch.arange(N)).tanh(), head, torch.arange(N), torch.ones(N), chunk
        ).sum().backward()
        assert embedding.weight.grad is not None
        return embedding.weight.grad

    torch.testing.assert_close(embedding_gradient(chunk=2 * V), embedding_gradient(chunk=N * V), atol=1e-6, rtol=0)


def test_empty_input_gives_empty_logprobs() -> None:
    _, head, *_ = make_inputs(frozen=True)
    assert compute_logprobs(torch.empty(0, D), head, torch.empty(0, dtype=torch.long), torch.empty(0), 1).shape == (0,)


class Root(nn.Module):
    """A module for FSDP to gather: the head is used within its forward pass."""

    def __init__(self, head: nn.Linear, chunk: int) -> None:
        super().__init__()
        self.head, self.chunk = head, chunk

    def forward(self, hidden_ND: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
        return compute_logprobs(hidden_ND, self.head, targets_N, temperatures_N, self.chunk)


@pytest.fixture
def single_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("frozen", [True, False])
def test_sharded_head_gets_the_same_gradient(frozen: bool) -> None:
    hidden_ND, head, targets_N, temperatures_N = make_inputs(frozen=frozen)
    parameters_with_grad = [hidden_ND, *(parameter for parameter in head.parameters() if parameter.requires_grad)]
    expected = gradients(unchunked_logprobs(hidden_ND, head, targets_N, temperatures_N), *parameters_with_grad)
    root = Root(head, chunk=3 * V)
    sharded: Callable[..., Tensor] = fully_shard(root, mesh=init_device_mesh("cpu", (1,)))  # type: ignore[assignment]
    (sharded(hidden_ND, targets_N, temperatures_N) * torch.linspace(-1, 2, N)).sum().backward()
    torch.testing.assert_close(hidden_ND.grad, expected[0], atol=1e-6, rtol=0)
    if not frozen:
        gradient = root.head.weight.grad
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.full_tensor(), expected[1], atol=1e-6, rtol=0)


PEAK = """
import re, sys, torch
from pathlib import Path
from torch import nn
from alignment.models.lm_head import compute_logprobs

def peak():  # not rusage, which a child inherits from its parent
    return int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
head = nn.Linear(32, 16384, bias=False).requires_grad_(False)
hidden = torch.randn(2048, 32, requires_grad=True)
before = peak()
compute_logprobs(hidden, head, torch.zeros(2048, dtype=torch.long), torch.ones(2048), int(sys.argv[1])).sum().backward()
print(peak() - before)
"""


def peak(chunk: int) -> int:
    """Return the bytes that a forward and backward pass over 128 MiB of logits add to a process."""
    process = subprocess.run(
        [sys.executable, "-c", PEAK, str(chunk)],
        check=True,
        capture_output=True,
        timeout=300,
        # malloc must return freed memory to the system immediately. Otherwise this measures heap fragmentation.
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    return int(process.stdout) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_peak_memory_depends_on_chunk_size() -> None:
    logits = 2048 * 16384 * 4
    assert logits < peak(chunk=2048 * 16384) < 1.7 * logits  # there is at most one tensor of that size
    assert peak(chunk=1 << 20) < 0.6 * logits
