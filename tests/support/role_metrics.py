"""The /metrics of a running process of each role."""

import asyncio
import re
import time
from collections import defaultdict
from typing import get_args

import httpx2
from prometheus_client import CollectorRegistry, generate_latest

from app.core.jobs import TaskName
from app.core.process_metrics import process_registry
from app.core.settings import Settings
from app.models import Deployment, VersionState
from tests.support.deployment import Harness
from tests.support.metrics_requests import Page
from tests.support.processes import Processes
from workers.database_metrics import DatabaseMetrics
from workers.stage_metrics import (
    ENGINE_LOAD_CRASHES,
    ENGINE_METRICS,
    ENGINE_STARTS,
    ENGINE_UP,
    JUDGE_REQUESTS,
    STAGE_SUCCEEDED_AT,
    TRAINER_METRICS,
    worker_metrics,
)

ADDRESS = re.compile(r"metrics on (http://\S+/metrics)")


def scrape(processes: Processes, name: str, seconds: float = 180.0) -> str:
    """Return the page of a running process, whose log says where it listens. Waits until it does."""
    child, ends = processes.children[name], time.monotonic() + seconds
    while time.monotonic() < ends:
        log = child.log.read_text() if child.log.exists() else ""
        if found := ADDRESS.findall(log):
            return httpx2.get(found[-1], timeout=30, trust_env=False).text
        assert child.running, f"{name} has ended; its log:\n{log}"
        time.sleep(0.1)
    raise TimeoutError(f"{name} serves no metrics; its log:\n{child.log.read_text()}")


def names_and_labels(text: str) -> dict[str, set[str]]:
    """Return the labels of each sample's name; for a metric without samples, no label."""
    labels: dict[str, set[str]] = defaultdict(set)
    for family in Page(text).families.values():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        for suffix in suffixes:
            labels[family.name + suffix] |= set()
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    return dict(labels)


def role_registry(name: str, settings: Settings) -> CollectorRegistry:
    """Return the registry that the process of `attune up` with this name serves, without its database pool."""
    if name == "beat":
        return process_registry("beat", DatabaseMetrics(settings))
    if name == "trainer":
        return process_registry("trainer", *TRAINER_METRICS)
    if name == "engine":
        return process_registry("engine", *ENGINE_METRICS)
    queue = {"worker": "attune", "publisher": "publish"}.get(name, name)
    return process_registry("worker", *worker_metrics([queue], get_args(TaskName)))


async def exposed_metrics(harness: Harness) -> dict[str, set[str]]:
    """Return the names of all series that the roles expose, each with its labels, for a service that was used."""
    JUDGE_REQUESTS.labels("judge", "answered")
    for metric in (ENGINE_UP, ENGINE_STARTS, ENGINE_LOAD_CRASHES):
        metric.labels("engine-0")
    STAGE_SUCCEEDED_AT.labels("curate")
    candidate = await harness.version(VersionState.CANARY)
    async with harness.db.write() as session:
        deployment = await session.get_one(Deployment, candidate.policy_id)
        deployment.canary_version_id, deployment.canary_since, deployment.canary_watched = candidate.id, 1.0, True
    labels: dict[str, set[str]] = {}
    for name in ("beat", "worker", "judge", "rollout", "publisher", "trainer", "engine"):
        registry = role_registry(name, harness.settings)
        page = await asyncio.to_thread(generate_latest, registry)
        labels |= names_and_labels(page.decode())
    return labels
