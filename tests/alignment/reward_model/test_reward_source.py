"""A reward model needs another reward source, and human feedback has priority over it."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from alignment.config.rewards import LEARNED, RewardModelSource, RewardsConfig
from alignment.signals.combine_rewards import Signal, combine_rewards, preference_pairs
from app.core.settings import REPOSITORY

WITH_REWARD_MODEL = RewardsConfig.model_validate({"sources": [{"type": "explicit"}, {"type": "learned"}]})


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([{"type": "learned"}], "cannot be the only one"),
        ([{"type": "learned"}, {"type": "explicit", "weight": 0}], "cannot be the only one"),
        ([{"type": "explicit"}, {"type": "learned"}, {"type": "learned"}], "their names must be unique"),
        ([{"type": "explicit"}, {"type": "learned", "name": "mine"}], "Input should be 'learned'"),
        ([{"type": "explicit"}, {"type": "rule", "name": "learned", "function": "ended"}], "source of that type"),
        ([{"type": "explicit"}, {"type": "learned", "min_agreement": 0.3}], "greater than or equal to 0.5"),
        ([{"type": "explicit"}, {"type": "learned", "min_feedback": 1}], "greater than or equal to 2"),
    ],
)
def test_invalid_source_lists_are_rejected(sources: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardsConfig.model_validate({"sources": sources})


def test_defaults_match_the_documentation() -> None:
    text = (REPOSITORY / "docs" / "rewards.md").read_text()
    [example] = re.findall(r"```\n(\{\"type\": \"learned\".*?)```", text, re.DOTALL)
    source = RewardModelSource.model_validate(json.loads(example))
    assert source == RewardModelSource() == WITH_REWARD_MODEL.reward_model
    assert RewardsConfig().reward_model is None


def learned(value: float, weight: float = 1.0) -> Signal:
    return Signal(LEARNED, value, weight)


def combined(signals: list[Signal], config: RewardsConfig) -> float | None:
    """Return the combined reward without its weight."""
    result = combine_rewards(signals, config)
    return result and result.value


def person(value: float, weight: float = 1.0) -> Signal:
    return Signal("explicit", value, weight, person=True)


def test_reward_model_alone_determines_the_reward() -> None:
    assert combine_rewards([learned(0.6, 0.3)], WITH_REWARD_MODEL) == (0.6, 0.3), "its weight is not in the reward"


@pytest.mark.parametrize("score", [1.0, 0.6, 0.001, -0.6])
def test_score_changes_nothing_about_a_persons_feedback(score: float) -> None:
    """A vote of 1.0 was 0.91 with a weak score that agrees, and 0.89 with one near 0."""
    assert combine_rewards([person(1.0, 0.4), learned(score, 0.9)], WITH_REWARD_MODEL) == (1.0, 0.4)


def test_reward_model_that_contradicts_a_person_has_no_weight() -> None:
    assert combined([person(-0.2), learned(1.0)], WITH_REWARD_MODEL) == -0.2
    assert combined([person(-0.1), person(1.0), learned(1.0)], WITH_REWARD_MODEL) == pytest.approx(0.45)


def test_human_feedback_outside_the_sources_still_overrules_the_reward_model() -> None:
    """Human feedback counts even if the policy is trained on rules and the reward model only."""
    config = RewardsConfig.model_validate(
        {"sources": [{"type": "rule", "name": "ended", "function": "ended"}, {"type": "learned"}]}
    )
    assert combined([person(-1.0), learned(0.9)], config) is None
    assert combined([person(1.0), learned(0.9)], config) == 0.9


def test_automated_and_zero_weight_signals_do_not_overrule_the_reward_model() -> None:
    judge = RewardsConfig.model_validate(
        {"sources": [{"type": "explicit"}, {"type": "rule", "name": "r", "function": "ended"}, {"type": "learned"}]}
    )
    assert combined([Signal("r", -1.0), learned(1.0)], judge) == 0.0
    assert combined([person(-1.0, weight=0.0), learned(1.0)], judge) == 1.0


def test_ranking_gives_all_pairs_without_ties() -> None:
    assert preference_pairs({"a": 0.0, "b": 1.0, "c": -1.0}) == [("b", "a"), ("b", "c"), ("a", "c")]
    assert preference_pairs({"a": 0.0, "b": 0.0}) == []
