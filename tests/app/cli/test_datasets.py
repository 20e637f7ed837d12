"""attune export and import, against a service that runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from app.cli.datasets import exports, imports
from app.core.settings import get_settings
from tests.support.deployment import Harness
from tests.support.parquet_files import answered, parquet, say

run = CliRunner().invoke


@pytest.fixture
def at(harness: Harness, served: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    host, _, port = served.removeprefix("http://").partition(":")
    for name, value in {"HOST": host, "PORT": port, "API_KEY": harness.key}.items():
        monkeypatch.setenv(f"ATTUNE_{name}", value)
    get_settings.cache_clear()
    yield harness
    get_settings.cache_clear()


async def test_turns_are_exported_to_a_file(at: Harness, tmp_path: Path) -> None:
    made = [await at.turn(created_at=float(index)) for index in range(3)]
    out = tmp_path / "turns.parquet"
    done = run(exports, ["turns", str(out), "--since", "1", "--trainable"])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{out}: 2 rows, {out.stat().st_size} bytes\n"
    assert pq.read_table(out)["id"].to_pylist() == [turn.id for turn in made[1:]]
    assert [path.name for path in tmp_path.glob("*turns*")] == ["turns.parquet"]


async def test_preferences_go_out_and_come_in(at: Harness, tmp_path: Path) -> None:
    turn = await answered(at, "No idea.")
    await say(at, turn, "correction", raw_value="Till six.")
    out = tmp_path / "preferences.parquet"
    told = json.loads(run(exports, ["preferences", str(out), "--json"]).stdout)
    assert (told["rows"], told["left_out"], told["file"]) == (1, 0, str(out))
    first = run(imports, ["preferences", str(out), "--name", "own"])
    assert first.stdout.startswith("own: 1 preferences (ds-") and first.exit_code == 0
    again = json.loads(run(imports, ["preferences", str(out), "--name", "own", "--json"]).stdout)
    assert (again["new"], again["num_rows"]) == (False, 1)


async def test_what_is_refused_is_a_sentence(at: Harness, tmp_path: Path) -> None:
    file = tmp_path / "prompts.parquet"
    file.write_bytes(parquet({"prompt": ["Hi", None]}))
    refused = run(imports, ["prompts", str(file), "--name", "x"])
    assert refused.exit_code == 1 and "attune: Row 1, column 'prompt': there is no value." in refused.output
    nobody = run(exports, ["turns", str(tmp_path / "t.parquet"), "--policy", "nobody"])
    assert nobody.exit_code == 1 and "There is no policy named 'nobody'." in nobody.output
    nowhere = run(exports, ["turns", str(tmp_path / "no" / "t.parquet")])
    assert nowhere.exit_code == 1 and "cannot write" in nowhere.output
    assert not (tmp_path / "t.parquet").exists()


async def test_columns_that_are_left_out_are_named(at: Harness, tmp_path: Path) -> None:
    file = tmp_path / "prompts.parquet"
    file.write_bytes(parquet({"prompt": ["Hi"], "tags": [["a"]]}))
    done = run(imports, ["prompts", str(file), "--name", "x"])
    assert "x: 1 prompts (ds-" in done.stdout and "left out: columns tags" in done.stdout
