"""A shadow deployment on the real engine: the version gets the same prompt tokens as the serving version."""

import asyncio
from pathlib import Path

import httpx2
import pytest

from alignment.config.rewards import RewardsConfig
from alignment.release.shadow import ShadowConfig
from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import DEMO_MODEL, Settings
from app.inference.sglang.client import SGLangClient
from app.main import create_app
from app.models import Judgement, Origin, Turn, Version, VersionState
from tests.benchmarks.swap_versions import make_versions
from tests.benchmarks.swap_versions import publish as export
from tests.journeys.deployments import create_deployment, engine_keys
from tests.journeys.test_rollouts import QUESTION
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine
from tests.support.judgements import ScriptedEndpoint
from workers.curate import curate
from workers.judging.judge import judge
from workers.release.adapter_sync import unload_unused_adapters
from workers.release.evaluate import evaluate
from workers.release.publish import check_shadow_deployments
from workers.rollouts.sampler import sample_rollouts

pytestmark = [pytest.mark.engine, pytest.mark.journey]
USERS = 8


def make_settings(tmp_path: Path, engine: RunningEngine, url: str) -> Settings:
    """Return settings with which eight unanimous pairs decide. Latency is ignored, because the machine is shared."""
    shadow = {"share": 1.0, "alpha": 0.45, "margin": 0.5, "min_turns": 4, "min_rated": 4, "max_latency_ratio": 1e6}
    sources = {"sources": [{"type": "explicit"}, {"type": "http", "url": url}]}
    return Settings(
        home=tmp_path / "home",
        policy="stage",
        model=str(DEMO_MODEL),
        release={"shadow": ShadowConfig.model_validate(shadow | {"max_length_ratio": 1e6})},
        rewards=RewardsConfig.model_validate(sources),
        **engine_keys(engine),
    )


async def test_shadow_version_is_judged_and_rejected_when_it_is_worse(tmp_path: Path, engine: RunningEngine) -> None:
    reward_service = ScriptedEndpoint(lambda body: {"reward": -1.0 if body["turn"]["model"] == "stage@v1" else 1.0})
    with reward_service.serve() as url:
        settings = make_settings(tmp_path, engine, url)
        settings.home.mkdir()
        await asyncio.to_thread(upgrade, settings.database_url)
        db = Database(settings.database_url)
        client = SGLangClient(engine.spec.url, engine.spec.api_key, engine.spec.admin_key)
        try:
            await run_in_shadow(await create_deployment(engine, settings, db), tmp_path)
            assert "stage-v1" not in await client.list_adapters()
        finally:
            await client.unload_adapter("stage-v1")
            await client.aclose()
            await db.close()


async def run_in_shadow(harness: Harness, tmp_path: Path) -> None:
    db, settings = harness.db, harness.settings
    [unpublished] = await asyncio.to_thread(make_versions, tmp_path, DEMO_MODEL, 1)
    version_id = await export(db, settings, (await harness.policy()).id, unpublished)
    assert await evaluate(db, settings, "me") == 1
    assert (await harness.get(Version, version_id)).state == VersionState.SHADOW
    app, auth = create_app(settings), {"authorization": f"Bearer {harness.key}"}
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://attune", headers=auth, timeout=120) as api,
    ):
        for number in range(USERS):
            body = {"model": "stage", "messages": QUESTION, "max_tokens": 16, "user": f"user-{number}"}
            answer = await api.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.headers["x-policy-version"]) == (200, "stage@v0")
    await curate(db, settings)
    assert await sample_rollouts(db, settings, "me") == USERS
    await curate(db, settings)
    await judge(db, settings, "me")
    turns = {turn.id: turn for turn in await harness.all(Turn)}
    shadow_turns = [turn for turn in turns.values() if turn.origin == Origin.SHADOW]
    assert len(shadow_turns) == USERS and {turn.version_id for turn in shadow_turns} == {version_id}
    for turn in shadow_turns:
        assert turn.exclusion_reason is None
        assert await harness.prompt_ids(turn.id) == await harness.prompt_ids(turn.shadow_of_id or "")
        assert len(turn.logprobs or ()) == len(turn.output_ids or ()) > 0
    assert len(await harness.all(Judgement)) == 2 * USERS
    assert await check_shadow_deployments(db, settings) == 1
    row: Version = await harness.get(Version, version_id)
    assert row.state == VersionState.REJECTED and "worse in 8" in (row.reason or "")
    assert (await harness.policy()).head_version_id == (await harness.serving()).id
    await unload_unused_adapters(db, settings)
