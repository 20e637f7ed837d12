"""Micro-batches hold everything once, fit their budget, and change no log-prob."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.samples import Batch
from alignment.trainer.attest import recompute_logprobs
from alignment.trainer.packing import Scored, plan, rows, threads

CPU = torch.device("cpu")


def sequences(*lengths: int) -> list[Scored]:
    """Sequences that share nothing."""
    return [Scored((number, *range(1, length)), start=1) for number, length in enumerate(lengths)]


def test_the_plan_by_hand() -> None:
    assert plan(sequences(3, 5, 4, 2), budget=8) == [[1], [2, 0], [3]]


def test_the_turns_of_a_conversation_are_one_row() -> None:
    first, other = Scored((1, 2), start=1), Scored((5, 6), start=1)
    second = Scored((1, 2, 3, 4), start=3, temperature=0.5)
    assert threads([first, second, other]) == [[2], [1, 0]]
    laid = rows([first, second, other], CPU)
    assert laid.ids_BT.tolist() == [[5, 6, 0, 0], [1, 2, 3, 4]]
    assert laid.rows_N.tolist() == [1, 1, 0]  # still sequence by sequence
    assert laid.targets_N.tolist() == [2, 4, 6]
    assert laid.temperatures_N.tolist() == [1.0, 0.5, 1.0]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=6).map(tuple), min_size=1, max_size=20))
def test_a_row_begins_with_every_turn_it_holds_and_no_turn_that_fits_has_a_row_of_its_own(
    ids: list[tuple[int, ...]],
) -> None:
    held = threads([Scored(i, start=1) for i in ids])
    assert sorted(index for thread in held for index in thread) == list(range(len(ids)))
    heads = [ids[thread[0]] for thread in held]
    assert all(
        head[: len(ids[index])] == ids[index] for thread, head in zip(held, heads, strict=True) for index in thread
    )
    assert not any(a != b and b[: len(a)] == a for a in heads for b in heads)
    assert len(set(heads)) == len(heads)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120), st.integers(1, 4))
def test_every_sequence_is_planned_once_for_all_ranks_alike(lengths: list[int], budget: int, num_ranks: int) -> None:
    groups = plan(sequences(*lengths), budget, num_ranks)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert len(groups) % num_ranks == 0
    for group in groups:
        assert len(group) <= 1 or max(lengths[index] for index in group) * len(group) <= budget


def test_rows_say_where_each_token_is_predicted() -> None:
    laid = rows([Scored((4, 5, 6, 7), start=2, temperature=0.5), Scored((8, 9), start=1)], CPU)
    assert laid.ids_BT.tolist() == [[8, 9, 0, 0], [4, 5, 6, 7]]
    assert laid.rows_N.tolist() == [1, 1, 0]
    assert laid.columns_N.tolist() == [1, 2, 0]  # token 6 is predicted where 5 stands
    assert laid.targets_N.tolist() == [6, 7, 9]
    assert laid.temperatures_N.tolist() == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_together_is_what_each_is_alone(base_model: Path, draw: Callable[..., Batch], temperature: float) -> None:
    samples = draw(9, temperature=temperature).samples
    together = recompute_logprobs(base_model, None, samples, device="cpu", microbatch_tokens=1000)
    alone = recompute_logprobs(base_model, None, samples, device="cpu", microbatch_tokens=1)
    for first, second in zip(together, alone, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)


def test_a_turn_scored_within_a_later_one_is_what_it_is_alone(base_model: Path, draw: Callable[..., Batch]) -> None:
    first = draw(1).samples[0]
    question = (3, 4, 5)
    second = replace(first, prompt_ids=first.prompt_ids + first.output_ids + question, temperature=0.6)
    together = recompute_logprobs(base_model, None, [first, second], device="cpu")
    alone = [recompute_logprobs(base_model, None, [turn], device="cpu")[0] for turn in (first, second)]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


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
