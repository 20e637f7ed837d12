"""The experiment log stays readable when its writer is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.core.settings import REPOSITORY
from app.ops import experiment_log
from app.ops.experiment_log import Entry

WRITE_FOREVER = """
import sys
from itertools import count
from pathlib import Path
from app.ops.experiment_log import Entry, append
for number in count(1):
    metrics = {f"metric/{index}": float(number) for index in range(100)}
    append(Path(sys.argv[1]), Entry("shop", f"shop-3f2a1b-v{number}", number, "batch-1", 1.0, metrics))
    if number == 50:
        print("go", flush=True)
"""


def entry(number: int, **metrics: float) -> Entry:
    return Entry("shop", f"shop-3f2a1b-v{number}", number, f"batch-{number}", 1.5, metrics)


def test_written_entries_are_read_again(tmp_path: Path) -> None:
    entries = [entry(1, kl=0.1), entry(2, kl=1e-17, score=-3.0)]
    for item in entries:
        experiment_log.append(tmp_path / "metrics", item)
    path = experiment_log.path_of(tmp_path / "metrics", "shop")
    read = experiment_log.read(path)
    assert [(one.number, one.batch, one.time, one.metrics) for one in read.entries] == [
        (1, "batch-1", 1.5, {"kl": 0.1}),
        (2, "batch-2", 1.5, {"kl": 1e-17, "score": -3.0}),
    ]
    assert read.num_incomplete == 0 and path.read_bytes().count(b"\n") == 2
    assert read.entries[0].run_name == "shop-3f2a1b"


@pytest.mark.parametrize("keep", [1, 10, 60])
def test_incomplete_last_line_is_skipped_and_does_not_affect_later_lines(tmp_path: Path, keep: int) -> None:
    path = experiment_log.path_of(tmp_path, "shop")
    for number in (1, 2):
        experiment_log.append(tmp_path, entry(number, kl=0.1))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:keep])
    assert [one.number for one in experiment_log.read(path).entries] == [1] and experiment_log.read(
        path
    ).num_incomplete == 1
    experiment_log.append(tmp_path, entry(3, kl=0.3))
    assert [one.number for one in experiment_log.read(path).entries] == [1, 3] and experiment_log.read(
        path
    ).num_incomplete == 1


def test_last_line_without_a_newline_is_complete(tmp_path: Path) -> None:
    path = experiment_log.path_of(tmp_path, "shop")
    experiment_log.append(tmp_path, entry(1, kl=0.1))
    path.write_bytes(path.read_bytes().rstrip())
    experiment_log.append(tmp_path, entry(2, kl=0.2))
    assert [one.number for one in experiment_log.read(path).entries] == [1, 2] and experiment_log.read(
        path
    ).num_incomplete == 0


@pytest.mark.parametrize("line", [b"null", b"[]", b"{}", b'{"policy": "shop"}', b"\xff", b'{"metrics": nan}'])
def test_line_of_another_format_is_skipped(tmp_path: Path, line: bytes) -> None:
    path = experiment_log.path_of(tmp_path, "shop")
    path.write_bytes(line + b"\n")
    experiment_log.append(tmp_path, entry(1, kl=0.1))
    assert [one.number for one in experiment_log.read(path).entries] == [1] and experiment_log.read(
        path
    ).num_incomplete == 1


def test_killed_writer_leaves_complete_lines(tmp_path: Path) -> None:
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        program = [sys.executable, "-c", WRITE_FOREVER, str(folder)]
        writer = subprocess.Popen(program, cwd=REPOSITORY, stdout=subprocess.PIPE, env=dict(os.environ))
        assert writer.stdout is not None and writer.stdout.readline() == b"go\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        read = experiment_log.read(experiment_log.path_of(folder, "shop"))
        assert [one.number for one in read.entries] == list(range(1, len(read.entries) + 1))
        assert len(read.entries) >= 50 and read.num_incomplete == 0
