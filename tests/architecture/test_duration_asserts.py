"""No test that `make test` runs asserts a duration."""

from pathlib import Path

import pytest

from app.core.settings import REPOSITORY
from tests.architecture.duration_asserts import find_duration_asserts

# Programs, not tests: `make faults`, the benchmarks, the checks of GPU machines, parity and the model families.
PROGRAMS = ("tests/faults/suite/", "tests/benchmarks/", "tests/gpu/", "tests/parity/", "tests/families/")


def test_no_fast_test_asserts_a_duration() -> None:
    """Assert what the time stands for: the order of events, or a clock of the test. A hang ends in a time-out."""
    places = [path.relative_to(REPOSITORY).as_posix() for path in sorted((REPOSITORY / "tests").rglob("*.py"))]
    assert [
        f"{place}:{finding.line}: {finding.text}"
        for place in places
        if not place.startswith(PROGRAMS)
        for finding in find_duration_asserts(REPOSITORY / place)
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "def test():\n    began = time.monotonic()\n    assert time.monotonic() - began < 5",
        "def test():\n    took = time.perf_counter() - began()\n    assert took < 5",
        "def test():\n    deadline = time.time() + 5\n    while True:\n        assert time.time() < deadline",
        "def test():\n    seconds = []\n    seconds.append(time.monotonic() - 3)\n    assert max(seconds) < 1.5",
        "class Load:\n    def run(self):\n        self.longest = max(self.longest, time.monotonic() - 1)\n"
        "def test(load):\n    assert load.longest < 3",
        "async def wait():\n    began = time.monotonic()\n    return time.monotonic() - began\n"
        "async def test():\n    assert await wait() < 3",
        "def waits():\n    yield [time.time() - 1]\ndef test():\n    with waits() as all:\n        assert max(all) < 3",
        "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.slow)])\n"
        "def test(n):\n    assert time.time() - 5 < n",
        "def test():\n    assert abs(view['expires_at'] - time.time() - 60) < 5",
    ],
)
def test_duration_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "test_planted.py").write_text(source)
    assert len(find_duration_asserts(tmp_path / "test_planted.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def test():\n    before = time.time()\n    assert before <= row.created_at <= time.time()",
        "@pytest.mark.slow\ndef test():\n    assert time.time() - 3 < 5",
        "pytestmark = [pytest.mark.slow, pytest.mark.timeout(9)]\ndef test():\n    assert time.time() - 3 < 5",
        "def test():\n    old = token(now=time.time() - 9)\n    assert post(old).status_code == 200",
        "def test_a():\n    first = time.time()\ndef test_b():\n    first = count()\n    assert count() == first + 1",
    ],
)
def test_order_of_times_and_slow_tests_are_not_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "test_planted.py").write_text(source)
    assert find_duration_asserts(tmp_path / "test_planted.py") == []
