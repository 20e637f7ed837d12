"""ATTUNE_SHUFFLE: run the tests in random order, on a PostgreSQL whose rows come in unusual orders.

`ATTUNE_SHUFFLE=1` draws a seed and prints it; `ATTUNE_SHUFFLE=<seed>` repeats a run's order of tests. SQLite returns
unordered rows in reverse in every run (`tests.support.row_order`).
"""

import random

import pytest

from tests.support.hostile_postgres import SEED


def pytest_report_header() -> list[str]:
    return [f"ATTUNE_SHUFFLE={SEED}"] if SEED else []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the modules, and the tests within each of them, so that a module's fixtures are made once."""
    if not SEED:
        return
    rng = random.Random(SEED)
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    groups = list(modules.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    items[:] = [item for group in groups for item in group]
