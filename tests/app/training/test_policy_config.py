"""Settings of rewards are checked against the algorithm, in the deployment's settings and in requests."""

import pytest
from pydantic import ValidationError

from alignment.config.policy_gradient_algorithms import PPOConfig
from alignment.config.rewards import RewardsConfig
from app.core.errors import BadRequest
from app.core.settings import Settings
from app.training.policy_config import parse_rewards

CREDIT = PPOConfig(turn_discount=0.5)


def test_settings_with_double_credit_are_refused() -> None:
    with pytest.raises(ValidationError, match="Set one of them to 0: keep discount"):
        Settings(algorithm=CREDIT, rewards=RewardsConfig(discount=0.9))


def test_rewards_of_a_policy_with_double_credit_are_refused() -> None:
    with pytest.raises(BadRequest, match="keep discount") as raised:
        parse_rewards({"discount": 0.9}, Settings(), CREDIT)
    assert raised.value.param == "discount"
    assert parse_rewards({"discount": 0.9}, Settings(), PPOConfig()).discount == 0.9
