"""The length that is asked for: its price, its sign, and what happens when replies drift out of it."""

import pytest
import torch

from alignment.algorithms.length_aware_ppo import LengthAwarePPO
from alignment.config.algorithm import LengthAwarePPOConfig
from alignment.signals.length_penalty import length_penalty, overlong_penalty
from alignment.types import UpdateReport
from tests.support.worked_batches import make_train_data, reply


@pytest.mark.parametrize(
    ("length", "penalty"), [(30, 0.0), (80, 0.0), (55, 0.0), (105, -0.25), (5, -0.25), (81, -0.0004), (400, -1.0)]
)
def test_length_penalty_is_quadratic_outside_the_range(length: int, penalty: float) -> None:
    assert length_penalty(length, 30, 80) == pytest.approx(penalty)


@pytest.mark.parametrize(("length", "penalty"), [(60, 0.0), (70, -0.5), (80, -1.0), (500, -1.0)])
def test_overlong_penalty_begins_in_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 80, 20) == penalty


def algorithm(**settings: object) -> LengthAwarePPO:
    return LengthAwarePPO(LengthAwarePPOConfig(whiten="off", **settings))  # type: ignore[arg-type]


def test_shaping_is_at_most_a_tenth_of_the_mean_reward() -> None:
    data = make_train_data([reply(1.0, 50), reply(-1.0, 50), reply(1.0, 105), reply(-1.0, 400)])
    ppo = algorithm()
    shaped_B = ppo.shape_rewards(data)
    torch.testing.assert_close(shaped_B, torch.tensor([1.0, -1.0, 1.0 - 0.1 * 0.25, -1.0 - 0.1]))
    metrics = ppo.get_metrics()
    assert metrics["reward_shaping/penalty_mean"] == pytest.approx(1.25 / 4)
    assert metrics["reward_shaping/out_of_range_fraction"] == 0.5
    assert metrics["reward_shaping/ratio"] == pytest.approx(0.1 * 1.25 / 4)


def after(ppo: LengthAwarePPO, *means: float) -> tuple[int, int]:
    for step, mean in enumerate(means):
        ppo.after_train_step(step, UpdateReport("b", step, {"response_length/mean": mean}))
    return ppo.shortest, ppo.longest


def test_drift_tightens_and_loosens_the_range() -> None:
    ppo = algorithm(drift_patience=3, drift_step=5)
    assert after(ppo, 90, 90) == (30, 80)
    assert after(ppo, 90) == (30, 75)
    assert after(ppo, 90) == (30, 70)
    assert after(ppo, 60) == (30, 75)
    assert after(ppo, 20, 20, 20) == (35, 75)


def test_range_never_closes() -> None:
    shortest, longest = after(algorithm(shortest=30, longest=36, drift_patience=1, drift_step=4), *[90.0] * 9)
    assert shortest < longest


def test_drift_state_is_restored() -> None:
    ppo, other = algorithm(drift_patience=1), algorithm(drift_patience=1)
    after(ppo, 90)
    other.load_state_dict(ppo.state_dict())
    assert (other.shortest, other.longest, other.drift) == (30, 78, 1)
