"""Tests of the learning-rate schedule."""

from typing import Any

import pytest

from alignment.config.trainer import OptimConfig
from alignment.trainer.optimizer import learning_rate


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, {0: 1.0, 99: 1.0}),
        ({"warmup_steps": 4}, {0: 0.25, 3: 1.0, 50: 1.0}),
        ({"schedule": "linear", "total_steps": 10, "final_share": 0.0}, {0: 1.0, 5: 0.5, 10: 0.0, 90: 0.0}),
        ({"schedule": "cosine", "total_steps": 12, "warmup_steps": 2, "final_share": 0.2}, {1: 1.0, 7: 0.6, 12: 0.2}),
    ],
)
def test_learning_rate_examples(settings: dict[str, Any], rates: dict[int, float]) -> None:
    config = OptimConfig(lr=1.0, **settings)
    assert {step: learning_rate(config, step) for step in rates} == pytest.approx(rates)


def test_schedule_requires_total_steps() -> None:
    with pytest.raises(ValueError, match="total_steps"):
        OptimConfig(schedule="cosine")
