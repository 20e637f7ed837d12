"""Experiments export versions and continue from them."""

from dataclasses import replace
from pathlib import Path

from alignment.release.canary import CanaryConfig
from demo.train import MODEL
from tests.benchmarks.canary_results import RatedTurn, decisive_at
from tests.benchmarks.learning import RUNS
from tests.support.offline.experiment import Experiment, ExperimentConfig

CONFIG: ExperimentConfig = replace(RUNS["PPO, running baseline"], replies_per_update=16)


def test_experiment_continues_from_an_exported_version(tmp_path: Path) -> None:
    experiment, other = Experiment(MODEL, CONFIG), Experiment(MODEL, replace(CONFIG, mistake_share=1.0))
    before = other.probe()
    assert experiment.run_update().refused is None
    experiment.export(tmp_path / "exported")
    other.restore(tmp_path / "exported")
    assert other.probe() == experiment.probe() != before


def test_decisive_at_returns_the_feedback_that_decided_a_canary() -> None:
    config = CanaryConfig(share=0.5)
    turns = [RatedTurn(float(time), f"user-{time}", time % 2 == 0, 1.0 if time % 2 else -1.0) for time in range(60)]
    decisive = decisive_at(config, turns, "canary.ended")
    assert decisive is not None and 4 < decisive < 30
    assert decisive_at(config, turns[: int(decisive)], "canary.ended") is None
    assert decisive_at(config, turns, "deployment.deployed") is None
    two_raters = [turn._replace(rater=f"user-{turn.candidate}") for turn in turns]
    assert decisive_at(config, two_raters, "canary.ended") is None, "feedback of one rater counts once"
