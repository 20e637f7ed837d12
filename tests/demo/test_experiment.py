"""What was taught is written whole, and can be gone on from."""

from dataclasses import replace
from pathlib import Path

from alignment.release.canary import CanaryConfig
from demo.offline.experiment import Course, Study
from demo.train import MODEL
from tests.benchmarks.canary_readings import Word, clear_at
from tests.benchmarks.learning import COURSES

LESSON: Course = replace(COURSES["PPO, running baseline"], replies=16)


def test_a_version_that_was_exported_is_gone_on_from(tmp_path: Path) -> None:
    study, other = Study(MODEL, LESSON), Study(MODEL, replace(LESSON, slips=1.0))
    before = other.probe()
    assert study.round().refused is None
    study.export(tmp_path / "taught")
    other.go_on_from(tmp_path / "taught")
    assert other.probe() == study.probe() != before


def test_the_thumb_that_made_a_canarys_end_clear_is_found() -> None:
    config = CanaryConfig(share=0.5)
    words = [Word(float(at), f"user-{at}", at % 2 == 0, 1.0 if at % 2 else -1.0) for at in range(60)]
    clear = clear_at(config, words, "canary ended")
    assert clear is not None and 4 < clear < 30
    assert clear_at(config, words[: int(clear)], "canary ended") is None
    assert clear_at(config, words, "deploy") is None
    again = [word._replace(rater=f"user-{word.candidate}") for word in words]
    assert clear_at(config, again, "canary ended") is None, "one voice is one vote"
