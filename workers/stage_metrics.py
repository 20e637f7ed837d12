"""What the processes of the workers count and measure. Each role exposes its own metrics (`METRICS_BY_QUEUE`).

Every known value of a label exists from the start, at 0: Prometheus sees no increase where a series begins at 1.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from app.core.jobs import TaskName, queue_name

SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

STAGE_SECONDS = Histogram(
    "attune_stage_seconds",
    "Duration of the runs of a stage: result ok, or error if it raised.",
    ("stage", "result"),
    registry=None,
    buckets=SECONDS_BUCKETS,
)
STAGE_SUCCEEDED_AT = Gauge(
    "attune_stage_last_success_timestamp_seconds",
    "When the stage last ended without an error in this process.",
    ("stage",),
    registry=None,
)
JUDGE_REQUESTS = Counter(
    "attune_judge_requests",
    "Judgements that were requested: answered, failed (tried again or given up), postponed or skipped.",
    ("source", "result"),
    registry=None,
)
EVALUATIONS = Counter(
    "attune_evaluations", "Evaluations of trained versions: verified, rejected, retried.", ("result",), registry=None
)
PUBLISH_SECONDS = Histogram(
    "attune_publish_seconds",
    "Seconds of the phases of a release; trained_to_served is the whole.",
    ("phase",),
    registry=None,
    buckets=SECONDS_BUCKETS,
)
UPDATES = Counter(
    "attune_updates",
    "Batches that the trainer took: trained, refused, quarantined, failed, void (the head or the lease was lost).",
    ("result",),
    registry=None,
)
UPDATE_SECONDS = Histogram(
    "attune_update_seconds",
    "Seconds of the phases of an update: restore, update, export.",
    ("phase",),
    registry=None,
    buckets=SECONDS_BUCKETS,
)
ENGINE_UP = Gauge("attune_engine_up", "1 while the engine answers and takes traffic.", ("engine",), registry=None)
ENGINE_STARTS = Counter("attune_engine_starts", "Starts of the engine by this supervisor.", ("engine",), registry=None)
ENGINE_LOAD_CRASHES = Counter(
    "attune_engine_load_crashes", "Ends of the engine while it loaded a version.", ("engine",), registry=None
)

TRAINER_METRICS: tuple[Collector, ...] = (UPDATES, UPDATE_SECONDS, STAGE_SECONDS, STAGE_SUCCEEDED_AT)
ENGINE_METRICS: tuple[Collector, ...] = (ENGINE_UP, ENGINE_STARTS, ENGINE_LOAD_CRASHES)
METRICS_BY_QUEUE: dict[str, tuple[Collector, ...]] = {
    "judge": (JUDGE_REQUESTS,),
    "publish": (EVALUATIONS, PUBLISH_SECONDS),
}
for _result in ("verified", "rejected", "retried"):
    EVALUATIONS.labels(_result)
for _result in ("trained", "refused", "quarantined", "failed", "void"):
    UPDATES.labels(_result)
for _phase in ("restore", "update", "export"):
    UPDATE_SECONDS.labels(_phase)
PUBLISH_SECONDS.labels("trained_to_served")


def worker_metrics(queues: Iterable[str], stages: Iterable[TaskName]) -> list[Collector]:
    """Return the metrics of a worker of these queues, with a series for each stage that it runs."""
    queues = list(queues)
    for stage in stages:
        if queue_name(stage) in queues:
            prepare_stage(stage)
    own = [metric for queue in queues for metric in METRICS_BY_QUEUE.get(queue, ())]
    return [STAGE_SECONDS, STAGE_SUCCEEDED_AT, *own]


def prepare_stage(stage: TaskName) -> None:
    for result in ("ok", "error"):
        STAGE_SECONDS.labels(stage, result)


@contextmanager
def measure_stage(stage: TaskName) -> Iterator[None]:
    """Time one run of a stage, and record how it ended."""
    started, result = time.perf_counter(), "error"
    try:
        yield
        result = "ok"
        STAGE_SUCCEEDED_AT.labels(stage).set_to_current_time()
    finally:
        STAGE_SECONDS.labels(stage, result).observe(time.perf_counter() - started)
