"""What a version must pass: bounds of metrics, shares of right replies, and settings that make no sense."""

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from alignment.release.gates import Answers, Gate, MetricGate, PromptsGate

GATE: TypeAdapter[Gate] = TypeAdapter(Gate)
PROMPTS = {"type": "prompts", "name": "safety", "dataset": "red-team", "verifier": {"type": "exact"}}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"actor/entropy": 0.5}, None),
        ({"actor/entropy": 0.1}, None),
        ({"actor/entropy": 0.09}, "below 0.1"),
        ({"actor/entropy": 2.1}, "above 2"),
        ({"actor/entropy": math.nan}, "was not measured"),
        ({}, "was not measured"),
    ],
)
def test_a_metric_is_within_bounds_and_what_was_not_measured_is_not(metrics: dict[str, Any], said: str | None) -> None:
    why = MetricGate(name="entropy", metric="actor/entropy", at_least=0.1, at_most=2).refusal(metrics)
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize(
    ("candidate", "serving", "said"),
    [
        (Answers(9, 10, 40.0), Answers(10, 10, 40.0), None),
        (Answers(8, 10, 40.0), Answers(8, 10, 40.0), "less than 85.0%"),
        (Answers(90, 100, 40.0), Answers(99, 100, 40.0), None),
        (Answers(86, 100, 40.0), Answers(97, 100, 40.0), "against 97.0% of what serves"),
        (Answers(9, 10, 81.0), Answers(9, 10, 40.0), "2.02 times the length"),
        (Answers(9, 10, 19.0), Answers(9, 10, 40.0), "0.47 times the length"),
        (Answers(0, 0, 40.0), Answers(9, 10, 40.0), "nothing to say"),
    ],
)
def test_held_out_prompts_are_answered_well_enough(candidate: Answers, serving: Answers, said: str | None) -> None:
    gate = PromptsGate.model_validate(PROMPTS | {"at_least": 0.85, "most_drop": 0.1, "max_length_ratio": 2.0})
    why = gate.refusal(candidate, serving)
    assert why is None if said is None else said in (why or "")


@pytest.mark.parametrize(
    "told",
    [
        {"type": "metric", "name": "x", "metric": "actor/entropy"},
        PROMPTS,
        PROMPTS | {"at_least": 1.1},
        PROMPTS | {"at_least": 0.5, "verifier": {"type": "sense"}},
        {"type": "function", "name": "Not A Name", "function": "a:b"},
        {"type": "vote", "name": "x"},
    ],
)
def test_gates_that_make_no_sense_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GATE.validate_python(told)
