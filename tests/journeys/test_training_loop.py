"""The training loop with the real trainer and the real engine: chats, feedback, updates, and a rollback."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import update

from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.models import Batch, BatchState, Engine, Sample, SampleState, Turn, Version, VersionState
from demo.recompute_logprobs import check_logprobs
from demo.simulate import SimulatedUsers, UserBehavior
from tests.journeys.opening import keys, open_on
from tests.support.deployment import Harness
from tests.support.engine_fixture import RunningEngine
from tests.support.processes import processes, until

UPDATES = 5


@pytest.fixture
async def small(tmp_path: Path, engine: RunningEngine) -> Harness:
    """A deployment on the embedded database and broker, on the engine that all tests share."""
    settings = Settings(
        home=tmp_path / "home",
        policy="shop",
        batch_size=64,
        learning_rate=2e-3,
        kl_guard=0.1,  # hardly an update is refused, and if one is, the others stand on what was before it
        **keys(engine),
    )
    settings.home.mkdir()
    await asyncio.to_thread(upgrade, settings.database)
    db = Database(settings.database)
    return await open_on(engine, settings, db)


@pytest.mark.engine
@pytest.mark.journey
async def test_training_loop_and_rollback(small: Harness, engine: RunningEngine) -> None:
    async def live() -> bool:
        return (await small.serving()).number >= UPDATES

    with processes(small.settings) as running:
        running.start("trainer", "worker", "publisher", "beat", "api")
        crowd = SimulatedUsers(running.settings, UserBehavior(users=16, seed=5))
        chatting = asyncio.create_task(crowd.run())
        try:
            await until(live, 420, f"{UPDATES} versions are live")
            await asyncio.sleep(5)
        finally:
            crowd.stop()
            await chatting
        tally = crowd.stats
        assert tally.errors == []
        assert (tally.refused, tally.incomplete, tally.mislabelled) == (0, 0, 0)
        await come_to_rest(small)
        await check_lineage(small)
        first, last = await approval(small, 0, 0), await approval(small, UPDATES - 1, 99)
        assert last > first + 0.1, f"approval went from {first:.0%} to {last:.0%}"
        await check_rollback(small, engine, running.settings.url)
        await check_learning_goes_on(small, running.settings)
    attested = await check_logprobs(small.db, small.settings)
    assert attested.replies > 200 and attested.mislabelled == 0, attested
    await check_that_attesting_can_fail(small)
    await small.db.close()


async def check_learning_goes_on(small: Harness, settings: Settings) -> None:
    """The next version is made on the one that was gone back to, with its optimizer and baseline."""
    good = await small.serving()
    newest = max(version.number for version in await small.all(Version))

    async def better() -> bool:
        return (await small.serving()).number > newest

    crowd = SimulatedUsers(settings, UserBehavior(users=16, seed=6))
    chatting = asyncio.create_task(crowd.run())
    try:
        await until(better, 240, "a version on top of the one that was rolled back to")
    finally:
        crowd.stop()
        await chatting
    assert (crowd.stats.refused, crowd.stats.incomplete, crowd.stats.mislabelled) == (0, 0, 0)
    versions = {version.id: version for version in await small.all(Version)}
    step, steps = await small.serving(), 0
    while step.id != good.id:
        assert step.parent_id is not None, "it was not made on the version that was gone back to"
        step, steps = versions[step.parent_id], steps + 1
    assert updates(await small.serving()) == updates(good) + steps


def updates(version: Version) -> int:
    """How many updates the trainer's state in the version's folder has seen."""
    state = Path(version.adapter_path or "") / "trainer" / "state.json"
    count: int = json.loads(state.read_text())["updates"]
    return count


async def check_that_attesting_can_fail(small: Harness) -> None:
    """Replies under another version's name are found out."""
    _, wrong, right, *_ = await line(small)
    async with small.db.write() as session:
        await session.execute(update(Turn).where(Turn.version_id == right.id).values(version_id=wrong.id))
    attested = await check_logprobs(small.db, small.settings)
    assert attested.mislabelled > 0


async def come_to_rest(small: Harness) -> None:
    """What was frozen when the last of the crowd left has been trained, and is home or not. Nobody chats any more."""

    async def idle() -> bool:
        under_way = (VersionState.TRAINED, VersionState.VERIFIED)
        return not any(batch.state == BatchState.OPEN for batch in await small.all(Batch)) and not any(
            version.state in under_way for version in await small.all(Version)
        )

    seconds = 0
    while seconds < 3:  # between two stations nothing is under way for a moment
        await until(idle, 180, "nothing is under way any more")
        await asyncio.sleep(1)
        seconds = seconds + 1 if await idle() else 0


async def approval(small: Harness, first: int, last: int) -> float:
    """Of all that these versions said together: of a hundred thumbs, ± 5 points."""
    from app.policies.repository import version_stats

    policy = await small.policy()
    async with small.db.read() as session:
        stats = await version_stats(session, policy.id)
    told = [stats[row.id] for row in await small.all(Version) if first <= row.number <= last and row.id in stats]
    rated = sum(one["rated"] for one in told)
    assert rated >= 30
    return sum(one["approval"] * one["rated"] for one in told if one["rated"]) / rated


async def line(small: Harness) -> list[Version]:
    """Oldest first, without those that the guard refused: learning went back to what served and left them aside."""
    versions = sorted(await small.all(Version), key=lambda version: version.number)
    return [version for version in versions if version.state != VersionState.REJECTED]


async def check_lineage(small: Harness) -> None:
    """Every version on its parent, proven on the engine, from samples that no other version used."""
    versions = await small.all(Version)
    assert all("KL to the version before it" in (v.reason or "") for v in versions if v.state == VersionState.REJECTED)
    for parent, version in pairwise(await line(small)):
        assert version.parent_id == parent.id
        if version.live_at is not None:
            assert version.timings["probe_distance"] < 1e-3
            assert version.metrics["training/off_policy/trajectory_staleness_worst"] <= 1
    trained = [sample for sample in await small.all(Sample) if sample.state == SampleState.TRAINED]
    assert len(trained) == small.settings.batch_size * (len(versions) - 1)


async def check_rollback(small: Harness, engine: RunningEngine, url: str) -> None:
    """One call, and the next reply is the old version's; no engine loads anything for it."""
    left = await small.serving()
    parent: Version = await small.get(Version, left.parent_id)
    before = await small.all(Engine)
    client = engine.connect()
    held = await client.list_adapters()
    headers = {"authorization": f"Bearer {small.key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as api:
        answer = await api.post("/v1/policies/shop/rollback", json={"reason": "the journey goes back"})
        assert answer.status_code == 200, answer.text
        chat = {"model": "shop", "messages": [{"role": "user", "content": "When are you open?"}], "max_tokens": 60}
        reply = await api.post("/v1/chat/completions", json=chat)
    assert reply.headers["x-policy-version"] == answer.json()["serving"] == f"shop@v{parent.number}"
    assert await client.list_adapters() == held
    await client.aclose()
    assert [(row.incarnation, row.loaded) for row in await small.all(Engine)] == [
        (row.incarnation, row.loaded) for row in before
    ]
    assert (await small.get(Version, left.id)).state == VersionState.ROLLED_BACK
    assert (await small.policy()).head_version_id == left.parent_id
