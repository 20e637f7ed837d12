"""Algorithm settings: the defaults of losses, and what must not be combined."""

import pytest
from pydantic import TypeAdapter

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import GiGPOConfig, GRPOConfig, PolicyGradientConfig, PPOConfig
from alignment.config.preference_algorithms import DPOConfig
from alignment.config.rewards import RewardsConfig

ALGORITHMS: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_gspo_and_sapo_have_the_defaults_of_their_papers(name: str) -> None:
    gspo = ALGORITHMS.validate_json(f'{{"type": "{name}", "loss": "gspo"}}')
    assert isinstance(gspo, PolicyGradientConfig)
    assert (gspo.clip_low, gspo.clip_high, gspo.aggregation) == (3e-4, 4e-4, "seq-mean-token-mean")
    sapo = ALGORITHMS.validate_python({"type": name, "loss": "sapo", "tau_neg": 1.2})
    assert isinstance(sapo, PolicyGradientConfig)
    assert (sapo.tau_pos, sapo.tau_neg, sapo.aggregation) == (1.0, 1.2, "seq-mean-token-mean")


def test_settings_take_precedence_over_the_defaults_of_a_loss() -> None:
    config = PPOConfig(loss="gspo", clip_low=0.01, aggregation="token-mean")
    assert (config.clip_low, config.clip_high, config.aggregation) == (0.01, 4e-4, "token-mean")
    assert PPOConfig().clip_low == GRPOConfig().clip_low == 0.2


def test_later_rewards_must_not_count_twice() -> None:
    rewards = RewardsConfig(discount=0.9)
    with pytest.raises(ValueError, match="Set one of them to 0"):
        rewards.check_credit(PPOConfig(turn_discount=0.5))
    rewards.check_credit(PPOConfig())
    rewards.check_credit(DPOConfig())
    RewardsConfig().check_credit(PPOConfig(turn_discount=0.5))
    with pytest.raises(ValueError, match="turn_discount to 0"):
        RewardsConfig(episode_credit="return").check_credit(PPOConfig(turn_discount=0.5))
    with pytest.raises(ValueError, match="turn_gae needs"):
        RewardsConfig().check_credit(PPOConfig(estimator="turn_gae"))
    RewardsConfig(episode_credit="return").check_credit(PPOConfig(estimator="turn_gae"))
    with pytest.raises(ValueError, match="gigpo needs"):
        RewardsConfig(episode_credit="return").check_credit(GiGPOConfig())
