"""The first updates of each algorithm on the demo model have the recorded losses, KL, gradient norms and approval.

`learning_figures.json` holds the recorded figures. They have a tolerance, because the order of summation and therefore
the rounding depends on the machine.
"""

import json
from pathlib import Path

import pytest

from demo.train import MODEL
from tests.benchmarks.learning import RUNS
from tests.support.offline.experiment import Experiment

FIGURES = json.loads(Path(__file__).with_name("learning_figures.json").read_text())
FAST = ("GRPO", "DPO")
THREE_DEVIATIONS = 0.15  # of the approval of 96 replies, a third of which is liked
# 0 but for rounding: log-probabilities differ by 1e-7, and the metric doubles their sum over the tokens of a reply.
SUMMED_OVER_REPLIES = "rollout_corr/chi2_seq"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in sorted(FIGURES)]
)
def test_first_updates_have_the_recorded_figures(name: str) -> None:
    experiment = Experiment(MODEL, RUNS[name])
    for number, expected in enumerate(FIGURES[name]):
        update = experiment.run_update()
        assert update.samples == expected["samples"]
        if number:  # rounding has led to other replies, and their approval is that of other draws
            assert update.approval == pytest.approx(expected["approval"], abs=THREE_DEVIATIONS)
        else:
            assert update.approval == pytest.approx(expected["approval"], abs=0.02)
            figures = dict(expected["metrics"])
            assert update.metrics.get(SUMMED_OVER_REPLIES, 0.0) == pytest.approx(
                figures.pop(SUMMED_OVER_REPLIES, 0.0), abs=1e-4
            )
            metrics = {key: update.metrics[key] for key in figures}
            assert metrics == pytest.approx(figures, rel=1e-3, abs=1e-5)
