"""The apps of docs/connect in the real Gradio, Streamlit, Chainlit and Bolt: thumbs pressed and taken back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.main import create_app
from app.models import Feedback, Turn
from tests.clients.third_party.environments import REPOSITORY, run_user_interface
from tests.docs.blocks import blocks
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PAGES = REPOSITORY / "docs" / "connect"
UP, DOWN = ["binary", 1.0], ["binary", -1.0]


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """Return SQLite's alone: a user interface cannot see which database the service has."""
    return sqlite_url


@pytest.fixture
def url(harness: Harness, scripted: ScriptedEngine) -> Iterator[str]:
    with serve(create_app(harness.settings), lifespan="on") as url:
        yield url


def run_app(client: str, url: str, harness: Harness, folder: Path) -> dict[str, Any]:
    """Run the app of the docs that imports this package, and return its report."""
    named = "from slack_bolt import" if client == "slack_bolt" else f"from attune_client.{client} import"
    [app] = [block.text for block in blocks("python") if block.file.parent == PAGES and named in block.text]
    path = folder / "app.py"
    path.write_text(app.replace('model="assistant"', 'model="shop"'))
    done = run_user_interface(client, path, url, harness.key)
    assert done.returncode == 0 and done.stdout, done.stdout[-2000:] + done.stderr[-6000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


async def check_turn(report: dict[str, Any], harness: Harness) -> None:
    """The votes are about the second turn of one conversation, which may be trained on."""
    first, second = await harness.all(Turn)
    assert report["completion_id"] == second.id
    assert second.parent_id == first.id and second.exclusion_reason is None
    rows = [row for row in await harness.all(Feedback) if row.kind != "withdrawal"]
    assert {row.turn_id for row in rows} == {second.id}


async def test_gradio(url: str, harness: Harness, tmp_path: Path) -> None:
    report = run_app("gradio", url, harness, tmp_path)
    source = "gradio:of-the-tests"
    assert report["votes"] == {
        "up": [[*UP, source]],
        "down": [[*DOWN, source]],
        "taken_back": [],
        "label": [["categorical", None, source]],
        "again": [[*UP, source]],
        "other_model": [[*UP, source]],
    }
    await check_turn(report, harness)


async def test_streamlit(url: str, harness: Harness, tmp_path: Path) -> None:
    report = run_app("streamlit", url, harness, tmp_path)
    [[*up, source]] = report["votes"]["up"]
    assert up == UP and source.startswith("streamlit:")
    assert report["votes"] == {
        "up": [[*UP, source]],
        "down": [[*DOWN, source]],
        "taken_back": [],
        "again": [[*UP, source]],
        "stars": [[*UP, source], ["rating", 0.5, "streamlit:ada"]],
    }
    await check_turn(report, harness)


async def test_chainlit(url: str, harness: Harness, tmp_path: Path) -> None:
    report = run_app("chainlit", url, harness, tmp_path)
    [[*_, source]] = report["votes"]["up"]
    assert source.startswith("chainlit:") and len(source) == len("chainlit:") + 36, "the conversation: nobody logged in"
    assert report["votes"] == {
        "up": [[*UP, source]],
        "down": [[*DOWN, source]],
        "comment": [[*DOWN, source]],
        "taken_back": [],
        "again": [[*UP, source]],
        "around": [UP],
        "end": [],
    }
    assert [row.comment for row in await harness.all(Feedback) if row.comment] == ["Wrong day."]
    await check_turn(report, harness)


async def test_slack(url: str, harness: Harness, tmp_path: Path) -> None:
    report = run_app("slack_bolt", url, harness, tmp_path)
    assert report["votes"] == {
        "up": [[*UP, "slack:T1:U1"]],
        "down": [[*DOWN, "slack:T1:U1"]],
        "other": [[*DOWN, "slack:T1:U1"], [*UP, "slack:T1:U2"]],
    }
    assert [turn.end_user for turn in await harness.all(Turn)] == ["slack:T1:U1"] * 2
