"""A GRPO loss step of ours: forward, loss and backward, as it is and with one technique after the other left out."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from alignment.config.trainer import TrainerConfig
from alignment.data.collate import output_mask
from alignment.data.micro_batches import Scored, plan, rows
from alignment.data.prefix_sharing import Packing
from alignment.functional import policy_loss
from alignment.models.policy_model import PolicyModel, Rows
from tests.benchmarks.candidates import Case

CPU = torch.device("cpu")
BUDGET = TrainerConfig().microbatch_tokens
CHUNK = TrainerConfig().logits_chunk
AT_ONCE = 1 << 40


def build(model: Path) -> PolicyModel:
    """With an adapter that says something: the fresh one has gradients of 0."""
    policy = PolicyModel(model, TrainerConfig(device="cpu"), CPU)
    generator = torch.Generator().manual_seed(0)
    fresh = policy.fresh("actor", 0).items()
    policy.wear({name: one + 0.02 * torch.randn(one.shape, generator=generator) for name, one in fresh})
    return policy


def gradients(policy: PolicyModel) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in policy.tensors("actor").items() if one.grad is not None}


def loss_of(case: Case, group: list[int], logprobs_N: Tensor) -> Tensor:
    """The micro-batch's share of GRPO's loss at the first step, where the old policy is the policy itself."""
    mask_BT = output_mask([case.sequences[index] for index in group], CPU)
    logprobs_BT = torch.zeros_like(mask_BT).masked_scatter(mask_BT.bool(), logprobs_N)
    return policy_loss(
        logprobs_BT,
        logprobs_BT.detach(),
        case.advantages_B[group][:, None].expand_as(mask_BT),
        mask_BT,
        kind="ppo",
        clip_c=None,
        aggregation="seq-mean-token-mean",
        denominator=len(case.sequences),
    ).loss


def step(policy: PolicyModel, case: Case, packing: Packing = "tree", chunk: int = CHUNK) -> float:
    """As the trainer does it, the plan included."""
    policy.zero_grad()
    policy.trunk.logits_chunk = chunk
    total = 0.0
    for group in plan(case.sequences, BUDGET, packing=packing):
        logprobs_N = policy(rows([case.sequences[index] for index in group], CPU, packing))
        loss = loss_of(case, group, logprobs_N)
        loss.backward()
        total += float(loss.detach())
    return total


def padded_step(policy: PolicyModel, case: Case, *, everywhere: bool) -> float:
    """In the order given, every row as long as the longest of all; logits `everywhere`, or where a token is scored."""
    policy.zero_grad()
    policy.trunk.logits_chunk = AT_ONCE
    total, longest = 0.0, max(len(sequence.ids) for sequence in case.sequences)
    for group in _split(len(case.sequences), max(1, BUDGET // longest)):
        laid, scored_N = _padded([case.sequences[index] for index in group], longest, everywhere)
        loss = loss_of(case, group, policy(laid)[scored_N])
        loss.backward()
        total += float(loss.detach())
    return total


def end_to_end_step(policy: PolicyModel, case: Case, packing: Packing) -> float:
    """Every micro-batch as one row: its trees one behind the other, and a mask that keeps them apart."""
    policy.zero_grad()
    policy.trunk.logits_chunk = CHUNK
    total = 0.0
    for group in plan(case.sequences, BUDGET, packing=packing):
        laid = _end_to_end(rows([case.sequences[index] for index in group], CPU, packing))
        loss = loss_of(case, group, policy(laid))
        loss.backward()
        total += float(loss.detach())
    return total


def computed(case: Case, packing: Packing) -> tuple[int, int]:
    """Tokens that go through the model for a step, padding included, and in how many micro-batches."""
    groups = plan(case.sequences, BUDGET, packing=packing)
    return sum(rows([case.sequences[i] for i in group], CPU, packing).ids_BT.numel() for group in groups), len(groups)


def _split(count: int, size: int) -> Iterator[list[int]]:
    numbers = iter(range(count))
    while group := list(islice(numbers, size)):
        yield group


def _padded(sequences: list[Scored], longest: int, everywhere: bool) -> tuple[Rows, Tensor]:
    laid = rows(sequences, CPU, "off")
    ids_BT = torch.nn.functional.pad(laid.ids_BT, (0, longest - laid.ids_BT.shape[1]))
    if not everywhere:
        return laid._replace(ids_BT=ids_BT), torch.arange(len(laid.rows_N))
    rows_N, columns_N = torch.ones_like(ids_BT[:, 1:]).nonzero(as_tuple=True)
    every = Rows(ids_BT, rows_N, columns_N, ids_BT[rows_N, columns_N + 1], torch.ones(len(rows_N)))
    return every, laid.rows_N * (longest - 1) + laid.columns_N


def _end_to_end(laid: Rows) -> Rows:
    size, width = laid.ids_BT.shape
    positions_BT = torch.arange(width).repeat(size, 1) if laid.positions_BT is None else laid.positions_BT
    blocks = [torch.ones(width, width, dtype=torch.bool).tril()] * size if laid.mask is None else laid.mask[:, 0]
    return laid._replace(
        ids_BT=laid.ids_BT.reshape(1, -1),
        positions_BT=positions_BT.reshape(1, -1),
        mask=torch.block_diag(*blocks).bool()[None, None],
        rows_N=torch.zeros_like(laid.rows_N),
        columns_N=laid.rows_N * width + laid.columns_N,
    )
