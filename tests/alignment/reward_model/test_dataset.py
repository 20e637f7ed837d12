"""The length and the raters of a dataset, and the held-out split, which has no leakage."""

import itertools

import pytest

from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, PreferencePair, Reply, select_held_out, split
from tests.alignment.reward_model.conftest import make_dataset


def test_length_and_raters() -> None:
    dataset = make_dataset(3, 2)
    assert len(dataset) == 5 and dataset.raters == {"HUMAN/0", "HUMAN/1", "HUMAN/2", "HUMAN/p0", "HUMAN/p1"}


def make_connected_dataset(count: int = 300) -> PreferenceDataset:
    """Return a dataset with repeated prompts, conversations of three turns, and raters of two conversations."""
    replies = tuple(
        Reply(f"t{number}", (number // 2 if number % 10 == 0 else 1000 + number,), (number,), f"c{number // 3}")
        for number in range(count)
    )
    labels = tuple(BinaryLabel(number, (-1.0) ** number, rater=f"HUMAN/{number // 6}") for number in range(count))
    return PreferenceDataset(replies, (PreferencePair(0, 10), PreferencePair(31, 60)), labels)


@pytest.mark.parametrize("seed", range(5))
def test_held_out_split_has_no_leakage(seed: int) -> None:
    dataset = make_connected_dataset()
    held_out_indices = select_held_out(dataset, 0.2, seed)
    train, held_out = split(dataset, held_out_indices)
    assert len(train) + len(held_out) == len(dataset)
    assert 0.1 * len(dataset) < len(held_out) < 0.31 * len(dataset)

    def keys_of_part(part: PreferenceDataset) -> dict[str, set[object]]:
        indices = {index for example in part.examples for index in example.reply_indices}
        replies = [dataset.replies[index] for index in indices]
        return {
            "prompt": {reply.prompt_ids for reply in replies},
            "conversation": {reply.conversation for reply in replies},
            "rater": set(part.raters),
            "reply": {reply.turn_id for reply in replies},
        }

    one, other = keys_of_part(train), keys_of_part(held_out)
    assert {name: one[name] & other[name] for name in one} == {name: set() for name in one}


def test_held_out_selection_depends_on_the_seed_only() -> None:
    dataset = make_dataset(100)
    assert select_held_out(dataset, 0.2, 1) == select_held_out(dataset, 0.2, 1) != select_held_out(dataset, 0.2, 2)


def test_dominant_rater_does_not_connect_replies() -> None:
    dataset = make_dataset(100)
    labels = tuple(BinaryLabel(label.reply, label.value, rater="HUMAN/dominant") for label in dataset.labels)
    held_out_indices = select_held_out(PreferenceDataset(dataset.replies, (), labels), 0.2, 0)
    assert 10 <= len(held_out_indices) <= 30


def test_fully_connected_dataset_has_no_held_out_part() -> None:
    dataset = make_dataset(40)
    same_prompt = tuple(Reply(reply.turn_id, (1, 2), reply.output_ids) for reply in dataset.replies)
    assert select_held_out(PreferenceDataset(same_prompt, (), dataset.labels), 0.2, 0) == set()


def test_held_out_share_counts_examples_not_replies() -> None:
    dataset = make_dataset(100)
    unlabelled = tuple(Reply(f"s{number}", (number,), (1,)) for number in range(900))
    held_out_indices = select_held_out(PreferenceDataset(dataset.replies + unlabelled, (), dataset.labels), 0.2, 0)
    labelled = set(itertools.chain.from_iterable(example.reply_indices for example in dataset.examples))
    assert 10 <= len(held_out_indices & labelled) <= 30
