"""Which version answers the later chats of an episode: `version` "follow", "leash" and "pin"."""

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.dialects import sqlite

from app.chat.episode_limits import GROUP_VERSION
from app.models import Engine, Episode, Policy, Version, VersionState
from tests.app.episodes.test_groups import forget, load_new_version, versions
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine


async def names(harness: Harness) -> list[str]:
    return [name for name, _ in await versions(harness)]


@pytest.mark.parametrize(("version", "later"), [("follow", "shop@v1"), ("leash", "shop@v0"), ("pin", "shop@v0")])
async def test_release_within_an_episode(harness: Harness, scripted: ScriptedEngine, version: str, later: str) -> None:
    episode = await episodes.create(harness, version=version)
    assert episode["version"] == version
    await episodes.chat(harness, episode)
    await load_new_version(harness, scripted)
    assert (await episodes.chat(harness, episode)).status_code == 200
    assert await names(harness) == ["shop@v0", later]


async def test_by_default_an_episode_follows_the_deployment(harness: Harness) -> None:
    assert (await episodes.create(harness))["version"] == "follow"


async def test_leash_ends_where_the_version_is_too_far_behind(harness: Harness, scripted: ScriptedEngine) -> None:
    async with harness.db.write() as session:
        await session.execute(update(Policy).values(settings={"trainer": {"max_staleness": 1}}))
    episode = await episodes.create(harness, version="leash")
    for _ in range(3):
        assert (await episodes.chat(harness, episode)).status_code == 200
        await load_new_version(harness, scripted)
    assert await names(harness) == ["shop@v0", "shop@v0", "shop@v2"]


async def unload(harness: Harness, adapter: str) -> None:
    async with harness.db.write() as session:
        engine = await session.get_one(Engine, "engine-0")
        engine.loaded = [name for name in engine.loaded if name != adapter]
    forget(harness)


@pytest.mark.parametrize(("version", "status"), [("leash", 200), ("pin", 503)])
async def test_version_that_no_engine_has_any_more(
    harness: Harness, scripted: ScriptedEngine, version: str, status: int
) -> None:
    await load_new_version(harness, scripted)
    episode = await episodes.create(harness, version=version)
    await episodes.chat(harness, episode)
    await load_new_version(harness, scripted)
    await unload(harness, "shop-v1")
    answer = await episodes.chat(harness, episode)
    assert answer.status_code == status
    if status == 503:
        assert "pinned" in answer.text and await names(harness) == ["shop@v1"]
    else:
        assert await names(harness) == ["shop@v1", "shop@v2"]


@pytest.mark.parametrize(("version", "status"), [("leash", 200), ("pin", 503)])
async def test_version_that_was_rolled_back_answers_no_more(
    harness: Harness, scripted: ScriptedEngine, version: str, status: int
) -> None:
    await load_new_version(harness, scripted)
    episode = await episodes.create(harness, version=version)
    await episodes.chat(harness, episode)
    await load_new_version(harness, scripted)
    async with harness.db.write() as session:
        rolled_back = update(Version).where(Version.number == 1).values(state=VersionState.ROLLED_BACK)
        await session.execute(rolled_back)
    forget(harness)
    assert (await episodes.chat(harness, episode)).status_code == status


async def test_request_that_names_a_version_is_stronger(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness, version="pin")
    await episodes.chat(harness, episode)
    await load_new_version(harness, scripted)
    await episodes.chat(harness, episode, model="shop@v1")
    assert await names(harness) == ["shop@v0", "shop@v1"]


async def test_other_rules_are_refused(harness: Harness) -> None:
    answer = await harness.api.post("/v1/episodes", json={"policy": "shop", "version": "newest"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "version")


async def test_version_of_the_group_is_found_by_an_index_of_groups(harness: Harness) -> None:
    """SQLite would otherwise read all episodes of the project in their order, for the first chat of each attempt."""
    if not harness.db.embedded:
        pytest.skip("PostgreSQL's plan depends on the statistics of the table")
    query = select(GROUP_VERSION).select_from(Episode).where(Episode.id == "ep-1")
    sql = query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
    async with harness.db.read() as session:
        plan = (await session.execute(text(f"EXPLAIN QUERY PLAN {sql}"))).all()
    assert any("ix_episodes_of_group (project_id=? AND group_id=?)" in step.detail for step in plan), plan
