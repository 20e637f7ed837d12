"""What the workers count while they work."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.metrics_requests import Page
from workers.stage_metrics import measure_stage, worker_metrics


def exposed(*queues: str) -> Page:
    registry = CollectorRegistry()
    for metric in worker_metrics(queues, ("curate", "judge", "publish")):
        registry.register(metric)
    return Page(generate_latest(registry).decode())


def test_runs_of_a_stage_are_timed_by_their_result() -> None:
    before = exposed("attune")
    with measure_stage("curate"):
        pass
    with pytest.raises(ValueError), measure_stage("curate"):
        raise ValueError
    after = exposed("attune")
    for result in ("ok", "error"):
        labels = {"stage": "curate", "result": result}
        counts = [page("attune_stage_seconds_count", **labels) or 0 for page in (before, after)]
        assert counts[1] == counts[0] + 1
    assert (after("attune_stage_last_success_timestamp_seconds", stage="curate") or 0) > 1e9


def test_a_worker_shows_the_metrics_of_its_queues_only() -> None:
    assert not {"attune_judge_requests", "attune_evaluations"} & set(exposed("attune").families)
    assert "attune_judge_requests" in exposed("judge").families
    publisher = exposed("publish")
    assert publisher("attune_evaluations_total", result="rejected") is not None
    assert publisher("attune_stage_seconds_count", stage="publish", result="error") is not None
