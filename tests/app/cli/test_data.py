"""Commands export, import and subject."""

import json
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from app.cli.data import exports, imports
from app.cli.main import app
from app.models import Turn
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.parquet_files import create_feedback, create_reply, to_parquet
from tests.support.trained_versions import create_version


async def test_turns_are_exported_to_a_file(cli_harness: Harness, tmp_path: Path) -> None:
    turns = [await cli_harness.turn(created_at=float(index)) for index in range(3)]
    out = tmp_path / "turns.parquet"
    result = run(exports, ["turns", str(out), "--since", "1", "--trainable"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}: 2 rows, {out.stat().st_size} bytes\n"
    assert pq.read_table(out)["id"].to_pylist() == [turn.id for turn in turns[1:]]
    assert [path.name for path in tmp_path.glob("*turns*")] == ["turns.parquet"]


async def test_preferences_are_exported_and_imported(cli_harness: Harness, tmp_path: Path) -> None:
    turn = await create_reply(cli_harness, "No idea.")
    await create_feedback(cli_harness, turn, "correction", raw_value="Till six.")
    out = tmp_path / "preferences.parquet"
    output = json.loads(run(exports, ["preferences", str(out), "--json"]).stdout)
    assert (output["rows"], output["left_out"], output["file"]) == (1, 0, str(out))
    first = run(imports, ["preferences", str(out), "--name", "own"])
    assert first.stdout.startswith("own: 1 preferences (ds-") and first.exit_code == 0
    again = json.loads(run(imports, ["preferences", str(out), "--name", "own", "--json"]).stdout)
    assert (again["new"], again["num_rows"]) == (False, 1)


async def test_refusals_print_the_error_message(cli_harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "prompts.parquet"
    file.write_bytes(to_parquet({"prompt": ["Hi", None]}))
    refused = run(imports, ["prompts", str(file), "--name", "x"])
    assert refused.exit_code == 1 and "attune: Row 1, column 'prompt': there is no value." in refused.output
    nobody = run(exports, ["turns", str(tmp_path / "t.parquet"), "--policy", "nobody"])
    assert nobody.exit_code == 1 and "There is no policy named 'nobody'." in nobody.output
    nowhere = run(exports, ["turns", str(tmp_path / "no" / "t.parquet")])
    assert nowhere.exit_code == 1 and "cannot write" in nowhere.output
    assert not (tmp_path / "t.parquet").exists()


async def test_import_names_the_columns_left_out(cli_harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "prompts.parquet"
    file.write_bytes(to_parquet({"prompt": ["Hi"], "tags": [["a"]]}))
    result = run(imports, ["prompts", str(file), "--name", "x"])
    assert "x: 1 prompts (ds-" in result.stdout and "left out: columns tags" in result.stdout


async def test_import_counts_the_values_left_out(cli_harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "prompts.parquet"
    file.write_bytes(to_parquet({"prompt": ["a", "b", "c"], "a=b, c": [float("nan"), 1.0, float("inf")]}))
    result = run(imports, ["prompts", str(file), "--name", "x"])
    assert "x: 3 prompts (ds-" in result.stdout and "left out: 2 values of column a=b, c" in result.stdout


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
    erased = run(app, ["subject", "show", "team/ada"])
    assert erased.exit_code == 1 and "Nothing is stored of 'team/ada'" in erased.output
