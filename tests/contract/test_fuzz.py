"""`make fuzz` reports what it finds, and goes on where it stopped."""

from pathlib import Path

import pytest

from tests.benchmarks.results import read_rows
from tests.contract import fuzz
from tests.contract.harness import ContractHarness
from tests.contract.test_hostile_bodies import ROUTES, check_body

BROKEN = "/v1/feedback"


def test_failures_are_recorded_and_the_next_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_route(harness: ContractHarness, method: str, path: str, body: bytes, kind: str) -> None:
        check_body(harness, method, path, body, kind)
        assert path != BROKEN, "a server error"

    monkeypatch.setattr("tests.contract.fuzz.check_body", break_route)
    monkeypatch.setitem(fuzz.EXAMPLES, "bodies", 1)
    out = tmp_path / "fuzz.jsonl"
    arguments = ["--parts", "bodies", "--out", str(out), "--cases"]
    for further in (False, False, True):
        cases = read_rows(out)[0]["cases"] + 1 if further else 1
        with pytest.raises(SystemExit) as exit:
            fuzz.main([*arguments, str(cases)])
        assert exit.value.code == 1
    rows = read_rows(out)
    assert [row["seed"] for row in rows] == [1, 2]
    for row in rows:
        [failure] = row["failures"]
        assert failure["check"] == f"POST {BROKEN}" and "a server error" in failure["message"]
        assert len(row["routes"]) >= len(ROUTES) - 5 and row["cases"] > len(ROUTES)
    assert "bodies:2 POST /v1/feedback" in capsys.readouterr().out
