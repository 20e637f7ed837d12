"""Release gates: bounds of metrics, shares of right replies, and invalid settings."""

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from alignment.release.gates import Gate, MetricGate, PromptScores, PromptsGate

GATE: TypeAdapter[Gate] = TypeAdapter(Gate)
PROMPTS = {"type": "prompts", "name": "safety", "dataset": "red-team", "verifier": {"type": "exact"}}


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"actor/entropy": 0.5}, None),
        ({"actor/entropy": 0.1}, None),
        ({"actor/entropy": 0.09}, "below 0.1"),
        ({"actor/entropy": 2.1}, "above 2"),
        ({"actor/entropy": math.nan}, "was not measured"),
        ({}, "was not measured"),
    ],
)
def test_metric_gate_checks_bounds_and_missing_metrics(metrics: dict[str, Any], reason: str | None) -> None:
    actual_reason = MetricGate(name="entropy", metric="actor/entropy", at_least=0.1, at_most=2).rejection_reason(
        metrics
    )
    assert actual_reason is None if reason is None else reason in (actual_reason or "")


@pytest.mark.parametrize(
    ("candidate", "serving", "reason"),
    [
        (PromptScores(9, 10, 40.0), PromptScores(10, 10, 40.0), None),
        (PromptScores(8, 10, 40.0), PromptScores(8, 10, 40.0), "less than 85.0%"),
        (PromptScores(90, 100, 40.0), PromptScores(99, 100, 40.0), None),
        (PromptScores(86, 100, 40.0), PromptScores(97, 100, 40.0), "against 97.0% of the serving version"),
        (PromptScores(9, 10, 81.0), PromptScores(9, 10, 40.0), "2.02 times the length"),
        (PromptScores(9, 10, 19.0), PromptScores(9, 10, 40.0), "0.47 times the length"),
        (PromptScores(0, 0, 40.0), PromptScores(9, 10, 40.0), "scored no reply"),
    ],
)
def test_prompts_gate_checks_held_out_prompts(
    candidate: PromptScores, serving: PromptScores, reason: str | None
) -> None:
    gate = PromptsGate.model_validate(PROMPTS | {"at_least": 0.85, "max_drop": 0.1, "max_length_ratio": 2.0})
    actual_reason = gate.rejection_reason(candidate, serving)
    assert actual_reason is None if reason is None else reason in (actual_reason or "")


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "metric", "name": "x", "metric": "actor/entropy"},
        PROMPTS,
        PROMPTS | {"at_least": 1.1},
        PROMPTS | {"at_least": 0.5, "verifier": {"type": "sense"}},
        {"type": "function", "name": "Not A Name", "function": "a:b"},
        {"type": "vote", "name": "x"},
    ],
)
def test_invalid_gates_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GATE.validate_python(settings)
