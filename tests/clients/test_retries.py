"""Retried tests are counted at the end of a run, also of one with several processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.core.settings import REPOSITORY

TESTS = """
from tests.clients.retries import with_retries

tries = []

@with_retries
def test_twice():
    tries.append(1)
    assert len(tries) == 3, "not yet"

@with_retries
def test_at_once():
    pass
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_retries_are_counted_at_the_end(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_sampled.py").write_text(TESTS)
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.clients.retries", "-n", processes, "-c", os.devnull]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 in 1 tests" in result.stdout
    assert "test_sampled.py::test_twice: 2: AssertionError: not yet" in result.stdout
    assert "test_at_once" not in result.stdout
