"""Command subject."""

import json
from pathlib import Path

from app.cli.main import app
from app.models import Turn
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.trained_versions import create_version


async def test_subject_is_shown_exported_and_erased(cli_harness: Harness, tmp_path: Path) -> None:
    await cli_harness.version()
    turn = await cli_harness.turn(end_user="team/ada")
    await create_version(cli_harness, turn)
    assert "1 turns" in run(app, ["subject", "show", "team/ada"]).output
    out = tmp_path / "ada.ndjson"
    assert "2 lines" in run(app, ["subject", "export", "team/ada", "--out", str(out)]).output
    assert json.loads(out.read_text().splitlines()[0])["id"] == turn.id
    assert json.loads(run(app, ["subject", "export", "team/ada"]).stdout.splitlines()[0])["id"] == turn.id
    declined = run(app, ["subject", "erase", "team/ada"], input="n\n")
    assert declined.exit_code == 1 and "Erase 1 turns" in declined.output
    assert (await cli_harness.get(Turn, turn.id)).deleted_at is None
    output = run(app, ["subject", "erase", "team/ada", "--yes"]).output
    assert "erased: 1 turns" in output and "shop@v2" in output and "was trained on it, directly" in output
    assert (await cli_harness.get(Turn, turn.id)).deleted_at is not None
    gone = run(app, ["subject", "show", "team/ada"])
    assert gone.exit_code == 1 and "Nothing is stored of 'team/ada'" in gone.output
