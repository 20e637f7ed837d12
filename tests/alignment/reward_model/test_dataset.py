"""Words travel whole, and nothing that could give an answer away is on both sides of a split."""

import itertools

import pytest

from alignment.reward_model.dataset import BinaryLabel, Pair, PreferenceDataset, Reply, held_out, split
from tests.alignment.reward_model.conftest import heard


def test_words_read_back_as_they_were_written() -> None:
    words = heard(3, 2)
    assert PreferenceDataset.from_bytes(words.to_bytes()) == words
    assert len(words) == 5 and words.raters == {"HUMAN/0", "HUMAN/1", "HUMAN/2", "HUMAN/p0", "HUMAN/p1"}


def tangled(count: int = 300) -> PreferenceDataset:
    """Prompts that come again, conversations of three turns, raters of two of them, pairs over one prompt."""
    replies = tuple(
        Reply(f"t{number}", (number // 2 if number % 10 == 0 else 1000 + number,), (number,), f"c{number // 3}")
        for number in range(count)
    )
    thumbs = tuple(BinaryLabel(number, (-1.0) ** number, rater=f"HUMAN/{number // 6}") for number in range(count))
    return PreferenceDataset(replies, (Pair(0, 10), Pair(31, 60)), thumbs)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_fitted_on_that_gives_a_held_out_answer_away(seed: int) -> None:
    words = tangled()
    out = held_out(words, 0.2, seed)
    taught, asked = split(words, out)
    assert len(taught) + len(asked) == len(words)
    assert 0.1 * len(words) < len(asked) < 0.31 * len(words)

    def sides(part: PreferenceDataset) -> dict[str, set[object]]:
        places = {place for word in part.words for place in word.about}
        told = [words.replies[place] for place in places]
        return {
            "prompt": {reply.prompt_ids for reply in told},
            "conversation": {reply.conversation for reply in told},
            "rater": set(part.raters),
            "reply": {reply.turn_id for reply in told},
        }

    one, other = sides(taught), sides(asked)
    assert {name: one[name] & other[name] for name in one} == {name: set() for name in one}


def test_the_choice_is_the_same_again_and_another_with_another_seed() -> None:
    words = heard(100)
    assert held_out(words, 0.2, 1) == held_out(words, 0.2, 1) != held_out(words, 0.2, 2)


def test_one_who_says_most_of_it_ties_nothing_together() -> None:
    words = heard(100)
    loud = tuple(BinaryLabel(thumb.reply, thumb.value, rater="HUMAN/loud") for thumb in words.thumbs)
    out = held_out(PreferenceDataset(words.replies, (), loud), 0.2, 0)
    assert 10 <= len(out) <= 30


def test_where_all_is_tied_together_nothing_is_held_out() -> None:
    words = heard(40)
    alike = tuple(Reply(reply.turn_id, (1, 2), reply.output_ids) for reply in words.replies)
    assert held_out(PreferenceDataset(alike, (), words.thumbs), 0.2, 0) == set()


def test_a_share_of_words_and_not_of_replies_is_held_out() -> None:
    words = heard(100)
    silent = tuple(Reply(f"s{number}", (number,), (1,)) for number in range(900))
    out = held_out(PreferenceDataset(words.replies + silent, (), words.thumbs), 0.2, 0)
    spoken = set(itertools.chain.from_iterable(word.about for word in words.words))
    assert 10 <= len(out & spoken) <= 30
