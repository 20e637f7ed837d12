"""Command analyze: tables, charts and PNGs of metrics, without a running service."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from typer.testing import CliRunner, Result

from app.cli.analyze import Series, draw_lines
from app.cli.main import app
from app.core.settings import REPOSITORY, get_settings
from app.ops import experiment_log
from app.ops.experiment_log import Entry

KL, SCORE = "actor/ppo_kl", "critic/score/mean"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the experiment logs of a deployment that is not running."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setenv("ATTUNE_POLICY", "shop")
    get_settings.cache_clear()
    yield tmp_path / "metrics"
    get_settings.cache_clear()


def update(
    folder: Path, number: int, line: str = "shop-3f2a1b", metrics: Mapping[str, float] = MappingProxyType({})
) -> None:
    figures = {KL: 0.01 * number, SCORE: -0.5 + 0.25 * number, **metrics}
    experiment_log.append(folder, Entry(line.rpartition("-")[0], f"{line}-v{number}", number, "batch", 1.0, figures))


def analyze(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def test_all_metrics_are_printed_as_a_table(folder: Path) -> None:
    for number in (1, 2, 3):
        update(folder, number, metrics={"reference_kl": 0.125} if number > 1 else {})
    update(folder, 4, metrics={SCORE: -0.75})
    output = analyze().stdout
    rows = {cells[0]: cells[1:] for line in output.splitlines() if len(cells := re.findall(r"[\w./-]+", line)) == 5}
    assert rows["metric"] == ["first", "last", "min", "max"]
    assert rows[KL] == ["0.01", "0.04", "0.01", "0.04"]
    assert rows[SCORE] == ["-0.25", "-0.75", "-0.75", "0.25"]
    assert rows["reference_kl"] == ["0.125"] * 4
    assert "shop-3f2a1b: v1 to v4, 4 updates" in output


def test_without_a_terminal_metrics_are_columns(folder: Path) -> None:
    update(folder, 1)
    update(folder, 2, metrics={"reference_kl": 0.1 + 0.2})
    output = analyze("--metric", f"{KL}, reference_kl").stdout.splitlines()
    assert output[:3] == [f"version\t{KL}\treference_kl", "1\t0.01\t", "2\t0.02\t0.30000000000000004"]
    assert output[3:] == [
        f"# {KL}: last 0.02 (v2), min 0.01 (v1), max 0.02 (v2)",
        "# reference_kl: last 0.3 (v2), min 0.3 (v2), max 0.3 (v2)",
    ]


def test_json_has_null_for_missing_values(folder: Path) -> None:
    update(folder, 1)
    update(folder, 3, metrics={"reference_kl": 1e-17})
    output = json.loads(analyze("--metric", f"reference_kl,{SCORE}", "--json").stdout)
    assert output == {
        "policy": "shop",
        "versions": [1, 3],
        "metrics": {"reference_kl": [None, 1e-17], SCORE: [-0.25, 0.25]},
    }
    assert set(json.loads(analyze("--json").stdout)["metrics"]) == {KL, SCORE, "reference_kl"}


def test_last_selects_the_newest_versions_and_their_newest_entries(folder: Path) -> None:
    for number in (1, 2, 3, 4):
        update(folder, number)
    update(folder, 3, metrics={KL: 9.0})
    output = json.loads(analyze("--metric", KL, "--last", 2, "--json").stdout)
    assert (output["versions"], output["metrics"][KL]) == ([3, 4], [9.0, 0.04])


def test_unknown_metric_lists_the_available_ones_closest_first(folder: Path) -> None:
    update(folder, 1, metrics={"timing_s/update_actor": 1.0, "actor/ppo_kl_max": 1.0})
    output = analyze("--metric", f"{SCORE},actor/kl")
    assert output.exit_code == 1 and "no metric is called 'actor/kl'" in output.output
    names = output.output.strip().partition("the metrics are: ")[2].split(", ")
    assert names[:2] == [KL, "actor/ppo_kl_max"] and set(names) == {
        KL,
        "actor/ppo_kl_max",
        SCORE,
        "timing_s/update_actor",
    }


def test_unknown_policy_lists_the_available_ones(folder: Path) -> None:
    assert "has no update of 'shop'" in (nothing := analyze()).output and "its policies are: none" in nothing.output
    update(folder, 1, "bakery-9f0e1d")
    output = analyze()
    assert output.exit_code == 1 and output.output.strip().endswith("its policies are: bakery")
    assert json.loads(analyze("--policy", "bakery", "--json").stdout)["versions"] == [1]


def test_policies_of_two_projects_are_never_mixed(folder: Path) -> None:
    update(folder, 1)
    update(folder, 1, "shop-9f0e1d", metrics={KL: 7.0})
    output = analyze("--metric", KL)
    assert output.exit_code == 1 and "choose with --policy: shop-3f2a1b, shop-9f0e1d" in output.output
    assert json.loads(analyze("--policy", "shop-9f0e1d", "--json").stdout)["metrics"][KL] == [7.0]


def test_log_can_be_read_while_it_is_written(folder: Path) -> None:
    update(folder, 1)
    with experiment_log.path_of(folder, "shop").open("ab") as file:
        file.write(b'{"policy": "shop", "vers')
    output = analyze("--json")
    assert json.loads(output.stdout)["versions"] == [1]
    assert "skipped 1 unfinished line(s)" in output.stderr


def test_log_dir_selects_another_folder(folder: Path, tmp_path: Path) -> None:
    update(tmp_path / "elsewhere", 8)
    assert json.loads(analyze("--log-dir", tmp_path / "elsewhere", "--json").stdout)["versions"] == [8]


def test_png_has_one_chart_per_metric(folder: Path, tmp_path: Path) -> None:
    update(folder, 1)
    update(folder, 2)
    sizes = []
    for metrics in (KL, f"{KL},{SCORE}"):
        assert analyze("--metric", metrics, "--png", tmp_path / "x.png").exit_code == 0
        data = (tmp_path / "x.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(struct.unpack(">II", data[16:24]))
    assert sizes[1] == (sizes[0][0], 2 * sizes[0][1]), "the charts are in one column"


def test_png_errors_are_explained(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update(folder, 1)
    assert "--png needs --metric" in analyze("--png", tmp_path / "x.png").output
    nowhere = analyze("--metric", KL, "--png", tmp_path / "nowhere" / "x.png")
    assert "cannot write" in str(nowhere.exception) and isinstance(nowhere.exception, ValueError)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = analyze("--metric", KL, "--png", tmp_path / "y.png")
    assert "pip install matplotlib" in str(output.exception) and not (tmp_path / "y.png").exists()


def run_on_terminal(folder: Path, *arguments: str, columns: int = 60) -> list[str]:
    """Run the command on a pseudo-terminal. Return the lines it prints."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "ATTUNE_HOME": str(folder.parent), "COLUMNS": str(columns)}
    program = [sys.executable, "-m", "app.cli.main", "analyze", *arguments]
    process = subprocess.Popen(program, cwd=REPOSITORY, env=environment, stdout=slave, stdin=slave, stderr=slave)
    os.close(slave)
    data = b""
    try:
        while chunk := os.read(master, 65536):
            data += chunk
    except OSError:  # Linux: the other side is closed
        pass
    assert process.wait() == 0, data.decode()
    os.close(master)
    return re.sub(r"\x1b\[[0-9;]*m", "", data.decode()).splitlines()


def test_charts_are_as_wide_as_the_terminal(folder: Path) -> None:
    for number in range(1, 21):
        update(folder, number)
    output = run_on_terminal(folder, "--metric", f"{KL},{SCORE}")
    assert output[0] == f"{KL}: last 0.2 (v20), min 0.01 (v1), max 0.2 (v20)"
    assert output[11] == f"{SCORE}: last 4.5 (v20), min -0.25 (v1), max 4.5 (v20)"
    assert (len(output), max(map(len, output[1:11]))) == (22, 60)
    assert output[1].startswith(" 0.2 ┤") and output[8].startswith("0.01 ┤") and output[10].split() == ["v1", "v20"]


def test_chart_dots() -> None:
    """Two columns of cells are 4 dots wide, two rows 8 high: a straight rise sets two dots in each column."""
    rising = draw_lines(Series("kl", [(1, 0.0), (2, 1.0)]), width=5, height=2)
    assert rising == ["kl: last 1 (v2), min 0 (v1), max 1 (v2)", "1 ┤⠀⡜", "0 ┤⡜", "  └──", "   v1 v2"]


def test_points_are_placed_by_version_number() -> None:
    """v1, v2, v9 on 80 × 16 dots: the second is an eighth of the way along, at dot 10 of cell 5."""
    chart = draw_lines(Series("kl", [(1, 0.0), (2, 1.0), (9, 1.0)]), width=43, height=4)
    top = chart[1].partition("┤")[2]
    assert len(chart[4].partition("┤")[2]) == 2, "the line leaves the lowest four dots within three columns"
    assert top.lstrip("⠀") == top[4:] and set(top[6:]) == {"⠉"}, "the line stays high from the second version on"


def test_constant_metric_is_a_line_in_the_middle() -> None:
    chart = draw_lines(Series("lr", [(1, 3.0), (2, 3.0)]), width=13, height=4)
    assert [line[:3] for line in chart[1:5]] == ["  │", "  │", "3 ┤", "  │"]
    assert [bool(line[3:].strip("⠀")) for line in chart[1:5]] == [False, False, True, False]


def test_single_version_is_one_dot() -> None:
    chart = draw_lines(Series("lr", [(7, 3.0)]), width=20, height=4)
    dots = "".join(line[3:] for line in chart[1:5])
    assert sum(bin(ord(cell) - 0x2800).count("1") for cell in dots) == 1 and chart[-1].strip() == "v7"
