"""A running process of each role exposes its metrics."""

import asyncio

import pytest
from prometheus_client import generate_latest

from app.core.settings import Settings
from tests.support.deployment import Harness
from tests.support.engine_fixture import free_port
from tests.support.processes import Processes, processes
from tests.support.role_metrics import names_and_labels, role_registry, scrape


def with_ports(settings: Settings) -> Settings:
    values = {"observability.metrics_port": free_port(), "engine.port": free_port(), "engine.python": "/bin/false"}
    return settings.replace(values)


async def check(running: Processes, name: str) -> dict[str, set[str]]:
    """Compare the page of a running process with the registry of its role, with which the rules are compared."""
    labels = names_and_labels(scrape(running, name))
    page = await asyncio.to_thread(generate_latest, role_registry(name, running.settings))
    own = set(names_and_labels(page.decode()))
    assert set(labels) == (own if name == "beat" else own | {"attune_db_pool_in_use"})
    assert {"attune_build_info", "process_resident_memory_bytes"} < own
    return labels


async def test_beat_and_two_workers_on_one_machine(harness: Harness) -> None:
    with processes(with_ports(harness.settings)) as running:
        running.start("beat", "judge", "publisher")
        pages = {name: await check(running, name) for name in ("beat", "judge", "publisher")}
    assert pages["beat"]["attune_samples"] == {"project", "policy", "state"}
    assert "attune_judge_requests_total" not in pages["publisher"] and "attune_database_up" not in pages["judge"]


@pytest.mark.slow  # imports torch
@pytest.mark.parametrize("name", ["worker", "engine", "trainer"])
async def test_the_other_roles(harness: Harness, name: str) -> None:
    with processes(with_ports(harness.settings)) as running:
        running.start(name)
        await check(running, name)
