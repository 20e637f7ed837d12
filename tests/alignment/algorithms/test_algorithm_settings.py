"""Every setting of every built-in algorithm changes what an update computes: none is accepted and then ignored.

`epochs`, `minibatches` and `max_kl` are the trainer's (`tests/app/core/test_settings_are_read.py`).
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import BaseModel, TypeAdapter

from alignment.algorithms.base import RLAlgorithm, prepare_step
from alignment.algorithms.registry import ALGORITHMS, build
from alignment.config.algorithm import UpdateConfig
from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.functional.policy_loss_registry import TokenLoss, TokenLossInputs, register_policy_loss
from alignment.types import Sample, TrainData, UpdateReport
from app.core.settings.tree import models
from tests.support.settings import other_value
from tests.support.worked_batches import make_train_data, reduce_loss, reduce_value_loss, reply

STEPS = 4  # the drift control of length-aware PPO waits for several
# Rewards by group: two differ by less than `min_margin` of DPO, two by a little more.
REWARDS = ((1.0, 0.2), (-0.5, -0.54), (0.9, -0.7), (0.3, 0.37), (0.5, -0.2, 0.1))
LENGTHS = ((1, 8), (3, 5), (6, 4), (2, 7), (3, 4, 5))


class Scale(BaseModel):
    scale: float = 1.0


@register_policy_loss("scaled_for_tests", Scale)
def scaled(inputs: TokenLossInputs, params: Scale) -> TokenLoss:
    return TokenLoss(-params.scale * inputs.advantages_BT * inputs.logprobs_BT)


# What else is set, so that a setting matters: by name, for all algorithms that have it.
NEEDS: dict[str, dict[str, Any]] = {
    "loss_params": {"loss": "scaled_for_tests"},
    "tau_pos": {"loss": "sapo"},
    "tau_neg": {"loss": "sapo"},
    "horizon": {"aggregation": "seq-mean-token-sum-norm"},
    "kl_kind": {"kl_coef": 0.1},
    "kl_in": {"kl_coef": 0.1},
    "kl_control": {"kl_coef": 0.1},
    "kl_control.target": {"kl_coef": 0.1, "kl_control": {"target": 0.05}},
    "kl_control.horizon": {"kl_coef": 0.1, "kl_control": {"target": 0.01}},
    "correction.low": {"correction": {"mode": "mask"}},
    "gamma": {"estimator": "gae"},
    "lam": {"estimator": "gae", "gamma": 0.5},
    "value_clip": {"estimator": "gae"},
    "value_coef": {"estimator": "gae"},
    "shortest": {"shortest": 4, "longest": 6},
    "longest": {"shortest": 4, "longest": 6},
    "length_share": {"shortest": 4, "longest": 6},
    "drift_patience": {"shortest": 0, "longest": 4},
    "drift_step": {"shortest": 0, "longest": 4, "drift_patience": 1},
    "overlong_buffer": {"overlong_longest": 6},
}
# A value other than the default, where its type does not tell one that matters.
OTHER: dict[str, Any] = {
    "loss": "reinforce",
    "loss_params": {"scale": 2.0},
    "kl_control": {"target": 0.01},
    "overlong_longest": 6,
    "shortest": 2,
    "longest": 5,
    "drift_patience": 1,
    "desirable_weight": 3.0,
    "undesirable_weight": 3.0,
    "clip_c": 1.5,
}


def settings_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the type and the default of each setting of an algorithm, those of its tables included."""
    for name, field in kind.model_fields.items():
        if prefix or name not in ("type", *UpdateConfig.model_fields):
            tables = models(field.annotation)
            if not tables or field.default is None:
                yield f"{prefix}{name}", field.annotation, field.get_default(call_default_factory=True)
            for table in tables:
                yield from settings_of(table, f"{prefix}{name}.")


def batch_of(algorithm: RLAlgorithm, step: int) -> TrainData:
    """Return the samples that the algorithm selects, with what it needs of them, drawn by their place."""
    samples = [
        reply(
            reward,
            length,
            f"group {group}",
            conversation=f"talk {index}",
            turn_index=group,
            version=step + index,
            turn_return=index * reward,
            agent=("planner", "planner", "worker")[index],
        )
        for group, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True))
        for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    samples = [_with_lag(sample, index % 3) for index, sample in enumerate(samples)]
    selected = algorithm.select(samples)
    width = max(len(samples[index].output_ids) for index in selected)
    tensors = {name: tensor[selected, :width] for name, tensor in draws(step).items()}
    needed = {"rollout_logprobs_BT": True, "old_logprobs_BT": algorithm.needs_old_logprobs}
    needed |= {"ref_logprobs_BT": algorithm.needs_reference, "values_BT": algorithm.needs_critic}
    data = make_train_data([samples[index] for index in selected], **{name: tensors[name] for name in needed})
    for name, is_needed in needed.items():
        if not is_needed:
            setattr(data, name, None)
    return data


def _with_lag(sample: Sample, lag: int) -> Sample:
    return Sample(**{**vars(sample), "lag": lag})


@cache
def draws(step: int) -> dict[str, torch.Tensor]:
    """Return log-probs, values and entropies of eleven replies of eight tokens."""
    generator = torch.Generator().manual_seed(step)
    names = ("rollout_logprobs_BT", "old_logprobs_BT", "ref_logprobs_BT", "logprobs_BT", "values_BT", "entropy_BT")
    sampled = {name: torch.randn(11, 8, generator=generator, dtype=torch.float64) for name in names}
    return {name: x_BT if name == "values_BT" else -x_BT.abs() for name, x_BT in sampled.items()}


def observe(config: AlgorithmConfig) -> list[float]:
    """Return the losses of a few updates on the same samples."""
    algorithm, seen = build(config), []
    for step in range(STEPS):
        data = batch_of(algorithm, step)
        prepare_step(algorithm, step, data)
        count, width = data.response_mask_BT.shape
        current = {name: tensor[:count, :width] for name, tensor in draws(step).items()}
        entropy_BT = current["entropy_BT"] if algorithm.needs_entropy else None
        seen.append(reduce_loss(algorithm, data, current["logprobs_BT"], entropy_BT=entropy_BT)[0].item())
        if algorithm.needs_critic:
            seen.append(reduce_value_loss(algorithm, data, current["entropy_BT"])["loss"])
        metrics = {"reference_kl": 0.05, "training/samples": float(count), "response_length/mean": 4.5}
        algorithm.after_train_step(step, UpdateReport("batch", step, metrics))
    assert all(map(math.isfinite, seen)), "a NaN differs from everything"
    return seen


CASES = {
    (name, path): (annotation, default)
    for name, algorithm in ALGORITHMS.items()
    for path, annotation, default in settings_of(algorithm.Config)
}


@pytest.mark.parametrize(("name", "path"), CASES)
def test_setting_changes_the_losses(name: str, path: str) -> None:
    annotation, default = CASES[name, path]
    fields = ALGORITHMS[name].Config.model_fields
    needs = {key: value for key, value in NEEDS.get(path, {}).items() if key in fields}
    other = OTHER[path] if path in OTHER else other_value(annotation, default)
    before = {"type": name, **needs}
    table, _, leaf = path.rpartition(".")
    after = before | ({table: {**before.get(table, {}), leaf: other}} if table else {leaf: other})
    parse = TypeAdapter[AlgorithmConfig](AlgorithmConfig).validate_python
    assert observe(parse(before)) != observe(parse(after)), f"{path} = {other!r} changes nothing"


def test_what_is_observed_is_the_same_for_the_same_settings() -> None:
    for algorithm in ALGORITHMS.values():
        config = algorithm.Config()
        assert observe(config) == observe(config)  # type: ignore[arg-type]
