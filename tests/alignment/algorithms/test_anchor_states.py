"""The states in which turns of episodes begin, as GiGPO compares them."""

from alignment.algorithms.anchor_states import find_anchor_states
from alignment.types import Sample
from tests.support.worked_batches import reply


def turn(
    episode: str, *prompt: int, group: str = "task", agent: str | None = None, state_key: str | None = None
) -> Sample:
    """Return a turn with the reply (5, 5)."""
    named = {"agent": agent, "state_key": state_key}
    return reply(0.0, 2, group, episode=episode, prompt_ids=prompt, turn_return=0.0, **named)


def same(samples: list[Sample]) -> list[set[int]]:
    """Return the sets of two or more samples in one state."""
    states = find_anchor_states(samples)
    sets = [{index for index, other in enumerate(states) if other == state} for state in dict.fromkeys(states)]
    return [indices for indices in sets if len(indices) > 1]


def test_a_first_turn_is_in_the_state_of_its_whole_prompt() -> None:
    assert same([turn("a", 1, 2), turn("b", 1, 2), turn("c", 1, 3), turn("d", 2)]) == [{0, 1}]


def test_a_later_turn_is_in_the_state_of_its_newest_observation() -> None:
    samples = [
        *(turn("a", 1), turn("a", 1, 5, 5, 7), turn("a", 1, 5, 5, 7, 5, 5, 8)),
        *(turn("b", 1), turn("b", 1, 5, 5, 8)),  # comes to 8 one turn earlier
        *(turn("c", 2), turn("c", 2, 5, 5, 7)),  # begins elsewhere, and comes to 7
    ]
    assert same(samples) == [{0, 3}, {1, 6}, {2, 4}]
    assert same(list(reversed(samples))) == [{0, 5}, {2, 4}, {3, 6}]


def test_a_prompt_that_does_not_begin_with_an_earlier_turn_is_a_state_as_a_whole() -> None:
    # The second turn of b was rendered without the first reply; that of c repeats prompt and reply without more.
    samples = [turn("a", 1), turn("a", 1, 5, 5, 7), turn("b", 1), turn("b", 1, 7), turn("c", 1), turn("c", 1, 5, 5)]
    assert same(samples) == [{0, 2, 4}]
    assert same([turn("a", 7), turn("b", 1), turn("b", 1, 5, 5, 7)]) == []  # the whole prompt, and an observation


def test_states_are_of_one_group_and_one_agent() -> None:
    assert same([turn("a", 1), turn("b", 1, group="other"), turn("c", 1, agent="worker"), turn("d", 1)]) == [{0, 3}]


def test_a_reply_that_is_not_compared_by_its_return_is_in_a_state_of_its_own() -> None:
    assert same([reply(0.0, 1, "a"), reply(0.0, 1, "a"), turn("b", 1, group="a")]) == []


def test_a_turn_whose_state_is_named_is_in_that_state_whatever_it_has_seen() -> None:
    samples = [
        *(turn("a", 1, state_key="start"), turn("a", 1, 5, 5, 7, state_key="room")),
        *(turn("b", 2, state_key="start"), turn("b", 2, 5, 5, 8, state_key="room")),
        *(turn("c", 1), turn("c", 1, 5, 5, 7)),  # has named none: what it has seen is no name
        *(turn("d", 1), turn("d", 1, 5, 5, 9, state_key="room", agent="worker")),
        turn("e", 1, group="other", state_key="start"),
    ]
    assert same(samples) == [{0, 2}, {1, 3}, {4, 6}]


def test_observations_begin_after_turns_whose_state_is_named() -> None:
    assert same([turn("a", 1, state_key="x"), turn("a", 1, 5, 5, 7), turn("b", 2), turn("b", 2, 5, 5, 7)]) == [{1, 3}]
