"""Which version answers a request: pins, sticky conversations, canaries, and the version that serves."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from app.deployments.routes import RoutingRules
from app.deployments.version_router import is_in_canary
from app.models import Deployment, Engine, Pin, PinKind, RouteReason, Turn, Version, VersionState, new_id
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trained_versions import publish

ROOT = "/v1/policies/shop"
HELLO = [{"role": "user", "content": "When are you open?"}]


@pytest.fixture
async def versions(harness: Harness, scripted: ScriptedEngine) -> list[Version]:
    """Three versions, published one after the other and loaded on the engine; the third one serves."""
    return [await publish_on_scripted(harness, scripted) for _ in range(3)]


async def publish_on_scripted(harness: Harness, scripted: ScriptedEngine) -> Version:
    version = await publish(harness)
    assert version.adapter_name is not None
    scripted.adapters[version.adapter_name] = "/nowhere"
    return version


async def ask(harness: Harness, *, model: str = "shop", status: int = 200, **fields: Any) -> str:
    """Send a chat request; return the version that answered, or the error message."""
    headers = {"x-conversation-id": fields.pop("conversation")} if "conversation" in fields else {}
    body = {"model": model, "messages": HELLO, **fields}
    answer = await harness.api.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.headers["x-policy-version"] if status == 200 else answer.json()["error"]["message"]


async def set_pin(harness: Harness, version: Version, **subject: str) -> None:
    [(kind, name)] = subject.items()
    policy = await harness.policy()
    values = {"project_id": policy.project_id, "policy_id": policy.id, "version_id": version.id, "actor": "test"}
    async with harness.db.write() as session:
        session.add(Pin(id=new_id("pin"), kind=PinKind(kind), subject=name, **values))
    await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)


async def route_reasons(harness: Harness) -> list[str]:
    return [turn.route_reason for turn in sorted(await harness.all(Turn), key=lambda turn: turn.created_at)]


async def test_most_specific_pin_applies(harness: Harness, versions: list[Version]) -> None:
    first, second, _ = versions
    await set_pin(harness, first, user="ada")
    await set_pin(harness, second, conversation="talk-7")
    assert await ask(harness) == "shop@v3"
    assert await ask(harness, user="ada") == "shop@v1"
    assert await ask(harness, user="ada", conversation="talk-7") == "shop@v2"
    assert await ask(harness, user="ada", model="shop@v3") == "shop@v3", (
        "a version that the request names has priority over pins"
    )
    assert await ask(harness, user="ada", model="shop@stable") == "shop@v3"
    assert await route_reasons(harness) == [RouteReason.STABLE, *[RouteReason.PINNED] * 2, *[RouteReason.REQUESTED] * 2]
    [key] = {turn.key_id for turn in await harness.all(Turn)}
    await set_pin(harness, second, key=key)
    assert await ask(harness) == "shop@v2"
    assert await ask(harness, user="ada") == "shop@v1", "the end user's pin has priority over the key's"


async def test_pin_survives_publishing_and_rollback(
    harness: Harness, scripted: ScriptedEngine, versions: list[Version]
) -> None:
    await set_pin(harness, versions[1], user="ada")
    await publish_on_scripted(harness, scripted)
    assert await ask(harness, user="ada") == "shop@v2"
    await harness.api.post(f"{ROOT}/rollback", json={"version": 1})
    assert (await ask(harness, user="ada"), await ask(harness)) == ("shop@v2", "shop@v1")


async def test_pin_to_unloaded_version_is_unavailable_for_its_subject_only(
    harness: Harness, versions: list[Version]
) -> None:
    await set_pin(harness, versions[0], user="ada")
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = ["shop-v2", "shop-v3"]
    assert "is not loaded yet" in await ask(harness, user="ada", status=503)
    assert await ask(harness, user="bob") == "shop@v3"


async def test_pin_to_loaded_version_works_while_the_serving_version_is_not_loaded(
    harness: Harness, versions: list[Version]
) -> None:
    await set_pin(harness, versions[0], user="ada")
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = ["shop-v1"]
    assert await ask(harness, user="ada") == "shop@v1"
    assert "No ready engine has loaded shop@v3 yet" in await ask(harness, user="bob", status=503)
    assert "No ready engine has loaded shop@v2 yet" in await ask(harness, model="shop@previous", status=503)
    assert "shop@v2 is not loaded" in await ask(harness, model="shop@v2", status=404)


async def converse(harness: Harness, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """Send a chat request; return the version that answered, and the messages of the next request."""
    answer = await harness.api.post("/v1/chat/completions", json={"model": "shop", "messages": messages, **fields})
    reply = answer.json()["choices"][0]["message"]["content"]
    next_messages = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "And on Sunday?"}]
    return answer.headers["x-policy-version"], next_messages


@pytest.mark.parametrize(("conversations", "expected"), [("follow", "shop@v4"), ("sticky", "shop@v3")])
async def test_conversation_follows_the_deployment_or_stays_on_its_version(
    harness: Harness, scripted: ScriptedEngine, versions: list[Version], conversations: str, expected: str
) -> None:
    answer = await harness.api.put(f"{ROOT}/delivery", json={"conversations": conversations})
    assert (answer.status_code, answer.json()["conversations"]) == (200, conversations)
    first_version, messages = await converse(harness, HELLO)
    await publish_on_scripted(harness, scripted)
    await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)
    second_version, messages = await converse(harness, messages)
    assert (first_version, second_version) == ("shop@v3", expected)
    assert (await converse(harness, [{"role": "user", "content": "Hello?"}]))[0] == "shop@v4", (
        "a new conversation uses the new version"
    )
    assert (await converse(harness, messages))[0] == expected


async def test_sticky_conversation_leaves_a_rolled_back_version(
    harness: Harness, scripted: ScriptedEngine, versions: list[Version]
) -> None:
    await harness.api.put(f"{ROOT}/delivery", json={"conversations": "sticky"})
    _, messages = await converse(harness, HELLO)
    await harness.api.post(f"{ROOT}/rollback", json={})
    assert (await converse(harness, messages))[0] == "shop@v2"


async def test_canary_answers_its_share_and_always_the_same_users(
    harness: Harness, scripted: ScriptedEngine, versions: list[Version]
) -> None:
    answer = await harness.api.post(f"{ROOT}/deploy", json={"version": 2, "share": 0.3, "watch": False})
    assert answer.status_code == 200, answer.text
    deployment_view = answer.json()
    canary_view = deployment_view["canary"]
    assert (deployment_view["serving"], canary_view["version"], canary_view["share"]) == ("shop@v3", "shop@v2", 0.3)
    users = [f"user-{number}" for number in range(60)]
    answered_by = {user: await ask(harness, user=user) for user in users}
    assert {"shop@v2", "shop@v3"} == set(answered_by.values())
    deployment = await harness.get(Deployment, (await harness.policy()).id)
    expected = {user for user in users if is_in_canary(RoutingRules(deployment.canary_version_id, 0.3), user)}
    assert {user for user, version in answered_by.items() if version == "shop@v2"} == expected
    await harness.api.post(f"{ROOT}/deploy", json={"version": 2, "share": 0.6, "watch": False})
    larger = {user for user in users if await ask(harness, user=user) == "shop@v2"}
    assert expected < larger, "a larger share keeps the users that it had"
    assert await ask(harness, model="shop@canary") == "shop@v2"
    reasons = Counter(await route_reasons(harness))
    assert reasons[RouteReason.CANARY] == len(expected) + len(larger) and reasons[RouteReason.REQUESTED] == 1


def test_canary_share_is_exact_and_another_canary_selects_other_users() -> None:
    """With consecutive ids, neither neighbours nor the users of the canary before are selected together."""
    users, before = [f"user-{number}" for number in range(4_000)], set[int]()
    for canary in range(40):
        rules = RoutingRules(f"ver-{canary}", 0.05)
        selected = {number for number, user in enumerate(users) if is_in_canary(rules, user)}
        assert 120 < len(selected) < 280
        assert len(selected & before) < 40, "about one in twenty of the previous canary's users"
        assert len(selected & {number + 1 for number in selected}) < 40, "about one in twenty of their neighbours"
        before = selected


@pytest.mark.parametrize("path", ["canary/abort", "rollback"])
async def test_aborted_canary_leaves_the_serving_version(harness: Harness, versions: list[Version], path: str) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.9})
    answer = await harness.api.post(f"{ROOT}/{path}", json={"reason": "rude"})
    assert (answer.status_code, answer.json()["serving"]) == (200, "shop@v3")
    assert {await ask(harness, user=f"user-{number}") for number in range(10)} == {"shop@v3"}
    canary = await harness.get(Version, versions[0].id)
    assert (canary.state, canary.reason) == (VersionState.ROLLED_BACK, "rude")
    again = await harness.api.post(f"{ROOT}/canary/abort", json={})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "no_canary")
