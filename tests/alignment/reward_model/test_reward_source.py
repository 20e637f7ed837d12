"""A reward model among the sources: never alone, and nothing against a person."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from alignment.config.rewards import LEARNED, LearnedSource, RewardsConfig, Signal, combine, preferred
from app.core.settings import REPOSITORY

LISTENING = RewardsConfig.model_validate({"sources": [{"type": "explicit"}, {"type": "learned"}]})


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ([{"type": "learned"}], "cannot be the only one"),
        ([{"type": "learned"}, {"type": "explicit", "weight": 0}], "cannot be the only one"),
        ([{"type": "explicit"}, {"type": "learned"}, {"type": "learned"}], "a name of its own"),
        ([{"type": "explicit"}, {"type": "learned", "name": "mine"}], "Input should be 'learned'"),
        ([{"type": "explicit"}, {"type": "rule", "name": "learned", "function": "ended"}], "source of that type"),
        ([{"type": "explicit"}, {"type": "learned", "min_agreement": 0.3}], "greater than or equal to 0.5"),
        ([{"type": "explicit"}, {"type": "learned", "min_words": 1}], "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_is_refused(sources: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RewardsConfig.model_validate({"sources": sources})


def test_the_defaults_are_those_of_the_docs() -> None:
    text = (REPOSITORY / "docs" / "rewards.md").read_text()
    [told] = re.findall(r"```\n(\{\"type\": \"learned\".*?)```", text, re.DOTALL)
    assert LearnedSource.model_validate(json.loads(told)) == LearnedSource() == LISTENING.learned
    assert RewardsConfig().learned is None


def learned(value: float) -> Signal:
    return Signal(LEARNED, value)


def person(value: float, weight: float = 1.0) -> Signal:
    return Signal("explicit", value, weight, person=True)


def test_alone_on_a_reply_its_word_is_what_there_is() -> None:
    assert combine([learned(0.6)], LISTENING) == 0.6


def test_beside_a_person_who_says_the_same_it_counts_a_little() -> None:
    # (1·1 + 0.5·0.25·0.6) / 1.125
    assert combine([person(1.0), learned(0.6)], LISTENING) == pytest.approx(1.075 / 1.125)


def test_against_a_person_it_counts_nothing_at_all() -> None:
    assert combine([person(-0.2), learned(1.0)], LISTENING) == -0.2
    assert combine([person(-0.1), person(1.0), learned(1.0)], LISTENING) == pytest.approx(0.45)


def test_against_a_person_whom_the_policy_does_not_listen_to_it_counts_nothing_either() -> None:
    """The words of people are on record even where a policy learns from rules and the model alone."""
    config = RewardsConfig.model_validate(
        {"sources": [{"type": "rule", "name": "ended", "function": "ended"}, {"type": "learned"}]}
    )
    assert combine([person(-1.0), learned(0.9)], config) is None
    assert combine([person(1.0), learned(0.9)], config) == 0.9


def test_machines_and_people_whom_nobody_believes_do_not_contradict_it() -> None:
    judge = RewardsConfig.model_validate(
        {"sources": [{"type": "explicit"}, {"type": "rule", "name": "r", "function": "ended"}, {"type": "learned"}]}
    )
    assert combine([Signal("r", -1.0), learned(1.0)], judge) == 0.0
    assert combine([person(-1.0, weight=0.0), learned(1.0)], judge) == 1.0


def test_an_order_is_all_its_pairs_and_a_tie_is_none() -> None:
    assert preferred({"a": 0.0, "b": 1.0, "c": -1.0}) == [("b", "a"), ("b", "c"), ("a", "c")]
    assert preferred({"a": 0.0, "b": 0.0}) == []
