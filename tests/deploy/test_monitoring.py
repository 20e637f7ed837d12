"""deploy/prometheus and deploy/grafana: valid, and every series that they name is exposed by a role and documented."""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from app.core.settings import REPOSITORY
from app.ops.metrics import exported_name
from tests.app.chat.test_endpoints import ask
from tests.app.ops.test_metrics_docs import group_sample
from tests.conftest import skip_or_fail
from tests.support.deployment import Harness
from tests.support.metrics_requests import page, serve_with_settings
from tests.support.role_metrics import exposed_metrics, names_and_labels
from tests.support.scripted_engine import ScriptedEngine

PROMETHEUS, GRAFANA = REPOSITORY / "deploy" / "prometheus", REPOSITORY / "deploy" / "grafana"
GROUPS = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
TESTS = yaml.safe_load((PROMETHEUS / "alerts_test.yaml").read_text())["tests"]
DASHBOARDS = sorted(GRAFANA.glob("*.json"))
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
SERIES = re.compile(r"\b(?:attune|process)_\w+|\bup\b")
SELECTOR = re.compile(r"(\b(?:attune|process)_\w+|\bup\b)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|on|group_left) \(([^)]*)\)")
UPDATE_METRICS = {"actor/ppo_kl": 0.01, "reference_kl": 0.1, "critic/score/mean": 0.5, "reward_shaping/ratio": 0.1}


def load(path: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def expressions() -> Iterator[tuple[str, str, str]]:
    """Yield where each expression is, the expression, and the text that is shown with its labels."""
    for rule in RULES:
        yield rule["alert"], rule["expr"], rule["annotations"]["summary"]
    for path in DASHBOARDS:
        for panel in load(path)["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"]


def problems(expression: str, text: str, exposed: dict[str, set[str]]) -> list[str]:
    """Return the series and labels of an expression, and the labels of its text, that nothing exposes."""
    names = set(SERIES.findall(GROUPING.sub("", expression)))
    found = [name for name in names if name not in exposed]
    labels = SCRAPED.union(*(exposed.get(name, set()) for name in names))
    grouped = {label.strip() for group in GROUPING.findall(expression) for label in group.split(",")}
    shown = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
    found += sorted((grouped | shown) - labels)
    for name, selector in SELECTOR.findall(expression):
        own = exposed.get(name, set()) | SCRAPED
        found += [f"{name}{{{label}}}" for label in re.findall(r"(\w+)=~?", selector) if label not in own]
    return found


async def read_exposed(harness: Harness) -> dict[str, set[str]]:
    exposed = {"up": set(SCRAPED), **await exposed_metrics(harness)}
    await harness.version(metrics=UPDATE_METRICS)
    async with serve_with_settings(harness, length_range=(30, 80)) as used:
        turn = (await ask(used)).json()["id"]
        await ask(used, stream=True)
        await used.vote(turn)
        await group_sample(harness)
        text = (await used.api.get("/metrics")).text
    return exposed | names_and_labels(text)


async def test_every_series_of_the_alerts_and_dashboards_is_exposed(harness: Harness, scripted: ScriptedEngine) -> None:
    exposed = await read_exposed(harness)
    wrong = {where: found for where, query, text in expressions() if (found := problems(query, text, exposed))}
    assert wrong == {}
    assert problems('sum by (colour) (attune_nothing{state="x"})', "{{size}}", exposed) == [
        *("attune_nothing", "colour", "size", "attune_nothing{state}")
    ]


async def test_every_exposed_series_is_documented_and_every_documented_one_is_exposed(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    exposed = await read_exposed(harness)
    samples = await page(harness)
    of_updates = {name for name in samples.families if name in map(exported_name, UPDATE_METRICS)}
    suffixes = ("_bucket", "_count", "_sum")
    histograms = {name.removesuffix("_bucket") for name in exposed if name.endswith("_bucket")}
    parts = {histogram + suffix for histogram in histograms for suffix in suffixes}
    names = {name for name in (set(exposed) | histograms) - parts - of_updates if name.startswith("attune_")}
    text = (REPOSITORY / "docs" / "metrics.md").read_text().partition("## Prometheus")[2]
    rows = set(re.findall(r"^\| `(attune_\w+)` \|", text.partition("## Reply length")[0], re.MULTILINE))
    assert rows - {"attune_"} == names
    assert set(re.findall(r"\battune_[a-z0-9_]*[a-z0-9]\b", text)) <= names | of_updates


def promtool(*arguments: str) -> None:
    if shutil.which("promtool") is None:
        skip_or_fail("no promtool: apt-get install prometheus")
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, cwd=PROMETHEUS)
    assert result.returncode == 0, result.stdout + result.stderr


def test_rules_are_valid() -> None:
    promtool("check", "rules", "alerts.yaml")


def test_alerts_fire_on_their_faults_only() -> None:
    promtool("test", "rules", "alerts_test.yaml")


def test_each_alert_is_tested_and_has_a_runbook() -> None:
    names = [rule["alert"] for rule in RULES]
    fired = {test["alertname"] for part in TESTS for test in part.get("alert_rule_test", ()) if test["exp_alerts"]}
    assert fired == set(names) and len(names) == len(set(names))
    sections = re.split(r"^## ", (REPOSITORY / "docs" / "runbooks.md").read_text(), flags=re.MULTILINE)[1:]
    assert [section.split("\n")[0] for section in sections] == names
    for section in sections:
        assert all(f"**{part}**: " in section for part in ("Means", "Look at", "Do")), section
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_healthy_service_of_the_tests_has_every_series_of_the_rules() -> None:
    series = {re.split(r"[{ ]", item["series"])[0] for item in TESTS[0]["input_series"]}
    assert {name for rule in RULES for name in SERIES.findall(GROUPING.sub("", rule["expr"]))} == series


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_those_of_the_script(path: Any) -> None:
    build = runpy.run_path(str(GRAFANA / "build.py"))
    assert path.read_text() == build["render"](path.stem), "run python deploy/grafana/build.py"
    content = load(path)
    assert [panel["id"] for panel in content["panels"]] == list(range(1, len(content["panels"]) + 1))
    sources = re.findall(r'"uid": "(\$?\{?\w+\}?)"', json.dumps(content["panels"]))
    assert set(sources) == {"${DS_PROMETHEUS}"} and content["__inputs"][0]["name"] == "DS_PROMETHEUS"


def test_there_are_four_dashboards() -> None:
    assert [path.stem for path in DASHBOARDS] == ["engines", "learning", "release", "service"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_expressions_of_dashboards_are_valid_promql(path: Any, tmp_path: Any) -> None:
    queries = [target["expr"] for panel in load(path)["panels"] for target in panel["targets"]]
    rules = [{"record": f"test:query{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "rules.yaml"))
