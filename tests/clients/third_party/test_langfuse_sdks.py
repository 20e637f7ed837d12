"""Three generations of the `langfuse` package send scores and traces to the intake, by their configuration alone."""

import json
from typing import Any

import pytest
from sqlalchemy import select

from app.core.settings import Settings
from app.feedback.effective import is_effective
from app.main import create_app
from app.models import Feedback
from tests.clients.third_party.environments import HERE, run_program
from tests.support.deployment import Harness
from tests.support.faulty_api import error_response
from tests.support.scripted_engine import ScriptedEngine, serve

GENERATIONS = ("langfuse_3", "langfuse_4", "langfuse_5")
PROGRAM = "../shared/langfuse_scores.py"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace({"langfuse.intake": True})


def run(generation: str, url: str, key: str) -> dict[str, Any]:
    done = run_program(generation, PROGRAM, f"{url}/v1", key)
    assert done.returncode == 0 and done.stdout, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


async def effective(harness: Harness) -> list[tuple[str, Any, str | None]]:
    query = select(Feedback.kind, Feedback.raw_value, Feedback.comment).where(is_effective()).order_by(Feedback.seq)
    async with harness.db.read() as session:
        return [(kind, value, comment) for kind, value, comment in await session.execute(query)]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installing the environment is part of it
@pytest.mark.parametrize("generation", GENERATIONS)
async def test_scores_are_recorded_changed_and_deleted(
    generation: str, harness: Harness, scripted: ScriptedEngine, live_url: str
) -> None:
    report = run(generation, live_url, harness.key)
    assert report["authenticated"] is True and report["logged"] == []
    [fault] = report["logged_of_fault"]
    assert ("BOOLEAN" if generation == "langfuse_5" else "Bad request") in fault
    assert await effective(harness) == [("binary", False, "On second thoughts"), ("categorical", "friendly", None)]
    rows = await harness.all(Feedback)
    assert {row.turn_id for row in rows} == {report["completion_id"]}
    assert {row.kind for row in rows} == {"binary", "categorical", "withdrawal"}
    [unmatched] = (await harness.api.get("/v1/status")).json()["unmatched_votes"]
    assert (unmatched["reason"], unmatched["num_votes"]) == ("unknown_reply", 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("generation", GENERATIONS)
async def test_score_is_sent_again_after_an_error_of_the_server(
    generation: str, harness: Harness, scripted: ScriptedEngine
) -> None:
    app = create_app(harness.settings)
    failed: list[str] = []

    async def fail_first(scope: Any, receive: Any, send: Any) -> None:
        """Answer the first request with scores by an error."""
        if scope.get("path") in ("/api/public/scores", "/api/public/ingestion") and not failed:
            failed.append(scope["path"])
            await error_response(503)(scope, receive, send)
        else:
            await app(scope, receive, send)

    with serve(fail_first, lifespan="on") as url:
        report = run(generation, url, harness.key)
    assert failed and report["logged"] == []
    assert await effective(harness) == [("binary", False, "On second thoughts"), ("categorical", "friendly", None)]


def test_pins_are_of_three_generations() -> None:
    pins = [(HERE / name / "requirements.txt").read_text() for name in GENERATIONS]
    versions = [line for text in pins for line in text.splitlines() if line.startswith("langfuse==")]
    assert [version.partition("==")[2].partition(".")[0] for version in versions] == ["3", "4", "5"]
