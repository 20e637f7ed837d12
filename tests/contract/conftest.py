"""One house for all contract tests, and how many cases it met, printed at the end of the run."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.settings import Settings
from tests.contract.deployment_rows import House, house

UNLIMITED = {"requests_per_minute": 10**9, "max_concurrency": 10**6}  # what is under test is not the limit
asked: Counter[str] = Counter()


@pytest.fixture(scope="module")
def small_house(
    blank_sqlite: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[House]:
    home = tmp_path_factory.mktemp("contract")
    shutil.copy(blank_sqlite, home / "attune.db")
    with house(Settings(home=home, policy="shop", **UNLIMITED)) as built:
        yield built
        name = request.module.__name__.rpartition(".")[2]
        asked.update({f"{name} {status}": count for status, count in built.statuses.items()})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if asked:
        terminalreporter.section("contract")
        terminalreporter.write_line(
            f"{asked.total()} cases: " + ", ".join(f"{k} {v}" for k, v in sorted(asked.items()))
        )
