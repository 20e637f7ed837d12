"""Settings that are told in a form of their own, and what is refused, with the reason."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from app.core.settings import Settings


def test_by_default_there_is_a_journal_no_range_and_a_closed_page() -> None:
    settings = Settings(home=Path("/nowhere"))
    assert (settings.trackers, settings.length_range, settings.metrics_open) == (["jsonl"], None, False)
    assert settings.metrics_dir == Path("/nowhere/metrics")


@pytest.mark.parametrize(
    ("said", "meant"),
    [("30,80", (30, 80)), (" 30, 80 ", (30, 80)), ("[30, 80]", (30, 80)), ("0,1", (0, 1)), ("", None), (" ", None)],
)
def test_a_range_is_two_numbers(monkeypatch: pytest.MonkeyPatch, said: str, meant: tuple[int, int] | None) -> None:
    monkeypatch.setenv("ATTUNE_LENGTH_RANGE", said)
    assert Settings().length_range == meant


@pytest.mark.parametrize("said", ["80,30", "30,30", "-1,5", "30", "30,80,90", "a,b", "30;80", "1.5,2"])
def test_anything_else_is_no_range(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("ATTUNE_LENGTH_RANGE", said)
    with pytest.raises(ValidationError, match="length_range"):
        Settings()


def test_trackers_are_named_as_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_TRACKERS", '["tensorboard", "wandb"]')
    assert Settings().trackers == ["tensorboard", "wandb"]


def test_an_unknown_tracker_is_refused_with_the_names_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_TRACKERS", '["jsonl", "mlflow"]')
    with pytest.raises(
        ValidationError, match=r"trackers.1\s+Input should be 'jsonl', 'tensorboard' or 'wandb'.*mlflow"
    ):
        Settings()
