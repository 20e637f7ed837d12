"""Write the four dashboards beside this file: `python deploy/grafana/build.py`. The data source is a variable.

A panel is (title, unit, queries), a query (expression, legend); panels are laid out two in a row.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
WIDTH, HEIGHT = 12, 8
Query = tuple[str, str]
Panel = tuple[str, str, Sequence[Query]]


def quantile(q: float, metric: str, *by: str) -> str:
    return f"histogram_quantile({q:g}, sum by ({', '.join(('le', *by))}) (rate({metric}_bucket[5m])))"


def rate(metric: str, *by: str, where: str = "") -> str:
    return f"sum by ({', '.join(by)}) (rate({metric}{where}[5m]))"


OF_POLICY = '{project=~"$project", policy=~"$policy"}'
POLICY_LEGEND = "{{project}}/{{policy}}"
DASHBOARDS: dict[str, tuple[str, Sequence[Panel]]] = {
    "service": (
        "Attune: service",
        [
            ("Requests", "reqps", [(rate("attune_request_seconds_count", "route", "status"), "{{route}} {{status}}")]),
            ("Requests in flight", "short", [("sum by (route) (attune_inflight)", "{{route}}")]),
            (
                "First token of streamed replies",
                "s",
                [(quantile(q, "attune_ttft_seconds", "route"), f"{{{{route}}}} p{q * 100:g}") for q in (0.5, 0.95)],
            ),
            (
                "Whole request",
                "s",
                [(quantile(q, "attune_request_seconds", "route"), f"{{{{route}}}} p{q * 100:g}") for q in (0.5, 0.95)],
            ),
            (
                "Replies",
                "ops",
                [(rate("attune_turns_total", "policy", "state", where=OF_POLICY), "{{policy}} {{state}}")],
            ),
            ("Feedback", "ops", [(rate("attune_feedback_total", "project", "kind"), "{{project}} {{kind}}")]),
            ("Database connections in use", "short", [("max by (instance) (attune_db_pool_in_use)", "{{instance}}")]),
            (
                "Memory of the processes",
                "bytes",
                [
                    (
                        "process_resident_memory_bytes * on (instance) group_left (role) attune_build_info",
                        "{{role}} {{instance}}",
                    )
                ],
            ),
            ("Webhook deliveries that wait", "short", [("max(attune_webhook_pending)", "deliveries")]),
            ("Endpoints that fail", "short", [("max(attune_webhook_failing)", "endpoints")]),
        ],
    ),
    "learning": (
        "Attune: learning",
        [
            (
                "Samples that wait",
                "short",
                [(f"max by (policy, state) (attune_samples{OF_POLICY})", "{{policy}} {{state}}")],
            ),
            (
                "Learning mode",
                "short",
                [(f"max by (policy, mode) (attune_learning_mode{OF_POLICY})", "{{policy}} {{mode}}")],
            ),
            ("Oldest work of each stage", "s", [("max by (stage) (attune_queue_oldest_seconds)", "{{stage}}")]),
            ("Age of the oldest batch", "s", [("max(attune_batch_age_seconds)", "batch")]),
            (
                "Runs of the stages",
                "ops",
                [(rate("attune_stage_seconds_count", "stage", "result"), "{{stage}} {{result}}")],
            ),
            ("Duration of the stages, p95", "s", [(quantile(0.95, "attune_stage_seconds", "stage"), "{{stage}}")]),
            ("Updates in an hour", "short", [("sum by (result) (increase(attune_updates_total[1h]))", "{{result}}")]),
            ("Phases of an update, p50", "s", [(quantile(0.5, "attune_update_seconds", "phase"), "{{phase}}")]),
            (
                "KL to the parent",
                "none",
                [(f"max by (project, policy) (attune_actor_ppo_kl{OF_POLICY})", POLICY_LEGEND)],
            ),
            (
                "KL to the base model",
                "none",
                [(f"max by (project, policy) (attune_reference_kl{OF_POLICY})", POLICY_LEGEND)],
            ),
            (
                "Mean reward",
                "none",
                [(f"max by (project, policy) (attune_critic_score_mean{OF_POLICY})", POLICY_LEGEND)],
            ),
            ("Judgements", "ops", [(rate("attune_judge_requests_total", "source", "result"), "{{source}} {{result}}")]),
        ],
    ),
    "release": (
        "Attune: release",
        [
            ("Serving version", "short", [(f"max by (project, policy) (attune_version{OF_POLICY})", POLICY_LEGEND)]),
            (
                "Newest trained version",
                "short",
                [(f"max by (project, policy) (attune_trained_version{OF_POLICY})", POLICY_LEGEND)],
            ),
            (
                "Evaluations in an hour",
                "short",
                [("sum by (result) (increase(attune_evaluations_total[1h]))", "{{result}}")],
            ),
            (
                "Trained to served",
                "s",
                [
                    (
                        f"histogram_quantile({q:g}, sum by (le) "
                        '(rate(attune_publish_seconds_bucket{phase="trained_to_served"}[1h])))',
                        f"p{q * 100:g}",
                    )
                    for q in (0.5, 0.99)
                ],
            ),
            ("Phases of a release, p95", "s", [(quantile(0.95, "attune_publish_seconds", "phase"), "{{phase}}")]),
            (
                "Evidence of the canary (1 decides)",
                "none",
                [(f"max by (policy, test) (attune_canary_evidence{OF_POLICY})", "{{policy}} {{test}}")],
            ),
            (
                "KL guard: alarms in a row",
                "short",
                [(f"max by (project, policy) (attune_kl_alarms{OF_POLICY})", POLICY_LEGEND)],
            ),
            (
                "Replies out of range",
                "ops",
                [(rate("attune_replies_out_of_range_total", "policy", where=OF_POLICY), "{{policy}}")],
            ),
        ],
    ),
    "engines": (
        "Attune: engines",
        [
            ("Engines by state", "short", [("max by (state) (attune_engines)", "{{state}}")]),
            ("Ready", "short", [("max by (engine) (attune_engine_up)", "{{engine}}")]),
            ("Versions loaded", "short", [("max by (engine) (attune_engine_loaded)", "{{engine}}")]),
            (
                "Starts in an hour",
                "short",
                [("sum by (engine) (increase(attune_engine_starts_total[1h]))", "{{engine}}")],
            ),
            (
                "Ends while a version was loaded, in an hour",
                "short",
                [("sum by (engine) (increase(attune_engine_load_crashes_total[1h]))", "{{engine}}")],
            ),
            (
                "Rollouts in the engines' spare time",
                "ops",
                [(rate("attune_rollouts_total", "origin", "state"), "{{origin}} {{state}}")],
            ),
            ("Tokens of rollouts", "short", [(rate("attune_rollout_tokens_total", "origin"), "{{origin}}")]),
            (
                "Reply length, p95",
                "short",
                [(f"max by (project, policy) (attune_response_length_p95{OF_POLICY})", POLICY_LEGEND)],
            ),
        ],
    ),
}


def variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values(attune_version, {name})", "refId": name},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


def panel(index: int, content: Panel) -> dict[str, Any]:
    title, unit, queries = content
    return {
        "id": index + 1,
        "title": title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": WIDTH * (index % 2), "y": HEIGHT * (index // 2), "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(queries)
        ],
    }


def dashboard(name: str) -> dict[str, Any]:
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"attune-{name}",
        "title": title,
        "tags": ["attune"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "__inputs": [
            {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"},
        ],
        "templating": {"list": [variable("project"), variable("policy")]},
        "panels": [panel(index, content) for index, content in enumerate(panels)],
    }


def render(name: str) -> str:
    return json.dumps(dashboard(name), indent=2) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(render(name))
