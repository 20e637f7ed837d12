"""The page of /metrics: what it reads from the database, and how it is written for Prometheus."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from app.core.telemetry import Telemetry
from app.models import Deployment, Policy, Project, Version

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
    metrics: dict[str, Any] | None


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
    .order_by(Project.name, Policy.name)
)


def read_policy_metrics(connection: Connection, project_id: str | None) -> list[PolicyMetrics]:
    """Return the policies of one project, or of all when `project_id` is None."""
    query = _POLICY_METRICS if project_id is None else _POLICY_METRICS.where(Policy.project_id == project_id)
    return [PolicyMetrics(*row) for row in connection.execute(query)]


def render(telemetry: Telemetry, policies: Sequence[PolicyMetrics], rollouts: Sequence[RolloutCount] = ()) -> bytes:
    """Return the page in Prometheus' text format.

    It shows the given policies and their projects; the request times are those of the whole process.
    """
    registry = CollectorRegistry()
    registry.register(PageCollector(telemetry, policies, rollouts))
    return generate_latest(registry)


class PageCollector(Collector):
    def __init__(
        self, telemetry: Telemetry, policies: Sequence[PolicyMetrics], rollouts: Sequence[RolloutCount]
    ) -> None:
        self._telemetry, self._policies, self._rollouts = telemetry, policies, rollouts
        self._labels = {policy.policy_id: (policy.project, policy.policy) for policy in policies}

    def describe(self) -> Iterable[Metric]:
        return ()  # otherwise the registry would collect once more to learn the names

    def collect(self) -> Iterator[Metric]:
        families = [
            *self._turns_and_feedback(),
            *self._rollout_counts(),
            *self._lengths(),
            *self._requests(),
            *self._versions(),
        ]
        yield from families
        reserved = {family.name + suffix for family in families for suffix in SUFFIXES}
        yield from update_metrics(self._policies, reserved)

    def _turns_and_feedback(self) -> Iterator[Metric]:
        projects = {policy.project_id: policy.project for policy in self._policies}
        turns = CounterMetricFamily("attune_turns", "Replies that ended, by how.", labels=(*POLICY_LABELS, "state"))
        for (policy_id, state), count in self._telemetry.turns.items():
            if policy_id in self._labels:
                turns.add_metric((*self._labels[policy_id], state), count)
        feedback = CounterMetricFamily("attune_feedback", "Feedback put on record.", labels=("project", "kind"))
        for (project_id, kind), count in self._telemetry.feedback.items():
            if project_id in projects:
                feedback.add_metric((projects[project_id], kind), count)
        yield from (turns, feedback)

    def _rollout_counts(self) -> Iterator[Metric]:
        """Rollouts on record, over all processes."""
        labels = (*POLICY_LABELS, "origin")
        rollouts = CounterMetricFamily("attune_rollouts", "Rollouts on record, by state.", labels=(*labels, "state"))
        tokens = CounterMetricFamily("attune_rollout_tokens", "Tokens that they hold.", labels=labels)
        num_tokens: Counter[tuple[str, ...]] = Counter()
        for policy_id, origin, state, count, size in self._rollouts:
            if policy_id in self._labels:
                rollouts.add_metric((*self._labels[policy_id], origin, state), count)
                num_tokens[*self._labels[policy_id], origin] += size
        for values, size in num_tokens.items():
            tokens.add_metric(values, size)
        yield from (rollouts, tokens)

    def _lengths(self) -> Iterator[Metric]:
        mean = GaugeMetricFamily(
            "attune_length_penalty_mean", "0 in range, 1 far outside; last 1,000.", labels=POLICY_LABELS
        )
        p95 = GaugeMetricFamily(
            "attune_response_length_p95", "Tokens, of the last 1,000 replies.", labels=POLICY_LABELS
        )
        out = CounterMetricFamily("attune_replies_out_of_range", "Replies too short or too long.", labels=POLICY_LABELS)
        for policy_id, values in self._labels.items():
            if (lengths := self._telemetry.lengths.get(policy_id)) is not None:
                mean.add_metric(values, lengths.mean_penalty)
                p95.add_metric(values, lengths.p95)
                out.add_metric(values, lengths.out_of_range)
        yield from (mean, p95, out)

    def _requests(self) -> Iterator[Metric]:
        for family in self._telemetry.requests.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def _versions(self) -> Iterator[Metric]:
        serving = GaugeMetricFamily("attune_version", "The serving version's number.", labels=POLICY_LABELS)
        trained = GaugeMetricFamily(
            "attune_trained_version", "The newest trained version's number.", labels=POLICY_LABELS
        )
        for policy in self._policies:
            serving.add_metric(self._labels[policy.policy_id], policy.serving)
            if policy.trained is not None:
                trained.add_metric(self._labels[policy.policy_id], policy.trained)
        yield from (serving, trained)


def update_metrics(policies: Sequence[PolicyMetrics], reserved: set[str]) -> Iterator[Metric]:
    """Yield the metrics of the newest trained versions, as gauges.

    A metric whose exported name is reserved is left out. Where two metrics have the same exported name, the first one
    is kept.
    """
    families: dict[str, tuple[str, GaugeMetricFamily]] = {}
    for policy in policies:
        for metric, value in sorted((policy.metrics or {}).items()):
            name = exported_name(metric)
            if name in reserved or not isinstance(value, (int, float)):
                continue
            if name not in families:
                documentation = f"{metric}, of the newest trained version."
                families[name] = (metric, GaugeMetricFamily(name, documentation, labels=POLICY_LABELS))
            if families[name][0] == metric:
                families[name][1].add_metric((policy.project, policy.policy), value)
    yield from (family for _, family in families.values())


def exported_name(metric: str) -> str:
    """Example: "actor/ppo_kl" -> "attune_actor_ppo_kl" """
    return "attune_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
