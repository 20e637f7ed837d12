"""Settings with a format of their own, and the errors for invalid values."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from app.core.settings import Settings


def test_defaults_are_jsonl_no_length_range_and_closed_metrics() -> None:
    settings = Settings(home=Path("/nowhere"))
    assert (settings.trackers, settings.length_range, settings.metrics_open) == (["jsonl"], None, False)
    assert settings.metrics_dir == Path("/nowhere/metrics")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("30,80", (30, 80)), (" 30, 80 ", (30, 80)), ("[30, 80]", (30, 80)), ("0,1", (0, 1)), ("", None), (" ", None)],
)
def test_length_range_is_two_numbers(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: tuple[int, int] | None
) -> None:
    monkeypatch.setenv("ATTUNE_LENGTH_RANGE", value)
    assert Settings().length_range == expected


@pytest.mark.parametrize("value", ["80,30", "30,30", "-1,5", "30", "30,80,90", "a,b", "30;80", "1.5,2"])
def test_invalid_length_range_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ATTUNE_LENGTH_RANGE", value)
    with pytest.raises(ValidationError, match="length_range"):
        Settings()


def test_blank_gates_are_no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_GATES", " ")
    assert Settings().gates == ()


def test_trackers_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_TRACKERS", '["tensorboard", "wandb"]')
    assert Settings().trackers == ["tensorboard", "wandb"]


def test_unknown_tracker_is_refused_with_the_known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_TRACKERS", '["jsonl", "mlflow"]')
    with pytest.raises(
        ValidationError, match=r"trackers.1\s+Input should be 'jsonl', 'tensorboard' or 'wandb'.*mlflow"
    ):
        Settings()
