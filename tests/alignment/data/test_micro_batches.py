"""Micro-batches hold everything once, fit their budget, and change no log-prob and no gradient."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.data.micro_batches import Scored, plan, rows, threads
from alignment.data.prefix_sharing import Ids, Packing, share
from alignment.models.policy_model import PolicyModel
from alignment.types import Batch

CPU = torch.device("cpu")
PACKINGS: tuple[Packing, ...] = ("tree", "chain", "off")


def sequences(*lengths: int) -> list[Scored]:
    """Sequences that share nothing."""
    return [Scored((number, *range(1, length)), start=1) for number, length in enumerate(lengths)]


def group(prompt: Ids, *completions: Ids) -> list[Scored]:
    """Candidates for one prompt."""
    return [Scored((*prompt, *completion), start=len(prompt)) for completion in completions]


def size(ids: Sequence[Ids], packing: Packing) -> int:
    """Tokens of the rectangle that a micro-batch is, padding and all."""
    held = share(ids, packing)
    return len(held) * max((row.tokens for row in held), default=0)


# What a plan holds


def test_the_plan_by_hand() -> None:
    assert plan(sequences(3, 5, 4, 2), budget=8) == [[2, 0], [1], [3]]  # eight tokens, five, two


def test_a_group_costs_its_prompt_once() -> None:
    four = group(tuple(range(1, 41)), *((100 + index, *range(9)) for index in range(4)))
    assert plan(four, budget=40 + 4 * 10) == [[3, 2, 1, 0]]
    assert rows(four, CPU).ids_BT.shape == (1, 80)
    assert rows(four, CPU, "chain").ids_BT.shape == (4, 50)
    assert sorted(len(indices) for indices in plan(four, budget=79)) == [1, 3]  # no row of four fits
    assert len(plan(four, budget=99, packing="chain")) == 4


def test_rows_with_a_mask_and_rows_without_are_kept_apart() -> None:
    mixed = [*group(tuple(range(1, 21)), (50, 1), (51, 1)), *sequences(22, 22)]
    assert [sorted(indices) for indices in plan(mixed, budget=1000)] == [[2, 3], [0, 1]]
    assert rows(mixed[2:], CPU).mask is None
    assert rows(mixed[2:], CPU).positions_BT is None


def test_what_is_named_together_is_not_parted() -> None:
    pairs = sequences(9, 2, 2, 9, 5, 5)
    assert [0, 1] not in [sorted(indices) for indices in plan(pairs, budget=9)]
    planned = plan(pairs, budget=9, together=[(0, 1), (2, 3)])
    assert {frozenset(indices) for indices in planned} == {
        frozenset({0, 1}),
        frozenset({2, 3}),
        frozenset({4}),
        frozenset({5}),
    }
    # Where sets overlap, all of them are one.
    assert {0, 1, 2, 5} in [set(indices) for indices in plan(pairs, budget=9, together=[(0, 1), (1, 2), (2, 5)])]


def test_a_tree_that_every_rank_could_have_a_part_of_is_not_left_to_one() -> None:
    eight = group(tuple(range(1, 11)), *((100 + index, *range(40)) for index in range(8)))
    assert len(plan(eight, budget=1000)) == 1
    parts = plan(eight, budget=1000, num_ranks=2)
    assert sorted(len(part) for part in parts) == [4, 4]


def test_micro_batches_that_meet_cost_about_the_same() -> None:
    lengths = [10, 90, 20, 80, 30, 70, 40, 60]
    planned = plan(sequences(*lengths), budget=1, num_ranks=2)
    costs = [lengths[index] for (index,) in planned]
    assert [costs[0::2], costs[1::2]] == [[90, 70, 40, 20], [80, 60, 30, 10]]


def test_fewer_sequences_than_ranks_leave_micro_batches_empty() -> None:
    assert plan(sequences(4), budget=100, num_ranks=3) == [[0], [], []]


ids_of_tries = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=14)


@settings(deadline=None)
@given(ids_of_tries, st.integers(1, 60), st.integers(1, 4), st.sampled_from(PACKINGS), st.data())
def test_every_sequence_is_planned_once_within_the_budget_for_all_ranks_alike(
    ids: list[Ids], budget: int, num_ranks: int, packing: Packing, data: st.DataObject
) -> None:
    together = data.draw(st.lists(st.lists(st.sampled_from(range(len(ids))), min_size=1, max_size=3), max_size=3))
    planned = plan([Scored(one, start=1) for one in ids], budget, num_ranks, together=together, packing=packing)
    assert sorted(index for indices in planned for index in indices) == list(range(len(ids)))
    assert len(planned) % num_ranks == 0
    for named in together:
        assert any(set(named) <= set(indices) for indices in planned)
    if not together:
        for indices in planned:
            held = [ids[index] for index in indices]
            assert size(held, packing) <= budget or len(share(held, packing)) == 1


def test_the_turns_of_a_conversation_are_one_thread() -> None:
    first, other = Scored((1, 2), start=1), Scored((5, 6), start=1)
    assert threads([first, Scored((1, 2, 3, 4), start=3), other]) == [[2], [1, 0]]


# How rows are laid


def test_rows_say_where_each_token_is_predicted() -> None:
    laid = rows([Scored((4, 5, 6, 7), start=2, temperature=0.5), Scored((8, 9), start=1)], CPU)
    assert laid.ids_BT.tolist() == [[8, 9, 0, 0], [4, 5, 6, 7]]
    assert laid.rows_N.tolist() == [1, 1, 0]
    assert laid.columns_N.tolist() == [1, 2, 0]  # token 6 is predicted where 5 stands
    assert laid.targets_N.tolist() == [6, 7, 9]
    assert laid.temperatures_N.tolist() == [0.5, 0.5, 1.0]


def test_a_chain_needs_no_mask() -> None:
    laid = rows([Scored((1, 2), start=1), Scored((1, 2, 3, 4), start=3, temperature=0.5), Scored((5, 6), start=1)], CPU)
    assert laid.ids_BT.tolist() == [[5, 6, 0, 0], [1, 2, 3, 4]]
    assert laid.rows_N.tolist() == [1, 1, 0]  # still sequence by sequence
    assert laid.targets_N.tolist() == [2, 4, 6]
    assert laid.temperatures_N.tolist() == [1.0, 0.5, 1.0]
    assert laid.mask is None
    assert laid.positions_BT is None


def test_a_tree_is_laid_depth_first_and_a_branch_sees_its_ancestors_only() -> None:
    # 1 2 3 goes on with 4, or with 5 6; 7 8 is a row of its own, with three columns of padding.
    laid = rows([Scored((1, 2, 3, 4), start=3), Scored((1, 2, 3, 5, 6), start=3), Scored((7, 8), start=1)], CPU)
    assert laid.ids_BT.tolist() == [[7, 8, 0, 0, 0, 0], [1, 2, 3, 5, 6, 4]]
    assert laid.mask is not None and laid.positions_BT is not None
    assert laid.positions_BT.tolist()[1] == [0, 1, 2, 3, 4, 3]
    assert laid.mask[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
    assert laid.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        *([0] * column + [1] + [0] * (5 - column) for column in range(2, 6)),  # a row of no ones would be NaN
    ]
    assert laid.columns_N.tolist() == [2, 2, 3, 0]  # both candidates are predicted from the prompt's last token
    assert laid.targets_N.tolist() == [4, 5, 6, 8]


# What comes out


@pytest.fixture(scope="module")
def policy(base_model: Path) -> PolicyModel:
    """An adapter that says something: with the fresh one half of its gradients are 0."""
    made = PolicyModel(base_model, TrainerConfig(lora=LoRAConfig(rank=4, alpha=8), device="cpu"), CPU)
    generator = torch.Generator().manual_seed(0)
    fresh = made.fresh("actor", 0)
    made.wear({name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in fresh.items()})
    return made


def logprobs_and_gradients(
    policy: PolicyModel, sequences: Sequence[Scored], packing: Packing, budget: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Sequence by sequence, and of a loss in which every token has a weight of its own."""
    policy.zero_grad()
    found: list[Tensor] = [torch.empty(0)] * len(sequences)
    for indices in plan(sequences, budget, packing=packing):
        logprobs_N = policy(rows([sequences[index] for index in indices], CPU, packing))
        parts = logprobs_N.split([len(sequences[index].ids) - sequences[index].start for index in indices])
        for index, part in zip(indices, parts, strict=True):
            found[index] = part.detach()
        losses = [(part * torch.arange(1, len(part) + 1)).sum() for part in parts]
        sum(loss * (index + 1) for index, loss in zip(indices, losses, strict=True)).backward()
    return found, {name: parameter.grad.clone() for name, parameter in policy.tensors("actor").items()}


def assert_alike(policy: PolicyModel, sequences: Sequence[Scored], budget: int = 10_000) -> None:
    alone, gradients_alone = logprobs_and_gradients(policy, sequences, "off", budget=1)
    for packing in PACKINGS:
        together, gradients = logprobs_and_gradients(policy, sequences, packing, budget)
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
        for name, gradient in gradients.items():
            largest = float(gradients_alone[name].abs().max())
            torch.testing.assert_close(gradient, gradients_alone[name], atol=1e-5 * max(1.0, largest), rtol=0, msg=name)


CHAIN = [Scored((1, 2, 3, 4), start=2), Scored((1, 2, 3, 4, 5, 6, 7), start=6, temperature=0.6)]
GROUP = group((11, 12, 13, 14, 15, 16), (1, 2, 3), (1, 2, 4, 5), (7,), (1, 2, 3))  # two of them alike
FIRST = group((21, 22, 23), (24, 25), (26, 27))
WITHIN = [*FIRST, *group((*FIRST[1].ids, 30, 31), (32, 33), (34, 35, 36))]  # one of the first is gone on with


@pytest.mark.parametrize(
    "many",
    [CHAIN[:1], CHAIN, GROUP, WITHIN, [*CHAIN, *GROUP, *WITHIN, Scored(tuple(range(60, 90)), start=5)]],
    ids=["one", "chain", "group", "groups within a conversation", "all"],
)
@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_together_is_what_each_is_alone(policy: PolicyModel, many: list[Scored], budget: int) -> None:
    assert_alike(policy, many, budget)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=2, max_size=14).map(tuple), st.integers(1, 13)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 60),
)
def test_any_tries_are_what_each_sequence_is_alone(
    policy: PolicyModel, drawn: list[tuple[Ids, int]], budget: int
) -> None:
    assert_alike(policy, [Scored(ids, min(start, len(ids) - 1)) for ids, start in drawn], budget)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_model_as_transformers_runs_it(
    base_model: Path, draw: Callable[..., Batch], temperature: float
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_model)
    for sample in draw(4, temperature=temperature).samples:
        ids = torch.tensor([sample.prompt_ids + sample.output_ids])
        with torch.no_grad():
            everywhere = (model(ids).logits[0] / temperature).log_softmax(-1)
        start = len(sample.prompt_ids)
        wanted = [everywhere[start - 1 + t, token].item() for t, token in enumerate(sample.output_ids)]
        np.testing.assert_allclose(sample.logprobs, wanted, atol=1e-5)
