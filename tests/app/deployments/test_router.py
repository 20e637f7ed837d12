"""Which version answers a request: pins, sticky conversations, canaries, and the version that serves."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from app.deployments import service
from app.deployments.resolution import RoutingRules
from app.deployments.router import is_in_canary
from app.models import Audit, Deployment, Engine, Pin, PinKind, Policy, RouteReason, Turn, Version, VersionState, new_id
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

ROOT = "/v1/policies/shop"
HELLO = [{"role": "user", "content": "When are you open?"}]


@pytest.fixture
async def versions(harness: Harness, scripted: ScriptedEngine) -> list[Version]:
    """Three versions, published one after the other and loaded on the engine; the third one serves."""
    return [await publish(harness, scripted) for _ in range(3)]


async def publish(harness: Harness, scripted: ScriptedEngine) -> Version:
    version = await harness.version(VersionState.VERIFIED)
    assert version.adapter_name is not None
    scripted.adapters[version.adapter_name] = "/nowhere"
    async with harness.db.write() as session:
        engine = await session.get_one(Engine, "engine-0")
        engine.loaded = [*engine.loaded, version.adapter_name]
        row = await session.get_one(Version, version.id)
        await service.set_live(session, await session.get_one(Policy, row.policy_id), row, actor="test", reason=None)
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
    await asyncio.sleep(2 * harness.settings.route_cache_seconds)


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
    await publish(harness, scripted)
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
    follow_up = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "And on Sunday?"}]
    return answer.headers["x-policy-version"], follow_up


@pytest.mark.parametrize(("conversations", "then"), [("follow", "shop@v4"), ("sticky", "shop@v3")])
async def test_conversation_follows_the_deployment_or_stays_on_its_version(
    harness: Harness, scripted: ScriptedEngine, versions: list[Version], conversations: str, then: str
) -> None:
    answer = await harness.api.put(f"{ROOT}/delivery", json={"conversations": conversations})
    assert (answer.status_code, answer.json()["conversations"]) == (200, conversations)
    began, follow = await converse(harness, HELLO)
    await publish(harness, scripted)
    await asyncio.sleep(2 * harness.settings.route_cache_seconds)
    went_on, follow = await converse(harness, follow)
    assert (began, went_on) == ("shop@v3", then)
    assert (await converse(harness, [{"role": "user", "content": "Hello?"}]))[0] == "shop@v4", (
        "a new conversation uses the new version"
    )
    assert (await converse(harness, follow))[0] == then


async def test_sticky_conversation_leaves_a_rolled_back_version(
    harness: Harness, scripted: ScriptedEngine, versions: list[Version]
) -> None:
    await harness.api.put(f"{ROOT}/delivery", json={"conversations": "sticky"})
    _, follow = await converse(harness, HELLO)
    await harness.api.post(f"{ROOT}/rollback", json={})
    assert (await converse(harness, follow))[0] == "shop@v2"


async def test_canary_answers_its_share_and_always_the_same_users(
    harness: Harness, scripted: ScriptedEngine, versions: list[Version]
) -> None:
    answer = await harness.api.post(f"{ROOT}/deploy", json={"version": 2, "share": 0.3, "watch": False})
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert (shown["serving"], shown["canary"]["version"], shown["canary"]["share"]) == ("shop@v3", "shop@v2", 0.3)
    people = [f"user-{number}" for number in range(60)]
    got = {who: await ask(harness, user=who) for who in people}
    assert {"shop@v2", "shop@v3"} == set(got.values())
    deployment = await harness.get(Deployment, (await harness.policy()).id)
    expected = {who for who in people if is_in_canary(RoutingRules(deployment.canary_version_id, 0.3), who)}
    assert {who for who, label in got.items() if label == "shop@v2"} == expected
    await harness.api.post(f"{ROOT}/deploy", json={"version": 2, "share": 0.6, "watch": False})
    more = {who for who in people if await ask(harness, user=who) == "shop@v2"}
    assert expected < more, "a larger share keeps the users that it had"
    assert await ask(harness, model="shop@canary") == "shop@v2"
    reasons = Counter(await route_reasons(harness))
    assert reasons[RouteReason.CANARY] == len(expected) + len(more) and reasons[RouteReason.REQUESTED] == 1


def test_canary_share_is_exact_and_another_canary_selects_other_users() -> None:
    """With consecutive ids, neither neighbours nor the users of the canary before are selected together."""
    people, before = [f"user-{number}" for number in range(4_000)], set[int]()
    for canary in range(40):
        rules = RoutingRules(f"ver-{canary}", 0.05)
        selected = {number for number, who in enumerate(people) if is_in_canary(rules, who)}
        assert 120 < len(selected) < 280
        assert len(selected & before) < 40, "about one in twenty of the previous canary's users"
        assert len(selected & {number + 1 for number in selected}) < 40, "about one in twenty of their neighbours"
        before = selected


async def test_canary_is_promoted(harness: Harness, versions: list[Version]) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.1})
    answer = await harness.api.post(f"{ROOT}/canary/promote", json={"reason": "looks well"})
    assert (answer.json()["serving"], answer.json()["canary"]) == ("shop@v1", None)
    assert (await harness.get(Version, versions[0].id)).state == VersionState.LIVE
    assert (await harness.get(Version, versions[2].id)).state == VersionState.SUPERSEDED
    assert (await harness.policy()).head_version_id == versions[0].id, "training continues from the version that serves"
    assert [row.action for row in await harness.all(Audit)][-2:] == ["canary.began", "deployment.deployed"]


@pytest.mark.parametrize("how", ["canary/abort", "rollback"])
async def test_aborted_canary_leaves_the_serving_version(harness: Harness, versions: list[Version], how: str) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.9})
    answer = await harness.api.post(f"{ROOT}/{how}", json={"reason": "rude"})
    assert (answer.status_code, answer.json()["serving"]) == (200, "shop@v3")
    assert {await ask(harness, user=f"user-{number}") for number in range(10)} == {"shop@v3"}
    left = await harness.get(Version, versions[0].id)
    assert (left.state, left.reason) == (VersionState.ROLLED_BACK, "rude")
    again = await harness.api.post(f"{ROOT}/canary/abort", json={})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "no_canary")


async def test_rollback_to_a_number_aborts_the_canary(harness: Harness, versions: list[Version]) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.9})
    answer = await harness.api.post(f"{ROOT}/rollback", json={"version": 2})
    assert answer.json()["serving"] == "shop@v2"
    assert (await harness.api.get(f"{ROOT}/deployment")).json()["canary"] is None


async def test_rollback_to_the_serving_version_aborts_the_canary_and_to_the_canary_is_refused(
    harness: Harness, versions: list[Version]
) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.9})
    refused = await harness.api.post(f"{ROOT}/rollback", json={"version": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "canary_active")
    answer = await harness.api.post(f"{ROOT}/rollback", json={"version": 3, "reason": "rude"})
    assert (answer.json()["rolled_back"], answer.json()["serving"]) == ("shop@v1", "shop@v3")
    assert (await harness.get(Version, versions[0].id)).state == VersionState.ROLLED_BACK
    again = await harness.api.post(f"{ROOT}/deploy", json={"version": 1})
    assert again.json()["serving"] == "shop@v1"
    back = await harness.get(Version, versions[0].id)
    assert (back.state, back.reason) == (VersionState.LIVE, None)


async def test_deploy_is_idempotent(harness: Harness, versions: list[Version]) -> None:
    for _ in range(2):
        answer = await harness.api.post(f"{ROOT}/deploy", json={"version": 1})
        assert (answer.json()["serving"], answer.json()["previous"], answer.json()["epoch"]) == (
            "shop@v1",
            "shop@v3",
            4,
        )
    assert (await harness.policy()).head_version_id == versions[0].id
    assert (await harness.get(Version, versions[2].id)).state == VersionState.SUPERSEDED, "it was not rolled back"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"version": 99}, 404, "model_not_found"),
        ({"version": 99, "share": 0.5}, 404, "model_not_found"),
        ({"version": 3, "share": 0.5}, 409, "already_serving"),
        ({"version": 1, "share": 0.0}, 400, "invalid_value"),
        ({"version": 1, "share": 1.0}, 400, "invalid_value"),
        ({"share": 0.1}, 400, "invalid_value"),
        ({"version": 1, "shares": 0.1}, 400, "unknown_parameter"),
    ],
)
async def test_deploy_of_unservable_version_is_refused(
    harness: Harness, versions: list[Version], body: dict[str, Any], status: int, code: str
) -> None:
    answer = await harness.api.post(f"{ROOT}/deploy", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert (await harness.serving()).number == 3


async def test_one_canary_at_a_time_and_it_must_be_loaded(harness: Harness, versions: list[Version]) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.1})
    second = await harness.api.post(f"{ROOT}/deploy", json={"version": 2, "share": 0.1})
    assert (second.status_code, second.json()["error"]["code"]) == (409, "canary_active")
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = ["shop-v1", "shop-v3"]
    for body in ({"version": 2}, {"version": 0, "share": 0.1}):
        answer = await harness.api.post(f"{ROOT}/deploy", json=body)
        assert answer.status_code == 409, answer.text


async def test_delivery_settings_are_set_and_reset(harness: Harness) -> None:
    set_ = await harness.api.put(f"{ROOT}/delivery", json={"canary": {"share": 0.2}})
    assert (set_.json()["canary_overridden"], set_.json()["canary_config"]["share"]) == (True, 0.2)
    reset = await harness.api.put(f"{ROOT}/delivery", json={})
    assert (reset.json()["canary_overridden"], reset.json()["canary_config"]) == (False, None)
    assert [row.action for row in await harness.all(Audit)] == ["delivery.updated", "delivery.updated"]
