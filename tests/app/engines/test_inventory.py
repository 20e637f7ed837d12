"""Which versions engines hold: also those that open episodes are pinned to, and no more of these than others."""

import pytest
from sqlalchemy import update

from app.engines import inventory
from app.models import Deployment, Episode, Policy, Version, VersionState, new_id
from tests.support import episodes
from tests.support.deployment import Harness

KEEP = 2


async def add_versions(harness: Harness, policy: Policy, count: int) -> list[Version]:
    """Add versions 1 to `count`, the last of which serves, and which was preceded by the one before it."""
    versions = [
        Version(
            id=new_id("ver"),
            policy_id=policy.id,
            number=number,
            parent_id=policy.head_version_id,
            state=VersionState.SUPERSEDED,
            adapter_name=f"{policy.name}-v{number}",
            adapter_path=f"/nowhere/{policy.name}-v{number}",
            live_at=float(number),
        )
        for number in range(1, count + 1)
    ]
    async with harness.db.write() as session:
        session.add_all(versions)
        await session.flush()
        deployment = await session.get_one(Deployment, policy.id)
        deployment.version_id, deployment.previous_version_id = versions[-1].id, versions[-2].id
    return versions


async def begin(harness: Harness, version: Version, rule: str = "pin", policy: str = "shop") -> str:
    """Create an episode that this version has answered first. Return its id."""
    episode = await episodes.create(harness, policy=policy, version=rule)
    async with harness.db.write() as session:
        row = update(Episode).where(Episode.id == episode["id"])
        await session.execute(row.values(start_version_id=version.id))
    return str(episode["id"])


async def wanted(harness: Harness) -> list[int]:
    async with harness.db.read() as session:
        return [version.number for version in await inventory.wanted_versions(session, KEEP)]


@pytest.mark.parametrize(("rule", "numbers"), [("pin", [1, 5, 6]), ("leash", [5, 6]), ("follow", [5, 6])])
async def test_version_of_a_pinned_episode_is_held_while_it_is_open(
    harness: Harness, rule: str, numbers: list[int]
) -> None:
    versions = await add_versions(harness, await harness.policy(), 6)
    id = await begin(harness, versions[0], rule)
    assert await wanted(harness) == numbers
    await episodes.end(harness, id)
    assert await wanted(harness) == [5, 6]


async def test_version_that_was_rolled_back_is_not_held(harness: Harness) -> None:
    versions = await add_versions(harness, await harness.policy(), 6)
    await begin(harness, versions[0])
    async with harness.db.write() as session:
        rolled_back = update(Version).where(Version.id == versions[0].id)
        await session.execute(rolled_back.values(state=VersionState.ROLLED_BACK))
    assert await wanted(harness) == [5, 6]


async def test_pinned_episodes_hold_no_more_versions_than_are_kept(harness: Harness) -> None:
    versions = await add_versions(harness, await harness.policy(), 8)
    for version in versions[:5]:
        await begin(harness, version)
        await begin(harness, version)
    assert await wanted(harness) == [4, 5, 7, 8], "the newest ones"


async def test_episodes_of_one_policy_take_no_place_of_another(harness: Harness) -> None:
    versions = await add_versions(harness, await harness.policy(), 6)
    await begin(harness, versions[0])
    created = await harness.api.post("/v1/policies", json={"name": "support"})
    others = await add_versions(harness, await harness.get(Policy, created.json()["id"]), 7)
    for version in others[1:5]:
        await begin(harness, version, policy="support")
    async with harness.db.read() as session:
        held = {version.id for version in await inventory.wanted_versions(session, KEEP)}
    assert versions[0].id in held
    assert [version.number for version in others if version.id in held] == [4, 5, 6, 7]
