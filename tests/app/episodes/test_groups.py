"""Groups: attempts at the same task, which start on one version."""

from typing import Any

import httpx2
import pytest

from app.deployments.version_router import VersionRouter
from app.models import Engine, Episode, RouteReason, Turn
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trained_versions import publish

GROUP = {"id": "ticket-7", "size": 2}


async def versions(harness: Harness) -> list[tuple[str, str]]:
    """Return the adapter and the route of each turn, the oldest first."""
    turns = sorted(await harness.all(Turn), key=lambda turn: turn.created_at)
    numbers = {}
    for turn in turns:
        numbers[turn.version_id] = (await harness.api.get(f"/v1/turns/{turn.id}/story")).json()["version"]
    return [(numbers[turn.version_id], turn.route_reason) for turn in turns]


async def test_group_is_recorded_and_listed(harness: Harness) -> None:
    attempts = [(await episodes.create(harness, task="refund", group=GROUP)) for _ in range(2)]
    other = await episodes.create(harness, task="refund")
    assert [attempt["group"] for attempt in (*attempts, other)] == [GROUP, GROUP, None]
    listed = (await harness.api.get("/v1/episodes", params={"group": "ticket-7"})).json()["data"]
    assert {row["id"] for row in listed} == {attempt["id"] for attempt in attempts}
    assert (await harness.api.get("/v1/episodes", params={"group": "none"})).json()["data"] == []


async def test_attempts_start_on_the_version_of_the_first_one(harness: Harness, scripted: ScriptedEngine) -> None:
    """A release between two attempts does not divide the group; later chats go where the deployment says."""
    first = await episodes.create(harness, group=GROUP)
    second = await episodes.create(harness, group=GROUP)
    alone = await episodes.create(harness)
    assert (await episodes.chat(harness, first)).status_code == 200
    await load_new_version(harness, scripted)
    for episode in (second, second, alone):
        assert (await episodes.chat(harness, episode)).status_code == 200
    assert await versions(harness) == [
        ("shop@v0", RouteReason.STABLE),
        ("shop@v0", RouteReason.STICKY),
        ("shop@v1", RouteReason.STABLE),
        ("shop@v1", RouteReason.STABLE),
    ]
    shown = [(await harness.api.get(f"/v1/episodes/{id}")).json() for id in (first["id"], second["id"], alone["id"])]
    assert [row["start_version"] for row in shown] == ["shop@v0", "shop@v0", "shop@v1"]


async def test_request_that_names_a_version_gets_it(harness: Harness, scripted: ScriptedEngine) -> None:
    await load_new_version(harness, scripted)
    attempts = [await episodes.create(harness, group=GROUP) for _ in range(2)]
    for episode, model in zip(attempts, ("shop@v0", "shop@v1"), strict=True):
        assert (await episodes.chat(harness, episode, model=model)).status_code == 200
    assert await versions(harness) == [("shop@v0", RouteReason.REQUESTED), ("shop@v1", RouteReason.REQUESTED)]


async def test_version_that_is_not_loaded_any_more_is_left(harness: Harness, scripted: ScriptedEngine) -> None:
    await load_new_version(harness, scripted)
    attempts = [await episodes.create(harness, group=GROUP) for _ in range(2)]
    assert (await episodes.chat(harness, attempts[0])).status_code == 200
    await load_new_version(harness, scripted)
    async with harness.db.write() as session:
        engine = await session.get_one(Engine, "engine-0")
        engine.loaded = [name for name in engine.loaded if name != "shop-v1"]
    forget(harness)
    assert (await episodes.chat(harness, attempts[1])).status_code == 200
    assert await versions(harness) == [("shop@v1", RouteReason.STABLE), ("shop@v2", RouteReason.STABLE)]


async def test_attempts_at_other_tasks_are_refused(harness: Harness) -> None:
    await harness.api.post("/v1/policies", json={"name": "other"})
    await episodes.create(harness, task="refund", group=GROUP)
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"task": "greeting"}, "task"),
        ({}, "task"),
        ({"task": "refund", "policy": "other"}, "policy"),
        ({"task": "refund", "group": {"id": "ticket-7", "size": 3}}, "size"),
    ]
    for body, what in bodies:
        refused: httpx2.Response = await harness.api.post(
            "/v1/episodes", json={"policy": "shop", "group": GROUP, **body}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "episode_group")
        assert f"of another {what}" in refused.text
    assert len(await harness.all(Episode)) == 1


@pytest.mark.parametrize(
    "group", ["ticket-7", {"id": "ticket-7"}, {"id": "", "size": 2}, {"id": "t", "size": 1}, {"id": "t", "size": 2.0}]
)
async def test_impossible_groups_are_refused(harness: Harness, group: Any) -> None:
    answer = await harness.api.post("/v1/episodes", json={"policy": "shop", "group": group})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("group")


async def load_new_version(harness: Harness, scripted: ScriptedEngine) -> None:
    version = await publish(harness)
    assert version.adapter_name is not None
    scripted.adapters[version.adapter_name] = "/nowhere"
    forget(harness)


def forget(harness: Harness) -> None:
    """Drop the cached routes of the process."""
    harness.api._transport.app.state.services.get(VersionRouter).forget()  # type: ignore[attr-defined]
