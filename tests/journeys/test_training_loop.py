"""The training loop with the real trainer and the real engine: chats, feedback, updates, and a rollback."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import update

from alignment.signals.proportions import Share
from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.models import Batch, BatchState, Engine, Sample, SampleState, Turn, Version, VersionState
from app.policies.version_statistics import read_statistics
from demo.recompute_logprobs import check_logprobs
from demo.simulate import SimulatedUsers, UserBehavior
from tests.journeys.deployments import create_deployment, engine_keys
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine
from tests.support.processes import PATIENCE_SECONDS, processes, until

UPDATES = 5


@pytest.fixture
async def deployment(tmp_path: Path, engine: RunningEngine) -> Harness:
    """Return a deployment on the embedded database and broker, on the shared engine."""
    settings = Settings(
        home=tmp_path / "home",
        policy="shop",
        trainer={"batch_size": 32, "max_batch_size": 32, "max_staleness": 1, "optim": {"lr": 2e-3}, "kl_guard": 0.1},
        **engine_keys(engine),
    )
    settings.home.mkdir()
    await asyncio.to_thread(upgrade, settings.database_url)
    db = Database(settings.database_url)
    return await create_deployment(engine, settings, db)


@pytest.mark.engine
@pytest.mark.journey
@pytest.mark.slow  # `make test` has the loop on PostgreSQL and Redis
@pytest.mark.timeout(1200)  # more than all that it waits for
async def test_training_loop_and_rollback(deployment: Harness, engine: RunningEngine) -> None:
    async def are_released() -> bool:
        released = [version for version in await deployment.all(Version) if version.live_at is not None]
        return len(released) > UPDATES  # with v0

    with processes(deployment.settings) as running:
        running.start("trainer", "worker", "publisher", "beat", "api")
        users = SimulatedUsers(running.settings, UserBehavior(users=16, seed=5))
        chatting = asyncio.create_task(users.run())
        try:
            await until(are_released, 420, f"{UPDATES} versions are released")
            await asyncio.sleep(5)
        finally:
            users.stop()
            await chatting
        stats = users.stats
        assert stats.errors == []
        assert (stats.refused, stats.incomplete, stats.mislabelled) == (0, 0, 0)
        await wait_until_idle(deployment)
        await check_lineage(deployment)
        print(f"\nvotes for replies: {await describe_approval(deployment)}")
        await check_rollback(deployment, engine, running.settings.local_url)
        await check_training_continues(deployment, running.settings)
    logprobs = await check_logprobs(deployment.db, deployment.settings)
    assert logprobs.replies >= UPDATES * deployment.settings.trainer.batch_size and not logprobs.mislabelled, logprobs
    await check_mislabelled_replies_are_detected(deployment)
    await deployment.db.close()


async def check_training_continues(deployment: Harness, settings: Settings) -> None:
    """Check that the next version starts from the version of the rollback, with its optimizer and baseline."""
    serving = await deployment.serving()
    newest = max(version.number for version in await deployment.all(Version))

    async def is_released() -> bool:
        return (await deployment.serving()).number > newest

    users = SimulatedUsers(settings, UserBehavior(users=16, seed=6))
    chatting = asyncio.create_task(users.run())
    try:
        await until(is_released, 240, "a version on top of the one that was rolled back to")
    finally:
        users.stop()
        await chatting
    assert (users.stats.refused, users.stats.incomplete, users.stats.mislabelled) == (0, 0, 0)
    versions = {version.id: version for version in await deployment.all(Version)}
    ancestor, steps = await deployment.serving(), 0
    while ancestor.id != serving.id:
        assert ancestor.parent_id is not None, "it does not descend from the version of the rollback"
        ancestor, steps = versions[ancestor.parent_id], steps + 1
    assert count_updates(await deployment.serving()) == count_updates(serving) + steps


def count_updates(version: Version) -> int:
    """Return the number of updates in the trainer's state of the version."""
    state = Path(version.adapter_path or "") / "trainer" / "state.json"
    count: int = json.loads(state.read_text())["updates"]
    return count


async def check_mislabelled_replies_are_detected(deployment: Harness) -> None:
    """Check that the recomputation detects replies with another version's name."""
    _, other, relabelled, *_ = await list_accepted_versions(deployment)
    async with deployment.db.write() as session:
        await session.execute(update(Turn).where(Turn.version_id == relabelled.id).values(version_id=other.id))
    logprobs = await check_logprobs(deployment.db, deployment.settings)
    assert logprobs.mislabelled > 0


async def wait_until_idle(deployment: Harness) -> None:
    """Wait until the last batch is trained, and its version released or rejected. The users have stopped chatting."""

    async def is_idle() -> bool:
        pending = (VersionState.TRAINED, VersionState.VERIFIED)
        return not any(batch.state == BatchState.OPEN for batch in await deployment.all(Batch)) and not any(
            version.state in pending for version in await deployment.all(Version)
        )

    seconds = 0
    while seconds < 3:  # between two stages nothing is open for a moment
        await until(is_idle, PATIENCE_SECONDS, "no batch or release is pending")
        await asyncio.sleep(1)
        seconds = seconds + 1 if await is_idle() else 0


async def describe_approval(deployment: Harness) -> str:
    """Return the approval of v0 and of the newest versions. It is shown only: `test_learning.py` is about learning."""
    async with deployment.db.read() as session:
        stats = await read_statistics(session, versions := await deployment.all(Version))
    shares = [
        Share(sum(round((row.approval or 0.0) * row.rated) for row in rows), sum(row.rated for row in rows))
        for rows in (
            [stats[version.id] for version in versions if not version.number],
            [stats[version.id] for version in versions if version.number >= UPDATES - 1],
        )
    ]
    return " → ".join(f"{share.successes} of {share.trials}" for share in shares)


async def list_accepted_versions(deployment: Harness) -> list[Version]:
    """Return the versions that were not rejected, the oldest first. Training continued from each of them."""
    versions = sorted(await deployment.all(Version), key=lambda version: version.number)
    return [version for version in versions if version.state != VersionState.REJECTED]


async def check_lineage(deployment: Harness) -> None:
    """Check each version's parent and delivery, and that no sample was used twice."""
    versions = await deployment.all(Version)
    assert all("KL to the version before it" in (v.reason or "") for v in versions if v.state == VersionState.REJECTED)
    for parent, version in pairwise(await list_accepted_versions(deployment)):
        assert version.parent_id == parent.id
        if version.live_at is not None:
            assert version.timings["probe_distance"] < 1e-3
            assert version.metrics["training/off_policy/trajectory_staleness_worst"] <= 1
    trained = [sample for sample in await deployment.all(Sample) if sample.state == SampleState.TRAINED]
    assert len(trained) == deployment.settings.trainer.batch_size * (len(versions) - 1)
    assert len({sample.turn_id for sample in trained}) == len(trained)


async def check_rollback(deployment: Harness, engine: RunningEngine, url: str) -> None:
    """Roll back with one call: the parent version generates the next reply, and no engine has to load it."""
    live = await deployment.serving()
    parent: Version = await deployment.get(Version, live.parent_id)
    engines = await deployment.all(Engine)
    client = engine.connect()
    adapters = await client.list_adapters()
    headers = {"authorization": f"Bearer {deployment.key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as api:
        answer = await api.post("/v1/policies/shop/rollback", json={"reason": "a test"})
        assert answer.status_code == 200, answer.text
        body = {"model": "shop", "messages": [{"role": "user", "content": "When are you open?"}], "max_tokens": 60}
        reply = await api.post("/v1/chat/completions", json=body)
    assert reply.headers["x-policy-version"] == answer.json()["serving"] == f"shop@v{parent.number}"
    assert await client.list_adapters() == adapters
    await client.aclose()
    assert [(row.incarnation, row.loaded) for row in await deployment.all(Engine)] == [
        (row.incarnation, row.loaded) for row in engines
    ]
    assert (await deployment.get(Version, live.id)).state == VersionState.ROLLED_BACK
    assert (await deployment.policy()).head_version_id == live.parent_id
