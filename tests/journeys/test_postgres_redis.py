"""The training loop on PostgreSQL and Redis: chats, feedback, one update, and the next version answers."""

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest
import redis
from sqlalchemy import func, select, text

from app.core.database import Database
from app.core.settings import Settings
from app.models import Feedback, Sample, SampleState, Turn, Version
from demo.recompute_logprobs import check_logprobs
from demo.simulate import SimulatedUsers, UserBehavior
from tests.journeys.brokers import shared_redis
from tests.journeys.deployments import create_deployment, engine_keys
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine
from tests.support.processes import PATIENCE_SECONDS, processes, until

pytestmark = pytest.mark.parametrize("database_url", ["postgres"], indirect=True)


@pytest.fixture
async def deployment(settings: Settings, db: Database, engine: RunningEngine) -> AsyncIterator[Harness]:
    """Yield a deployment with its rows, messages and rate limits in PostgreSQL and Redis, on the shared engine."""
    with shared_redis() as url:
        settings = settings.replace(
            {
                "broker.url": url,
                "limits.url": f"async+{url}",
                "trainer.batch_size": 24,
                "trainer.max_batch_size": 24,
                "raters.max_rater_share": 0.5,  # there are eight users
                "raters.max_conversation_share": 0.5,
                "workers.lease_seconds": 20.0,
                "trainer.optim.lr": 2e-3,
                "trainer.kl_guard": 1.0,  # every update must be released
                **engine_keys(engine),
            }
        )
        yield await create_deployment(engine, settings, db)


@pytest.mark.engine
@pytest.mark.journey
@pytest.mark.postgres
async def test_training_loop_on_postgres_and_redis(deployment: Harness) -> None:
    async def is_live() -> bool:
        return (await deployment.serving()).number >= 1

    with processes(deployment.settings) as running:
        running.start("trainer", "worker", "publisher", "beat", "api")
        users = SimulatedUsers(running.settings, UserBehavior(users=8, seed=3))
        chatting = asyncio.create_task(users.run())
        try:
            await until(is_live, PATIENCE_SECONDS, "version 1 is live")
        finally:
            users.stop()
            await chatting
        answer = await chat(deployment, running.settings.local_url)
        limits = redis.Redis.from_url(deployment.settings.broker.url or "").keys("LIMITS*")
    assert users.stats.errors == []
    assert (users.stats.refused, users.stats.incomplete, users.stats.mislabelled) == (0, 0, 0)
    released = [version for version in await deployment.all(Version) if version.live_at is not None and version.number]
    assert answer in {f"shop@v{version.number}" for version in released}, "a later version may serve already"
    assert limits, "requests are counted in Redis, for all API processes"
    await check_rows(deployment)
    logprobs = await check_logprobs(deployment.db, deployment.settings)
    assert logprobs.replies > 20 and logprobs.mislabelled == 0, logprobs


async def chat(deployment: Harness, url: str) -> str:
    headers = {"authorization": f"Bearer {deployment.key}"}
    body = {"model": "shop", "messages": [{"role": "user", "content": "When are you open?"}], "max_tokens": 60}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as api:
        reply = await api.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    version: str = reply.headers["x-policy-version"]
    return version


async def check_rows(deployment: Harness) -> None:
    """Check that the rows are in PostgreSQL, and that each version learned from samples that no other version used."""
    versions = [version for version in await deployment.all(Version) if version.number]
    async with deployment.db.read() as session:
        assert "PostgreSQL" in str(await session.scalar(text("SELECT version()")))
        for model in (Feedback, Turn):
            count = await session.scalar(select(func.count()).select_from(model))
            assert count is not None and count >= deployment.settings.trainer.batch_size
    live_versions = [
        version for version in versions if version.live_at is not None
    ]  # the KL guard may reject a version
    assert live_versions and all(version.timings["probe_distance"] < 1e-3 for version in live_versions)
    trained = [sample for sample in await deployment.all(Sample) if sample.state == SampleState.TRAINED]
    assert len(trained) == deployment.settings.trainer.batch_size * len(versions)
    assert not (deployment.settings.home / "attune.db").exists() and not deployment.settings.broker_dir.exists()
