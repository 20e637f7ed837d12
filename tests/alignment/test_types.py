"""Samples are validated, and batches are serialised without loss."""

import math
from dataclasses import replace
from typing import Any

import pytest

from alignment.errors import MisalignedSample, NoVariance
from alignment.types import Sample, check_variance

GOOD = Sample("turn-1", (1, 5), (9, 2), (-0.1, -1.3), 1.0, 3, 0.7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": (-0.1,)}, "2 tokens but 1 log-probs"),
        ({"output_ids": (), "logprobs": ()}, "no output"),
        ({"prompt_ids": ()}, "no prompt"),
        ({"logprobs": (-0.1, math.nan)}, "not finite"),
        ({"logprobs": (-0.1, -math.inf)}, "not finite"),
        ({"reward": math.nan}, "reward"),
        ({"temperature": 0.0}, "temperature"),
        ({"weight": 0.0}, "weight"),
        ({"weight": math.inf}, "weight"),
    ],
)
def test_inconsistent_sample_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MisalignedSample, match=message):
        replace(GOOD, **change)


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 1.0, 1.0]])
def test_rewards_without_variance_are_rejected(rewards: list[float]) -> None:
    with pytest.raises(NoVariance):
        check_variance(rewards)


def test_different_rewards_are_accepted() -> None:
    check_variance([1.0, -1.0])
