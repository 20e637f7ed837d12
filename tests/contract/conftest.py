"""A deployment for each module of contract tests, and the number of cases, printed at the end of the run."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.settings import Settings
from tests.contract.harness import UNLIMITED, ContractHarness, contract_harness

num_cases: Counter[str] = Counter()


@pytest.fixture(scope="module")
def deployment(
    blank_sqlite: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ContractHarness]:
    home = tmp_path_factory.mktemp("contract")
    shutil.copy(blank_sqlite, home / "attune.db")
    with contract_harness(Settings(home=home, policy="shop", limits=UNLIMITED)) as harness:
        yield harness
        name = request.module.__name__.rpartition(".")[2]
        num_cases.update({f"{name} {status}": count for status, count in harness.statuses.items()})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if num_cases:
        terminalreporter.section("contract")
        terminalreporter.write_line(
            f"{num_cases.total()} cases: " + ", ".join(f"{k} {v}" for k, v in sorted(num_cases.items()))
        )
