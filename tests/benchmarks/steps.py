"""A GRPO loss step (forward, loss, backward), complete and with single techniques left out."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from alignment.config.trainer import Packing, TrainerConfig
from alignment.data.collate import output_mask
from alignment.data.micro_batches import ScoredSequence, make_micro_batches, make_model_inputs
from alignment.functional import policy_loss
from alignment.models.base_model import ModelInputs
from alignment.models.policy_model import PolicyModel
from tests.benchmarks.candidates import Case

CPU = torch.device("cpu")
BUDGET = TrainerConfig().micro_batch_tokens
CHUNK = TrainerConfig().logits_chunk
NO_CHUNKS = 1 << 40


def build(model: Path) -> PolicyModel:
    """Return a policy with a random adapter: half the gradients of an untrained one are 0."""
    policy = PolicyModel(model, TrainerConfig(device="cpu"), CPU)
    generator = torch.Generator().manual_seed(0)
    initial = policy.initial_tensors("actor", 0).items()
    policy.load_adapter({name: one + 0.02 * torch.randn(one.shape, generator=generator) for name, one in initial})
    return policy


def gradients(policy: PolicyModel) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in policy.role_parameters("actor").items() if one.grad is not None}


def loss_of(case: Case, group: list[int], logprobs_N: Tensor) -> Tensor:
    """Return the micro-batch's share of GRPO's loss at the first step, where the old policy is the policy itself."""
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
    """Make the step as the trainer does, including the planning of micro-batches. Return the loss."""
    policy.zero_grad()
    policy.base_lm.logits_chunk = chunk
    total = 0.0
    for group in make_micro_batches(case.sequences, BUDGET, packing=packing):
        logprobs_N = policy(make_model_inputs([case.sequences[index] for index in group], CPU, packing))
        loss = loss_of(case, group, logprobs_N)
        loss.backward()
        total += float(loss.detach())
    return total


def padded_step(policy: PolicyModel, case: Case, *, everywhere: bool) -> float:
    """Make the step with rows in the given order, padded to the longest, logits `everywhere` or for scored tokens."""
    policy.zero_grad()
    policy.base_lm.logits_chunk = NO_CHUNKS
    total, longest = 0.0, max(len(sequence.ids) for sequence in case.sequences)
    for group in _split(len(case.sequences), max(1, BUDGET // longest)):
        inputs, scored_N = _padded([case.sequences[index] for index in group], longest, everywhere)
        loss = loss_of(case, group, policy(inputs)[scored_N])
        loss.backward()
        total += float(loss.detach())
    return total


def concatenated_step(policy: PolicyModel, case: Case, packing: Packing) -> float:
    """Make the step with each micro-batch as one row: its rows concatenated, with a mask that separates them."""
    policy.zero_grad()
    policy.base_lm.logits_chunk = CHUNK
    total = 0.0
    for group in make_micro_batches(case.sequences, BUDGET, packing=packing):
        inputs = _concatenate_rows(make_model_inputs([case.sequences[index] for index in group], CPU, packing))
        loss = loss_of(case, group, policy(inputs))
        loss.backward()
        total += float(loss.detach())
    return total


def computed(case: Case, packing: Packing) -> tuple[int, int]:
    """Return the tokens that a step computes, padding included, and the number of micro-batches."""
    groups = make_micro_batches(case.sequences, BUDGET, packing=packing)
    return sum(
        make_model_inputs([case.sequences[i] for i in group], CPU, packing).input_ids_BT.numel() for group in groups
    ), len(groups)


def _split(count: int, size: int) -> Iterator[list[int]]:
    numbers = iter(range(count))
    while group := list(islice(numbers, size)):
        yield group


def _padded(sequences: list[ScoredSequence], longest: int, everywhere: bool) -> tuple[ModelInputs, Tensor]:
    inputs = make_model_inputs(sequences, CPU, "off")
    ids_BT = torch.nn.functional.pad(inputs.input_ids_BT, (0, longest - inputs.input_ids_BT.shape[1]))
    if not everywhere:
        return inputs._replace(input_ids_BT=ids_BT), torch.arange(len(inputs.rows_N))
    rows_N, columns_N = torch.ones_like(ids_BT[:, 1:]).nonzero(as_tuple=True)
    all_positions = ModelInputs(ids_BT, rows_N, columns_N, ids_BT[rows_N, columns_N + 1], torch.ones(len(rows_N)))
    return all_positions, inputs.rows_N * (longest - 1) + inputs.columns_N


def _concatenate_rows(inputs: ModelInputs) -> ModelInputs:
    size, width = inputs.input_ids_BT.shape
    positions_BT = torch.arange(width).repeat(size, 1) if inputs.position_ids_BT is None else inputs.position_ids_BT
    blocks = (
        [torch.ones(width, width, dtype=torch.bool).tril()] * size
        if inputs.attention_mask is None
        else inputs.attention_mask[:, 0]
    )
    return inputs._replace(
        input_ids_BT=inputs.input_ids_BT.reshape(1, -1),
        position_ids_BT=positions_BT.reshape(1, -1),
        attention_mask=torch.block_diag(*blocks).bool()[None, None],
        rows_N=torch.zeros_like(inputs.rows_N),
        columns_N=inputs.rows_N * width + inputs.columns_N,
    )
