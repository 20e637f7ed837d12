"""/metrics, for Prometheus: the counters of this process, and the metrics of each policy's newest trained version."""

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from sqlalchemy import func, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased
from starlette.responses import Response

from app.core.database import Database
from app.core.errors import ERROR_RESPONSES
from app.core.http import services_of, settings_of
from app.core.process_metrics import PoolMetrics, process_registry
from app.core.telemetry import Telemetry
from app.models import ANSWERING, Deployment, Policy, Project, Version
from app.projects.auth import BEARER, DatabaseDep, admin_slot, authenticate
from app.projects.scopes import checks_scope
from app.training.rollouts import count_by_state

router = APIRouter(tags=["metrics"], responses=ERROR_RESPONSES)
METRICS_RESPONSES: dict[int | str, dict[str, object]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
}
Labels = tuple[str, ...]
POLICY_LABELS = ("project", "policy")
RolloutCount = tuple[str, str, str, int, int]  # policy id, origin, state, number of rollouts, their tokens
SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")


class PolicyMetrics(NamedTuple):
    """One policy. `metrics` are those of its newest trained version, `trained`; both are None before the first."""

    policy_id: str
    policy: str
    project_id: str
    project: str
    serving: int
    trained: int | None
    metrics: dict[str, float] | None

    @property
    def labels(self) -> tuple[str, str]:
        """The values of POLICY_LABELS."""
        return self.project, self.policy


_Serving, _Newest = aliased(Version), aliased(Version)
_NEWEST_NUMBER = (
    select(func.max(Version.number))
    .where(Version.policy_id == Policy.id, Version.parent_id.is_not(None))
    .correlate(Policy)
    .scalar_subquery()
)
_POLICY_METRICS = (
    select(Policy.id, Policy.name, Project.id, Project.name, _Serving.number, _Newest.number, _Newest.metrics)
    .join(Project, Project.id == Policy.project_id)
    .join(Deployment, Deployment.policy_id == Policy.id)
    .join(_Serving, _Serving.id == Deployment.version_id)
    .outerjoin(_Newest, (_Newest.policy_id == Policy.id) & (_Newest.number == _NEWEST_NUMBER))
    .where(Policy.state.in_(ANSWERING))
    .order_by(Project.name, Policy.name)
)


@checks_scope("viewer")
async def shown_project(request: Request, db: DatabaseDep, _: Annotated[Any, BEARER]) -> AsyncIterator[str | None]:
    """Return the caller's project; None for all projects where the page is open."""
    if settings_of(request).observability.metrics_open:
        yield None
        return
    caller = await authenticate(request, db, "viewer")
    async with admin_slot(request, caller):
        yield caller.project_id


@router.get("/metrics", response_class=Response, responses=METRICS_RESPONSES)
async def metrics(
    request: Request, db: DatabaseDep, project_id: Annotated[str | None, Depends(shown_project)]
) -> Response:
    """The counters of this process, and the metrics of each policy's newest trained version."""

    def read(connection: Connection) -> tuple[list[PolicyMetrics], Sequence[RolloutCount]]:
        query = _POLICY_METRICS if project_id is None else _POLICY_METRICS.where(Policy.project_id == project_id)
        return [PolicyMetrics(*row) for row in connection.execute(query)], count_by_state(connection)

    policies, rollouts = await db.run_read(read)
    content = render(services_of(request).get(Telemetry), db, policies, rollouts)
    return Response(content, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def render(
    telemetry: Telemetry, db: Database, policies: Sequence[PolicyMetrics], rollouts: Sequence[RolloutCount]
) -> bytes:
    """Return the page in Prometheus' text format.

    It shows the given policies and their projects; the request times are those of the whole process.
    """
    registry = process_registry("api", PoolMetrics(lambda: db.num_connections_in_use))
    by_id = {policy.policy_id: policy.labels for policy in policies}
    projects = {policy.project_id: policy.project for policy in policies}

    turns = {(*by_id[id], state): count for (id, state), count in telemetry.turns.items() if id in by_id}
    _add(registry, Counter, "attune_turns", "Replies that have ended, by state.", (*POLICY_LABELS, "state"), turns)
    feedback = {(projects[id], kind): count for (id, kind), count in telemetry.feedback.items() if id in projects}
    _add(registry, Counter, "attune_feedback", "Feedback events stored, by kind.", ("project", "kind"), feedback)

    unmatched = {(projects[id], *rest): count for (id, *rest), count in telemetry.unmatched.items() if id in projects}
    help_text = "Votes of connectors that are about no reply of the project, by reason."
    _add(registry, Counter, "attune_connector_unmatched", help_text, ("project", "connector", "reason"), unmatched)

    labels = (*POLICY_LABELS, "origin")
    tokens: defaultdict[Labels, int] = defaultdict(int)
    counts: dict[Labels, int] = {}
    for id, origin, state, count, num_tokens in rollouts:
        if id in by_id:
            counts[*by_id[id], origin, state] = count
            tokens[*by_id[id], origin] += num_tokens
    _add(registry, Counter, "attune_rollouts", "Rollouts in the database, by state.", (*labels, "state"), counts)
    _add(registry, Counter, "attune_rollout_tokens", "Output tokens of these rollouts.", labels, tokens)

    lengths = {by_id[id]: window for id, window in telemetry.lengths.items() if id in by_id}
    penalties = {values: window.mean_penalty for values, window in lengths.items()}
    documentation = "Mean length penalty of the last 1,000 replies: 0 in range, 1 far outside."
    _add(registry, Gauge, "attune_length_penalty_mean", documentation, POLICY_LABELS, penalties)
    p95 = {values: window.p95 for values, window in lengths.items()}
    documentation = "95th percentile of the last 1,000 replies' lengths, in tokens."
    _add(registry, Gauge, "attune_response_length_p95", documentation, POLICY_LABELS, p95)
    out_of_range = {values: window.out_of_range for values, window in lengths.items()}
    documentation = "Replies too short or too long."
    _add(registry, Counter, "attune_replies_out_of_range", documentation, POLICY_LABELS, out_of_range)

    for metric in (telemetry.requests, telemetry.first_tokens, telemetry.in_flight):
        registry.register(metric)
    serving = {policy.labels: policy.serving for policy in policies}
    _add(registry, Gauge, "attune_version", "Number of the serving version.", POLICY_LABELS, serving)
    trained = {policy.labels: policy.trained for policy in policies if policy.trained is not None}
    _add(registry, Gauge, "attune_trained_version", "Number of the newest trained version.", POLICY_LABELS, trained)
    _add_update_metrics(registry, policies)
    return generate_latest(registry)


def _add(
    registry: CollectorRegistry,
    kind: type[Counter] | type[Gauge],
    name: str,
    documentation: str,
    labels: Labels,
    values: Mapping[Any, float],
) -> None:
    """Add a metric with a value for each combination of labels."""
    metric = kind(name, documentation, labels, registry=registry)
    for label_values, value in values.items():
        metric.labels(*label_values).inc(value)


def _add_update_metrics(registry: CollectorRegistry, policies: Sequence[PolicyMetrics]) -> None:
    """Add the metrics of the newest trained versions, as gauges.

    A metric whose exported name is taken is left out. Where two metrics have the same exported name, the first one
    is kept.
    """
    taken = {family.name + suffix for family in registry.collect() for suffix in SUFFIXES}
    metrics: dict[str, str] = {}  # by exported name
    values: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
    for policy in policies:
        for metric, value in sorted((policy.metrics or {}).items()):
            name = exported_name(metric)
            if name not in taken and isinstance(value, (int, float)) and metrics.setdefault(name, metric) == metric:
                values[name][policy.labels] = value
    for name, metric in metrics.items():
        _add(registry, Gauge, name, f"{metric}, of the newest trained version.", POLICY_LABELS, values[name])


def exported_name(metric: str) -> str:
    """Example: "actor/ppo_kl" -> "attune_actor_ppo_kl" """
    return "attune_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
