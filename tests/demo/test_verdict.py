"""The demo fails where approval did not rise beyond doubt, or a reply was hurt, and says which."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from app.cli.output import Row
from demo import run
from demo.recompute_logprobs import LogprobReport
from demo.simulate import ClientStats
from demo.verdict import RunVerdict, judge_run

FITTING = LogprobReport(replies=2993, mislabelled=0, largest_distance=2e-5)


def make_rows(*approvals: tuple[int, int]) -> list[Row]:
    """Return the rows of v0, v1, … with these numbers of votes up and of all votes."""
    return [
        {
            "name": f"assistant@v{number}",
            "number": number,
            "state": "superseded",
            "serving": False,
            "live_at": float(number),
            "turns": rated,
            "rated": rated,
            "approval": up / rated if rated else None,
            "approval_low": 0.0 if rated else None,
            "approval_high": 1.0 if rated else None,
            "mean_length": 45.0,
            "alignment_delay": None,
            "parent": number - 1 if number else None,
            "reason": None,
            "created_at": float(number),
            "metrics": {},
            "timings": {},
        }
        for number, (up, rated) in enumerate(approvals)
    ]


LEARNED = make_rows((39, 100), (50, 100), (88, 100), (90, 100), (87, 100), (91, 100), (56, 66))
UNCLEAR = make_rows((39, 100), (40, 100), (41, 100), (42, 100), (41, 100), (43, 100))


def judge(rows: list[Row], stats: ClientStats | None = None, logprobs: LogprobReport = FITTING) -> RunVerdict:
    return judge_run(stats or ClientStats(replies=2993), rows, logprobs)


def test_the_last_five_versions_are_pooled_so_that_one_of_them_may_be_unlucky() -> None:
    verdict = judge(LEARNED)
    assert (tuple(verdict.base), tuple(verdict.last), verdict.num_pooled) == ((39, 100), (412, 466), 5)
    assert verdict.objections == []
    [sentence] = verdict.sentences
    assert sentence.startswith("No reply was hurt, and approval rose: 39 % → 88 % (+49.4 points, 95 %: +39.")


def test_an_approval_that_may_not_have_risen_fails_the_run() -> None:
    verdict = judge(UNCLEAR)
    [objection] = verdict.objections
    assert objection.startswith("approval did not rise beyond doubt: 39 % → 41 % (+2.4 points, 95 %: -")
    assert verdict.sentences == [f"This run failed: {objection}."]


def test_an_approval_that_fell_fails_the_run() -> None:
    [objection] = judge(make_rows((90, 100), *[(30, 100)] * 5)).objections
    assert objection.startswith("approval did not rise")


@pytest.mark.parametrize("rows", [make_rows((0, 0), *[(9, 10)] * 5), make_rows((3, 10), *[(0, 0)] * 5)])
def test_approval_without_votes_has_not_risen(rows: list[Row]) -> None:
    [objection] = judge(rows).objections
    assert "no votes on" in objection


@pytest.mark.parametrize(
    ("stats", "objection"),
    [
        (ClientStats(refused=1), "refused replies: 1"),
        (ClientStats(incomplete=2), "cut replies: 2"),
        (ClientStats(mislabelled=3), "replies that name two versions: 3"),
    ],
)
@pytest.mark.parametrize("rows", [LEARNED, LEARNED[:2]], ids=["twenty updates", "one update"])
def test_a_hurt_reply_fails_the_run(rows: list[Row], stats: ClientStats, objection: str) -> None:
    assert judge(rows, stats).objections == [objection]


def test_a_reply_with_the_log_probs_of_another_version_fails_the_run() -> None:
    [objection] = judge(LEARNED, logprobs=LogprobReport(10, 4, 0.3)).objections
    assert objection == "replies whose log-probs do not fit the version they name: 4"


def test_a_run_fails_for_each_reason_and_says_all() -> None:
    assert len(judge(UNCLEAR, ClientStats(refused=1, incomplete=1)).objections) == 3


@pytest.mark.parametrize("num_updates", [0, 1, 4])
def test_fewer_than_five_versions_do_not_fail_for_their_approval(num_updates: int) -> None:
    verdict = judge(UNCLEAR[: num_updates + 1])
    assert (verdict.objections, verdict.num_pooled) == ([], num_updates)
    assert f"here {num_updates} served" in verdict.sentences[0]


def test_a_version_that_never_served_does_not_count() -> None:
    rows = [*LEARNED, *make_rows(*[(0, 100)] * 9)[len(LEARNED) :]]
    for row in rows[len(LEARNED) :]:
        row["live_at"] = None
    assert judge(rows) == judge(LEARNED)


def test_the_report_of_a_run_without_a_release_has_no_figures_to_spread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    console = Console(width=200, file=StringIO(), record=True)
    monkeypatch.setattr(run, "console", console)
    rows = make_rows((0, 0))
    run.report(ClientStats(), rows, FITTING, judge(rows))
    run.plot(rows, tmp_path / "demo.png")
    text = console.export_text()
    assert "trained → served" in text and "no votes on v0 and the last versions" in text
