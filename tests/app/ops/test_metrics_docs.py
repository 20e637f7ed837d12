"""docs/metrics.md: its examples are valid, and every metric that it names exists."""

import re
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from app.cli.server import build_processes
from app.core.settings import REPOSITORY, Settings
from app.core.telemetry import Telemetry
from app.models import Origin, Rollout, RolloutState
from tests.app.chat.test_endpoints import ask
from tests.support.deployment import Harness
from tests.support.metrics_requests import page, serve_with_settings
from tests.support.scripted_engine import ScriptedEngine
from tests.support.settings import is_variable

TEXT = (REPOSITORY / "docs" / "metrics.md").read_text()
SCRAPE, RULES = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
NAMES = set(re.findall(r"\battune_[a-z0-9_]*[a-z0-9]\b", TEXT))
OF_API = TEXT.partition("### API\n")[2].partition("\n### Workers")[0]
API_NAMES = set(re.findall(r"\battune_[a-z0-9_]*[a-z0-9]\b", OF_API))


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


async def test_every_documented_metric_is_on_the_page(harness: Harness, scripted: ScriptedEngine) -> None:
    await harness.version(metrics={"reward_shaping/ratio": 0.1, "actor/ppo_kl": 0.01})
    async with serve_with_settings(harness, length_range=(30, 80)) as range_harness:
        turn = (await ask(range_harness)).json()["id"]
        await range_harness.vote(turn)
        await group_sample(harness)
        telemetry = range_harness.api._transport.app.services.get(Telemetry)  # type: ignore[attr-defined]
        telemetry.record_unmatched((await harness.policy()).project_id, "langfuse", "unknown_reply")
        samples = await page(range_harness)
    names = {name for name, _ in samples.samples} | set(samples.families)
    assert not API_NAMES - names
    assert len(API_NAMES) == 14


async def group_sample(harness: Harness) -> None:
    turn = await harness.turn(origin=Origin.GROUP_SAMPLE, choice_index=1)
    values = {"policy_id": turn.policy_id, "origin": turn.origin, "choice_index": 1, "due_at": 0.0, "expires_at": 0.0}
    async with harness.db.write() as session:
        session.add(Rollout(id=turn.id, state=RolloutState.DONE, tokens=2, **values))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_are_valid(rule: dict[str, Any]) -> None:
    assert set(rule) == {"alert", "expr", "for", "annotations"}
    assert set(re.findall(r"attune_\w+", rule["expr"])) <= NAMES
    assert re.fullmatch(r"\d+[mh]", rule["for"]) and rule["annotations"]["summary"]
    assert rule["expr"].count("(") == rule["expr"].count(")")


def test_scrape_config_names_the_ports_and_a_bearer_token() -> None:
    job, roles = SCRAPE["scrape_configs"]
    children = build_processes(Settings())[1:]
    ports = [child.environment["ATTUNE_OBSERVABILITY__METRICS_PORT"] for child in children]
    assert roles["static_configs"][0]["targets"] == [f"127.0.0.1:{port}" for port in ports]
    assert all(f"{child.name} {port}" in TEXT for child, port in zip(children, ports, strict=True))
    assert job["authorization"]["type"] == "Bearer"
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{Settings().server.port}"]
    assert "metrics_path" not in job, "the documented default is correct"


def test_every_documented_setting_exists() -> None:
    named = set(re.findall(r"ATTUNE_([A-Z_]+[A-Z])", TEXT))
    assert all(is_variable(f"ATTUNE_{name}") for name in named) and len(named) == 9
