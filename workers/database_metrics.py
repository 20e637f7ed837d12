"""What the database knows about the whole deployment, for Prometheus. Beat exposes it, since one beat runs.

It is read when Prometheus asks, on a connection of its own, and at most once in MIN_AGE_SECONDS. Each query reads an
index of rows that wait, never a table that grows with use.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED
from alignment.release.canary import CanaryConfig
from app.core.database import Database, database_time
from app.core.settings import Settings
from app.deployments import comparison
from app.models import (
    Batch,
    BatchState,
    Deployment,
    Engine,
    EngineState,
    Feedback,
    Judgement,
    LearningMode,
    LineMove,
    Policy,
    Project,
    Rollout,
    Version,
    VersionState,
    WebhookDelivery,
    WebhookDeliveryState,
    WebhookEndpoint,
)
from app.training.sample_totals import WAITING_STATES, count_waiting
from workers.release import publish

log = logging.getLogger("attune.metrics")
MIN_AGE_SECONDS = 5.0
READ_SECONDS = 5.0  # the limit of each statement
EVIDENCE = ("less_approval", "no_worse", "more_failures")
OPEN = "open"


class DatabaseMetrics(Collector):
    """Collects on each scrape. While the database cannot be read, only `attune_database_up` is there, as 0."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()  # the listener has a thread for each scrape
        self._metrics: list[Metric] = []
        self._read_at: float | None = None

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering it reads nothing

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            if self._read_at is None or time.monotonic() - self._read_at > MIN_AGE_SECONDS:
                self._metrics = asyncio.run(self._read())
                self._read_at = time.monotonic()
            return self._metrics

    async def _read(self) -> list[Metric]:
        started = time.perf_counter()
        up = _gauge("attune_database_up", "1 if the database could be read.")
        seconds = _gauge("attune_database_read_seconds", "How long these metrics took to read.")
        try:
            async with Database(self._settings.database_url, seconds=READ_SECONDS) as db, db.read() as session:
                metrics = await read_metrics(session, self._settings)
        except (SQLAlchemyError, OSError) as error:
            log.warning("the database could not be read: %s", error)
            up.add_metric([], 0)
            return [up]
        up.add_metric([], 1)
        seconds.add_metric([], time.perf_counter() - started)
        return [up, seconds, *metrics]


async def read_metrics(session: AsyncSession, settings: Settings) -> list[Metric]:
    """Return the metrics of all projects."""
    time = await database_time(session)
    return [
        *await _read_policies(session, settings),
        await _read_batches(session, time),
        await _read_queues(session, time),
        *await _read_engines(session),
        *await _read_webhooks(session),
    ]


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=labels)


async def _read_policies(session: AsyncSession, settings: Settings) -> list[Metric]:
    samples = _gauge("attune_samples", "Samples that wait, by state.", "project", "policy", "state")
    modes = _gauge("attune_learning_mode", "1 for the mode in which the policy learns.", "project", "policy", "mode")
    alarms = _gauge("attune_kl_alarms", "Alarms of the KL guard in a row.", "project", "policy")
    evidence = _gauge(
        "attune_canary_evidence",
        "Evidence in nats of a canary test, over the evidence that decides it: 1 decides.",
        *("project", "policy", "test"),
    )
    watched = set(await session.scalars(select(Deployment.policy_id).where(publish.IS_WATCHED)))
    rows = await session.execute(select(Policy, Project.name).join(Project, Project.id == Policy.project_id))
    policies = rows.all()
    waiting = await count_waiting(session, [policy.id for policy, _ in policies])
    for policy, project in policies:
        labels = [project, policy.name]
        for state in WAITING_STATES:
            samples.add_metric([*labels, str(state)], waiting.get((policy.id, state), 0))
        for mode in LearningMode:
            modes.add_metric([*labels, str(mode)], policy.mode == mode)
        alarms.add_metric(labels, policy.kl_alarms)
        if policy.id in watched:
            deployment = await session.get_one(Deployment, policy.id)
            config = comparison.effective_canary(policy, settings) or CanaryConfig()
            *_, decision = await comparison.evaluate_canary(session, deployment, config)
            for test in EVIDENCE:
                threshold = decision.figures["promote_at" if test == "no_worse" else "alarm_at"]
                evidence.add_metric([*labels, test], decision.figures[test] / threshold)
    return [samples, modes, alarms, evidence]


async def _read_batches(session: AsyncSession, time: float) -> Metric:
    metric = _gauge("attune_batch_age_seconds", "Age of the oldest batch without a result; 0 without one.")
    metric.add_metric([], await _age(session, time, Batch.created_at, Batch.state == BatchState.OPEN))
    return metric


async def _read_queues(session: AsyncSession, time: float) -> Metric:
    """How long the oldest due row of each stage has waited. A row that a worker holds counts until it has a result."""
    metric = _gauge("attune_queue_oldest_seconds", "How long the oldest work of a stage has been due.", "stage")
    oldest = {
        "curate": (Feedback.created_at, ~Feedback.processed),
        "judge": (Judgement.due_at, (Judgement.state == OPEN) & (Judgement.source != LEARNED)),
        "rollout": (Rollout.due_at, Rollout.state == OPEN),
        "assemble": (LineMove.created_at, LineMove.id > 0),  # samples that move after a rollback
        "train": (Batch.created_at, Batch.state == BatchState.OPEN),
        "evaluate": (Version.created_at, Version.state == VersionState.TRAINED),
        "publish": (Version.created_at, Version.state == VersionState.VERIFIED),
        "webhook": (WebhookDelivery.due_at, WebhookDelivery.state == OPEN),
    }
    for stage, (column, condition) in oldest.items():
        metric.add_metric([stage], await _age(session, time, column, condition))
    return metric


async def _age(session: AsyncSession, time: float, column: Any, condition: ColumnElement[bool]) -> float:
    """Return the seconds since the smallest value of a column of times, at least 0; 0 without a row."""
    oldest = await session.scalar(select(func.min(column)).where(condition))
    return 0.0 if oldest is None else max(0.0, time - oldest)


async def _read_engines(session: AsyncSession) -> list[Metric]:
    states = _gauge("attune_engines", "Engines, by state.", "state")
    loaded = _gauge("attune_engine_loaded", "Versions that the engine holds, beside the base model.", "engine")
    engines = list(await session.scalars(select(Engine)))
    for state in EngineState:
        states.add_metric([str(state)], sum(engine.state == state for engine in engines))
    for engine in engines:
        loaded.add_metric([engine.name], len(engine.loaded) + (engine.weights is not None))
    return [states, loaded]


async def _read_webhooks(session: AsyncSession) -> list[Metric]:
    pending = _gauge("attune_webhook_pending", "Webhook deliveries that wait.")
    failing = _gauge("attune_webhook_failing", "Webhook endpoints that fail and are tried again.")
    is_open = WebhookDelivery.state == WebhookDeliveryState.OPEN
    pending.add_metric([], await session.scalar(select(func.count()).where(is_open)) or 0)
    is_failing = (WebhookEndpoint.failing_since.is_not(None), WebhookEndpoint.disabled_at.is_(None))
    failing.add_metric([], await session.scalar(select(func.count()).where(*is_failing)) or 0)
    return [pending, failing]
