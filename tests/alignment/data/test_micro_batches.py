"""Micro-batches contain every sequence once, respect max_tokens, and do not change log-probs and gradients."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alignment.config.trainer import LoRAConfig, Packing, TrainerConfig
from alignment.data.micro_batches import ScoredSequence, make_micro_batches, make_model_inputs, prefix_chains
from alignment.data.prefix_sharing import TokenIds, pack_rows
from alignment.models.policy_model import PolicyModel
from alignment.types import Batch

CPU = torch.device("cpu")
PACKINGS: tuple[Packing, ...] = ("tree", "chain", "off")


def sequences(*lengths: int) -> list[ScoredSequence]:
    """Return sequences of these lengths without common prefixes."""
    return [ScoredSequence((number, *range(1, length)), start=1) for number, length in enumerate(lengths)]


def group(prompt: TokenIds, *completions: TokenIds) -> list[ScoredSequence]:
    """Return candidate completions of one prompt."""
    return [ScoredSequence((*prompt, *completion), start=len(prompt)) for completion in completions]


def size(ids: Sequence[TokenIds], packing: Packing) -> int:
    """Return the tokens of a micro-batch, padding included."""
    members = pack_rows(ids, packing)
    return len(members) * max((row.tokens for row in members), default=0)


# Contents of micro-batches


def test_make_micro_batches_example() -> None:
    assert make_micro_batches(sequences(3, 5, 4, 2), max_tokens=8) == [[2, 0], [1], [3]]  # eight, five and two tokens


def test_group_computes_its_prompt_once() -> None:
    candidates = group(tuple(range(1, 41)), *((100 + index, *range(9)) for index in range(4)))
    assert make_micro_batches(candidates, max_tokens=40 + 4 * 10) == [[3, 2, 1, 0]]
    assert make_model_inputs(candidates, CPU).input_ids_BT.shape == (1, 80)
    assert make_model_inputs(candidates, CPU, "chain").input_ids_BT.shape == (4, 50)
    assert sorted(len(indices) for indices in make_micro_batches(candidates, max_tokens=79)) == [
        1,
        3,
    ]  # one row with all four does not fit
    assert len(make_micro_batches(candidates, max_tokens=99, packing="chain")) == 4


def test_rows_with_and_without_mask_are_separated() -> None:
    group_and_sequences = [*group(tuple(range(1, 21)), (50, 1), (51, 1)), *sequences(22, 22)]
    assert [sorted(indices) for indices in make_micro_batches(group_and_sequences, max_tokens=1000)] == [[2, 3], [0, 1]]
    assert make_model_inputs(group_and_sequences[2:], CPU).attention_mask is None
    assert make_model_inputs(group_and_sequences[2:], CPU).position_ids_BT is None


def test_coupled_sequences_share_a_micro_batch() -> None:
    pairs = sequences(9, 2, 2, 9, 5, 5)
    assert [0, 1] not in [sorted(indices) for indices in make_micro_batches(pairs, max_tokens=9)]
    micro_batches = make_micro_batches(pairs, max_tokens=9, coupled=[(0, 1), (2, 3)])
    assert {frozenset(indices) for indices in micro_batches} == {
        frozenset({0, 1}),
        frozenset({2, 3}),
        frozenset({4}),
        frozenset({5}),
    }
    # Overlapping sets are merged.
    assert {0, 1, 2, 5} in [
        set(indices) for indices in make_micro_batches(pairs, max_tokens=9, coupled=[(0, 1), (1, 2), (2, 5)])
    ]


def test_tree_is_split_over_the_ranks() -> None:
    candidates = group(tuple(range(1, 11)), *((100 + index, *range(40)) for index in range(8)))
    assert len(make_micro_batches(candidates, max_tokens=1000)) == 1
    parts = make_micro_batches(candidates, max_tokens=1000, num_ranks=2)
    assert sorted(len(part) for part in parts) == [4, 4]


def test_simultaneous_micro_batches_have_similar_cost() -> None:
    lengths = [10, 90, 20, 80, 30, 70, 40, 60]
    micro_batches = make_micro_batches(sequences(*lengths), max_tokens=1, num_ranks=2)
    costs = [lengths[index] for (index,) in micro_batches]
    assert [costs[0::2], costs[1::2]] == [[90, 70, 40, 20], [80, 60, 30, 10]]


def test_fewer_sequences_than_ranks_give_empty_micro_batches() -> None:
    assert make_micro_batches(sequences(4), max_tokens=100, num_ranks=3) == [[0], [], []]


IDS_OF_TRIES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=14)


@settings(deadline=None)
@given(IDS_OF_TRIES, st.integers(1, 60), st.integers(1, 4), st.sampled_from(PACKINGS), st.data())
def test_every_sequence_is_in_one_micro_batch_within_max_tokens(
    ids: list[TokenIds], budget: int, num_ranks: int, packing: Packing, data: st.DataObject
) -> None:
    coupled = data.draw(st.lists(st.lists(st.sampled_from(range(len(ids))), min_size=1, max_size=3), max_size=3))
    micro_batches = make_micro_batches(
        [ScoredSequence(sequence_ids, start=1) for sequence_ids in ids],
        budget,
        num_ranks,
        coupled=coupled,
        packing=packing,
    )
    assert sorted(index for indices in micro_batches for index in indices) == list(range(len(ids)))
    assert len(micro_batches) % num_ranks == 0
    for coupled_indices in coupled:
        assert any(set(coupled_indices) <= set(indices) for indices in micro_batches)
    if not coupled:
        for indices in micro_batches:
            members = [ids[index] for index in indices]
            assert size(members, packing) <= budget or len(pack_rows(members, packing)) == 1


def test_turns_of_a_conversation_are_one_prefix_chain() -> None:
    first, other = ScoredSequence((1, 2), start=1), ScoredSequence((5, 6), start=1)
    assert prefix_chains([first, ScoredSequence((1, 2, 3, 4), start=3), other]) == [[2], [1, 0]]


# Model inputs of rows


def test_inputs_name_the_column_that_predicts_each_token() -> None:
    inputs = make_model_inputs(
        [ScoredSequence((4, 5, 6, 7), start=2, temperature=0.5), ScoredSequence((8, 9), start=1)], CPU
    )
    assert inputs.input_ids_BT.tolist() == [[8, 9, 0, 0], [4, 5, 6, 7]]
    assert inputs.rows_N.tolist() == [1, 1, 0]
    assert inputs.columns_N.tolist() == [1, 2, 0]  # token 6 is predicted at the column of token 5
    assert inputs.targets_N.tolist() == [6, 7, 9]
    assert inputs.temperatures_N.tolist() == [0.5, 0.5, 1.0]


def test_chain_needs_no_mask() -> None:
    inputs = make_model_inputs(
        [
            ScoredSequence((1, 2), start=1),
            ScoredSequence((1, 2, 3, 4), start=3, temperature=0.5),
            ScoredSequence((5, 6), start=1),
        ],
        CPU,
    )
    assert inputs.input_ids_BT.tolist() == [[5, 6, 0, 0], [1, 2, 3, 4]]
    assert inputs.rows_N.tolist() == [1, 1, 0]  # in the order of the sequences
    assert inputs.targets_N.tolist() == [2, 4, 6]
    assert inputs.temperatures_N.tolist() == [1.0, 0.5, 1.0]
    assert inputs.attention_mask is None
    assert inputs.position_ids_BT is None


def test_tree_is_depth_first_and_branches_attend_to_ancestors_only() -> None:
    # 1 2 3 continues with 4 or with 5 6; 7 8 is a separate row with four columns of padding.
    inputs = make_model_inputs(
        [
            ScoredSequence((1, 2, 3, 4), start=3),
            ScoredSequence((1, 2, 3, 5, 6), start=3),
            ScoredSequence((7, 8), start=1),
        ],
        CPU,
    )
    assert inputs.input_ids_BT.tolist() == [[7, 8, 0, 0, 0, 0], [1, 2, 3, 5, 6, 4]]
    assert inputs.attention_mask is not None and inputs.position_ids_BT is not None
    assert inputs.position_ids_BT.tolist()[1] == [0, 1, 2, 3, 4, 3]
    assert inputs.attention_mask[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
    assert inputs.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        *([0] * column + [1] + [0] * (5 - column) for column in range(2, 6)),  # a row without ones would give NaN
    ]
    assert inputs.columns_N.tolist() == [2, 2, 3, 0]  # both candidates are predicted at the prompt's last token
    assert inputs.targets_N.tolist() == [4, 5, 6, 8]


# Results


@pytest.fixture(scope="module")
def policy(base_model: Path) -> PolicyModel:
    """Return a policy with a random adapter: half the gradients of an untrained one are 0."""
    policy = PolicyModel(base_model, TrainerConfig(lora=LoRAConfig(r=4, alpha=8), device="cpu"), CPU)
    generator = torch.Generator().manual_seed(0)
    initial = policy.initial_tensors("actor", 0)
    policy.load_adapter(
        {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in initial.items()}
    )
    return policy


def logprobs_and_gradients(
    policy: PolicyModel, sequences: Sequence[ScoredSequence], packing: Packing, budget: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of each sequence, and the gradients of a loss that weights every token differently."""
    policy.zero_grad()
    logprobs: list[Tensor] = [torch.empty(0)] * len(sequences)
    for indices in make_micro_batches(sequences, budget, packing=packing):
        logprobs_N = policy(make_model_inputs([sequences[index] for index in indices], CPU, packing))
        parts = logprobs_N.split([len(sequences[index].ids) - sequences[index].start for index in indices])
        for index, part in zip(indices, parts, strict=True):
            logprobs[index] = part.detach()
        losses = [(part * torch.arange(1, len(part) + 1)).sum() for part in parts]
        sum(loss * (index + 1) for index, loss in zip(indices, losses, strict=True)).backward()
    gradients = {name: parameter.grad for name, parameter in policy.role_parameters("actor").items()}
    return logprobs, {name: grad.clone() for name, grad in gradients.items() if grad is not None}


def assert_same_results(policy: PolicyModel, sequences: Sequence[ScoredSequence], budget: int = 10_000) -> None:
    separate, separate_gradients = logprobs_and_gradients(policy, sequences, "off", budget=1)
    for packing in PACKINGS:
        packed, gradients = logprobs_and_gradients(policy, sequences, packing, budget)
        for actual, expected in zip(packed, separate, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
        for name, gradient in gradients.items():
            largest = float(separate_gradients[name].abs().max())
            torch.testing.assert_close(
                gradient, separate_gradients[name], atol=1e-5 * max(1.0, largest), rtol=0, msg=name
            )


CHAIN = [ScoredSequence((1, 2, 3, 4), start=2), ScoredSequence((1, 2, 3, 4, 5, 6, 7), start=6, temperature=0.6)]
GROUP = group((11, 12, 13, 14, 15, 16), (1, 2, 3), (1, 2, 4, 5), (7,), (1, 2, 3))  # two completions are equal
FIRST = group((21, 22, 23), (24, 25), (26, 27))
NESTED_GROUPS = [
    *FIRST,
    *group((*FIRST[1].ids, 30, 31), (32, 33), (34, 35, 36)),
]  # the second group continues a completion of the first


@pytest.mark.parametrize(
    "scored_sequences",
    [
        CHAIN[:1],
        CHAIN,
        GROUP,
        NESTED_GROUPS,
        [*CHAIN, *GROUP, *NESTED_GROUPS, ScoredSequence(tuple(range(60, 90)), start=5)],
    ],
    ids=["single sequence", "chain", "group", "groups within a conversation", "all"],
)
@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_packed_results_match_separate_results(
    policy: PolicyModel, scored_sequences: list[ScoredSequence], budget: int
) -> None:
    assert_same_results(policy, scored_sequences, budget)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=2, max_size=14).map(tuple), st.integers(1, 13)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 60),
)
def test_random_prefix_trees_match_separate_results(
    policy: PolicyModel, ids_and_starts: list[tuple[TokenIds, int]], budget: int
) -> None:
    assert_same_results(
        policy, [ScoredSequence(ids, min(start, len(ids) - 1)) for ids, start in ids_and_starts], budget
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sample_logprobs_match_transformers(base_model: Path, draw: Callable[..., Batch], temperature: float) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_model)
    for sample in draw(4, temperature=temperature).samples:
        ids = torch.tensor([sample.prompt_ids + sample.output_ids])
        with torch.no_grad():
            all_logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
        start = len(sample.prompt_ids)
        expected = [all_logprobs[start - 1 + t, token].item() for t, token in enumerate(sample.output_ids)]
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)
