"""A policy's own settings replace the deployment's value by value, and each mistake in them is one clear sentence."""

from typing import Any

import pytest

from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from app.core.errors import BadRequest
from app.core.settings import Settings
from app.models import Policy
from app.policies.override_checks import merge
from app.policies.overrides import SHARED, Own, effective_settings, own_values, set_own_values

DEPLOYMENT = Settings(
    algorithm={"type": "ppo", "kl_coef": 0.02},
    trainer={"batch_size": 24, "optim": {"lr": 1e-3, "weight_decay": 0.1}},
    release={"canary": {"share": 0.05}},
    rollouts={"group_sampling": {"extra_replies": 3, "tokens_per_hour": 500}},
)


def read_back(own: Own) -> Policy:
    """Return a policy with these values as the database returns it: None instead of SQL's NULL."""
    policy = Policy(name="shop")
    set_own_values(policy, own)
    columns = {name: getattr(policy, name) for name in ("settings", "rewards", "rollouts", "canary", "shadow")}
    return Policy(name="shop", **{name: value if isinstance(value, dict) else None for name, value in columns.items()})


def effective(own: Own, settings: Settings = DEPLOYMENT) -> Settings:
    return effective_settings(read_back(merge({}, own, settings)), settings)


def test_policy_without_own_settings_has_the_deployments() -> None:
    assert effective_settings(Policy(name="shop"), DEPLOYMENT) is DEPLOYMENT


def test_own_values_replace_the_deployments_one_by_one() -> None:
    changed = effective({"trainer": {"optim": {"lr": 2e-3}, "max_batch_size": 32}})
    assert (changed.trainer.optim.lr, changed.trainer.optim.weight_decay) == (2e-3, 0.1)
    assert (changed.trainer.batch_size, changed.trainer.max_batch_size) == (24, 32)
    assert changed.is_set("trainer.optim.lr") and not changed.is_set("trainer.optim.eps")
    assert changed.algorithm is DEPLOYMENT.algorithm and changed.engine is DEPLOYMENT.engine


def test_algorithm_of_another_type_stands_alone_and_one_of_the_same_type_does_not() -> None:
    assert effective({"algorithm": "grpo"}).algorithm == GRPOConfig(epochs=3)
    assert effective({"algorithm": {"clip_low": 0.1}}).algorithm == PPOConfig(epochs=3, kl_coef=0.02, clip_low=0.1)


def test_stages_of_a_release_can_be_turned_off_and_changed() -> None:
    assert effective({"release": {"canary": False}}).release.canary is None
    assert effective({"release": {"canary": {"share": 0.5}}}).release.canary.share == 0.5  # type: ignore[union-attr]
    assert effective({"rollouts": {"in_flight": 1}}).rollouts.group_sampling.extra_replies == 3


def test_changed_deployment_changes_what_is_not_the_policys_own() -> None:
    own: Own = {"trainer": {"batch_size": 16}}
    assert effective(own).trainer.optim.lr == 1e-3
    other = DEPLOYMENT.replace({"trainer.optim.lr": 5e-4})
    assert (effective(own, other).trainer.optim.lr, effective(own, other).trainer.batch_size) == (5e-4, 16)


def test_null_removes_a_value_and_another_type_all_values_of_the_algorithm() -> None:
    own = merge({}, {"algorithm": {"type": "kto", "beta": 0.3}, "trainer": {"optim": {"lr": 1e-4}}}, DEPLOYMENT)
    assert merge(own, {"trainer": {"optim": {"lr": None}}}, DEPLOYMENT) == {"algorithm": own["algorithm"]}
    assert merge(own, {"algorithm": {"beta": None}}, DEPLOYMENT)["algorithm"] == {"type": "kto"}
    assert merge(own, {"algorithm": "dpo"}, DEPLOYMENT)["algorithm"] == {"type": "dpo"}
    assert "algorithm" not in merge(own, {"algorithm": None}, DEPLOYMENT)


def test_what_is_stored_is_what_was_merged() -> None:
    own: Own = {
        "algorithm": {"type": "kto"},
        "trainer": {"batch_size": 8},
        "rewards": {"discount": 0.5},
        "rollouts": {"in_flight": 1},
        "release": {"gates": [], "canary": {"share": 0.2}, "shadow": False},
    }
    assert own_values(read_back(own)) == own


@pytest.mark.parametrize(
    ("own", "param", "sentence"),
    [
        ({"trainer": {"batchsize": 8}}, "trainer.batchsize", "is not a setting; did you mean trainer.batch_size"),
        ({"trainer": {"learning_rate": 1e-3}}, "trainer.learning_rate", "is not a setting"),
        ({"trainr": {"batch_size": 8}}, "trainr.batch_size", "did you mean trainer.batch_size"),
        ({"trainer": {"lora": {"r": 4}}}, "trainer.lora.r", "launched for one shape of adapter"),
        ({"model": "Qwen/Qwen3-8B"}, "model", "it cannot differ between policies"),
        ({"raters": {"trust": False}}, "raters.trust", "it cannot differ between policies"),
        ({"rollouts": {"verifiers": {"a": "os:getcwd"}}}, "rollouts.verifiers.a", "the deployment's own code"),
        ({"trainer": {"batch_size": "24"}}, "trainer.batch_size", "it must be a whole number without quotes"),
        ({"trainer": {"kl_guard": True}}, "trainer.kl_guard", "it must be a number (it is true)"),
        ({"algorithm": {"type": "kto", "betta": 1}}, "settings", "did you mean algorithm.beta?"),
        ({"algorithm": {"type": "kto", "clip_lo": 1}}, "settings", "known are epochs, minibatches, max_kl, beta"),
        ({"trainer": 5}, "trainer", "it must be a table"),
        ({"algorithm": {"type": "grpo", "lam": 0.9}}, "settings", 'algorithm.lam does not belong to type = "grpo"'),
        ({"algorithm": "gropo"}, "settings", "there is no algorithm 'gropo'"),
        ({"algorithm": "os.path:join"}, "algorithm", "only the deployment's own settings may name code"),
        ({"algorithm": {"loss": "os.path:join"}}, "algorithm.loss", "only the deployment's own settings may name code"),
        ({"algorithm": {"epochs": 1000}}, "algorithm.epochs", "at most 64 steps"),
        ({"trainer": {"batch_size": 1000}}, "trainer.max_batch_size", "4000 samples, and the deployment allows 96"),
        ({"trainer": {"kl_target": 0.5}}, "settings", "trainer.kl_target (0.5) must be below trainer.kl_guard (0.05)"),
        (
            {"algorithm": {"turn_discount": 0.5}, "rewards": {"discount": 0.5}},
            "settings",
            "Set one of them to 0",
        ),
        (
            {"rewards": {"sources": [{"type": "rule", "name": "a", "function": "os:getcwd"}, {"type": "explicit"}]}},
            "rewards.sources.0.function",
            "only the deployment's own settings may name code",
        ),
        ({"rollouts": {"in_flight": 99}}, "rollouts.in_flight", "more than the deployment's"),
        (
            {"release": {"gates": [{"type": "function", "name": "g", "function": "os:getcwd"}]}},
            "release.gates.0.function",
            "only the deployment's own settings may name code",
        ),
    ],
)
def test_mistake_is_one_sentence_that_names_the_setting(own: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(BadRequest) as raised:
        merge({}, own, DEPLOYMENT)
    assert raised.value.param == param
    assert sentence in raised.value.message and "\n" not in raised.value.message


def test_rewards_may_keep_the_deployments_own_code() -> None:
    source = {"type": "rule", "name": "a", "function": "os:getcwd"}
    settings = DEPLOYMENT.replace({"rewards": {"sources": [{"type": "explicit"}, source]}})
    assert effective({"rewards": {"discount": 0.5}}, settings).rewards.discount == 0.5


def test_shared_settings_exist() -> None:
    for path in SHARED:
        value: Any = Settings()
        for name in path.split("."):
            value = getattr(value, name)
