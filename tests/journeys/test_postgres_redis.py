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
from tests.journeys.opening import keys, open_on
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine
from tests.support.processes import processes, until

pytestmark = pytest.mark.parametrize("database_url", ["postgres"], indirect=True)


@pytest.fixture
async def served(settings: Settings, db: Database, engine: RunningEngine) -> AsyncIterator[Harness]:
    """A deployment whose rows, messages and limits are all shared, on the engine that all tests share."""
    with shared_redis() as url:
        settings = settings.model_copy(
            update={
                "broker_url": url,
                "limits_url": f"async+{url}",
                "batch_size": 24,
                "max_rater_share": 0.5,  # of eight people
                "max_conversation_share": 0.5,
                "lease_seconds": 20.0,
                "learning_rate": 2e-3,
                "kl_guard": 1.0,  # each update is to come home
                **keys(engine),
            }
        )
        yield await open_on(engine, settings, db)


@pytest.mark.engine
@pytest.mark.journey
@pytest.mark.postgres
async def test_training_loop_on_postgres_and_redis(served: Harness) -> None:
    async def live() -> bool:
        return (await served.serving()).number >= 1

    with processes(served.settings) as running:
        running.start("trainer", "worker", "publisher", "beat", "api")
        crowd = SimulatedUsers(running.settings, UserBehavior(users=8, seed=3))
        chatting = asyncio.create_task(crowd.run())
        try:
            await until(live, 180, "version 1 is live")
        finally:
            crowd.stop()
            await chatting
        answer = await ask(served, running.settings.url)
        limits = redis.Redis.from_url(served.settings.broker_url or "").keys("LIMITS*")
    assert crowd.stats.errors == []
    assert (crowd.stats.refused, crowd.stats.incomplete, crowd.stats.mislabelled) == (0, 0, 0)
    learned = [version for version in await served.all(Version) if version.live_at is not None and version.number]
    assert answer in {f"shop@v{version.number}" for version in learned}, "the next version may be there already"
    assert limits, "the API counts requests where all its processes see them"
    await check_rows(served)
    attested = await check_logprobs(served.db, served.settings)
    assert attested.replies > 20 and attested.mislabelled == 0, attested


async def ask(served: Harness, url: str) -> str:
    headers = {"authorization": f"Bearer {served.key}"}
    chat = {"model": "shop", "messages": [{"role": "user", "content": "When are you open?"}], "max_tokens": 60}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as api:
        reply = await api.post("/v1/chat/completions", json=chat)
    assert reply.status_code == 200, reply.text
    version: str = reply.headers["x-policy-version"]
    return version


async def check_rows(served: Harness) -> None:
    """They are in PostgreSQL, and every version learned from a batch of samples that no other used."""
    versions = [version for version in await served.all(Version) if version.number]
    async with served.db.read() as session:
        assert "PostgreSQL" in str(await session.scalar(text("SELECT version()")))
        assert await session.scalar(select(func.count()).select_from(Feedback)) >= served.settings.batch_size
        assert await session.scalar(select(func.count()).select_from(Turn)) >= served.settings.batch_size
    live_versions = [
        version for version in versions if version.live_at is not None
    ]  # the guard may refuse one before that
    assert live_versions and all(version.timings["probe_distance"] < 1e-3 for version in live_versions)
    trained = [sample for sample in await served.all(Sample) if sample.state == SampleState.TRAINED]
    assert len(trained) == served.settings.batch_size * len(versions)
    assert not (served.settings.home / "attune.db").exists() and not served.settings.broker_dir.exists()
