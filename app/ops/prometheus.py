"""Telemetry and standings → Prometheus' text."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from app.core.telemetry import Telemetry
from app.ops.policy_metrics import Standing

POLICY = ("project", "policy")
Rolled = tuple[str, str, str, int, int]  # policy id, origin, state, how many, their tokens
SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")


def render(telemetry: Telemetry, standings: Sequence[Standing], rolled: Sequence[Rolled] = ()) -> bytes:
    """Of the policies that are named, and of their projects. Requests are the whole process's."""
    registry = CollectorRegistry()
    registry.register(Page(telemetry, standings, rolled))
    return generate_latest(registry)


class Page(Collector):
    def __init__(self, telemetry: Telemetry, standings: Sequence[Standing], rolled: Sequence[Rolled]) -> None:
        self._telemetry, self._standings, self._rolled = telemetry, standings, rolled

    def describe(self) -> Iterable[Metric]:
        return ()  # the registry would collect once more to see what is here

    def collect(self) -> Iterator[Metric]:
        ours = [*self._counted(), *self._rollouts(), *self._lengths(), self._requests(), *self._versions()]
        yield from ours
        yield from updates(self._standings, taken={family.name + suffix for family in ours for suffix in SUFFIXES})

    def _counted(self) -> Iterator[Metric]:
        policies = {one.policy_id: (one.project, one.policy) for one in self._standings}
        projects = {one.project_id: one.project for one in self._standings}
        turns = CounterMetricFamily("attune_turns", "Replies that ended, by how.", labels=(*POLICY, "state"))
        for (policy_id, state), count in self._telemetry.turns.items():
            if policy_id in policies:
                turns.add_metric((*policies[policy_id], state), count)
        feedback = CounterMetricFamily("attune_feedback", "Feedback put on record.", labels=("project", "kind"))
        for (project_id, kind), count in self._telemetry.feedback.items():
            if project_id in projects:
                feedback.add_metric((projects[project_id], kind), count)
        yield from (turns, feedback)

    def _rollouts(self) -> Iterator[Metric]:
        """What the learner asked for itself, over all processes: as it is on record."""
        policies = {one.policy_id: (one.project, one.policy) for one in self._standings}
        labels = (*POLICY, "origin")
        ended = CounterMetricFamily("attune_rollouts", "Rollouts on record, by state.", labels=(*labels, "state"))
        tokens = CounterMetricFamily("attune_rollout_tokens", "Tokens that they hold.", labels=labels)
        spent: Counter[tuple[str, ...]] = Counter()
        for policy_id, origin, state, count, size in self._rolled:
            if policy_id in policies:
                ended.add_metric((*policies[policy_id], origin, state), count)
                spent[*policies[policy_id], origin] += size
        for named, size in spent.items():
            tokens.add_metric(named, size)
        yield from (ended, tokens)

    def _lengths(self) -> Iterator[Metric]:
        mean = GaugeMetricFamily("attune_length_penalty_mean", "0 in range, 1 far outside; last 1,000.", labels=POLICY)
        p95 = GaugeMetricFamily("attune_response_length_p95", "Tokens, of the last 1,000 replies.", labels=POLICY)
        out = CounterMetricFamily("attune_replies_out_of_range", "Replies too short or too long.", labels=POLICY)
        for one in self._standings:
            if (lengths := self._telemetry.lengths.get(one.policy_id)) is not None:
                mean.add_metric((one.project, one.policy), lengths.mean_penalty)
                p95.add_metric((one.project, one.policy), lengths.p95)
                out.add_metric((one.project, one.policy), lengths.out_of_range)
        yield from (mean, p95, out)

    def _requests(self) -> Metric:
        family = HistogramMetricFamily(
            "attune_request_seconds", "From a request's head to its reply's last byte.", labels=("route", "status")
        )
        for labels, durations in self._telemetry.requests.items():
            family.add_metric(labels, durations.buckets(), durations.sum)
        return family

    def _versions(self) -> Iterator[Metric]:
        serving = GaugeMetricFamily("attune_version", "The serving version's number.", labels=POLICY)
        trained = GaugeMetricFamily("attune_trained_version", "The newest trained version's number.", labels=POLICY)
        for one in self._standings:
            serving.add_metric((one.project, one.policy), one.serving)
            if one.trained is not None:
                trained.add_metric((one.project, one.policy), one.trained)
        yield from (serving, trained)


def updates(standings: Sequence[Standing], taken: set[str]) -> Iterator[Metric]:
    """The newest trained versions' metrics. Where a name is `taken`, or two names become one, the first one stays."""
    families: dict[str, tuple[str, GaugeMetricFamily]] = {}
    for one in standings:
        for metric, value in sorted((one.metrics or {}).items()):
            name = exported(metric)
            if name in taken or not isinstance(value, (int, float)):
                continue
            if name not in families:
                told = f"{metric}, of the newest trained version."
                families[name] = (metric, GaugeMetricFamily(name, told, labels=POLICY))
            if families[name][0] == metric:
                families[name][1].add_metric((one.project, one.policy), value)
    yield from (family for _, family in families.values())


def exported(metric: str) -> str:
    """Example: "actor/ppo_kl" -> "attune_actor_ppo_kl" """
    return "attune_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
