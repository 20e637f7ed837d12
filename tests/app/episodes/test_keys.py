"""The key of an episode serves this episode alone, and acts for the key that created it."""

import re
from collections.abc import AsyncIterator

import pytest
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy import update

from app.core.database import now
from app.core.settings import Settings
from app.main import create_app
from app.models import Episode, Feedback, Turn
from app.projects import service
from app.projects.auth import ApiKeyCache
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

VOTE = {"kind": "binary", "value": True}
OPEN_TO_EPISODES = {
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /v1/feedback",
    "POST /v1/feedback/batch",
    "GET /v1/episodes/{episode_id}",
    "GET /v1/episodes/{episode_id}/models",
    "POST /v1/episodes/{episode_id}/end",
    "POST /v1/episodes/{episode_id}/chat/completions",
    "POST /v1/episodes/{episode_id}/responses",
}
WITHOUT_KEY = {"GET /livez", "GET /readyz", "GET /v1/engines/versions/{name}/files/{file}"}


def routes() -> set[str]:
    found: set[str] = set()
    for context in iter_route_contexts(create_app(Settings()).routes):
        route = context.original_route
        if isinstance(route, APIRoute):
            found |= {f"{method} {route.path}" for method in set(route.methods or ()) - {"HEAD"}}
    return found - WITHOUT_KEY


@pytest.fixture
async def cache(harness: Harness) -> AsyncIterator[ApiKeyCache]:
    yield harness.api._transport.app.state.services.get(ApiKeyCache)  # type: ignore[attr-defined]


async def test_all_other_routes_refuse_the_key(harness: Harness) -> None:
    auth = episodes.auth((await episodes.create(harness))["api_key"])
    assert routes() >= OPEN_TO_EPISODES
    for route in sorted(routes() - OPEN_TO_EPISODES):
        method, path = route.split(" ")
        answer = await harness.api.request(method, re.sub(r"\{[^}]+\}", "1", path), json={}, headers=auth)
        assert answer.status_code == 403, f"{route}: {answer.text}"
        assert answer.json()["error"]["code"] == "episode_key", route
    form = await harness.api.post("/console/sign-in", data={"key": auth["authorization"].partition(" ")[2]})
    assert "set-cookie" not in form.headers


async def test_other_episodes_are_unknown_to_the_key(harness: Harness, scripted: ScriptedEngine) -> None:
    own, other = await episodes.create(harness), await episodes.create(harness)
    auth, unknown = episodes.auth(own["api_key"]), f"ep-{'0' * 32}"
    assert (await harness.api.get(f"/v1/episodes/{own['id']}", headers=auth)).status_code == 200
    models = await harness.api.get(f"/v1/episodes/{own['id']}/models", headers=auth)
    assert [row["id"] for row in models.json()["data"]][:1] == ["shop"]
    for method, path in (("GET", ""), ("GET", "/models"), ("POST", "/end")):
        answers = [
            await harness.api.request(method, f"/v1/episodes/{id}{path}", json={}, headers=auth)
            for id in (other["id"], unknown)
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text.replace(other["id"], unknown) == answers[1].text
    await episodes.chat(harness, other)
    [turn] = await harness.all(Turn)
    body = {"model": "shop", "input": "hi", "previous_response_id": turn.id.replace("chatcmpl-", "resp_")}
    answer = await harness.api.post("/v1/responses", json=body, headers=auth)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_feedback_with_the_key_is_on_its_episode(harness: Harness, scripted: ScriptedEngine) -> None:
    own, other = await episodes.create(harness), await episodes.create(harness)
    for episode in (own, other):
        await episodes.chat(harness, episode, metadata={"place": episode["id"]})
    turns = {turn.episode_id: turn for turn in await harness.all(Turn)}
    auth = episodes.auth(own["api_key"])

    async def statuses(episode_id: str) -> list[int]:
        turn = turns[episode_id]
        bodies = (
            {"completion_id": turn.id, **VOTE},
            {"target": {"episode_id": episode_id}, **VOTE},
            {"target": {"metadata": {"place": episode_id}}, **VOTE},
            {"target": {"episode_id": episode_id}, "kind": "score", "value": 1, "source": {"kind": "CODE"}},
        )
        return [(await harness.api.post("/v1/feedback", json=body, headers=auth)).status_code for body in bodies]

    assert await statuses(own["id"]) == [201] * 4
    assert await statuses(other["id"]) == [403] * 4
    ids = [turn.id for turn in turns.values()]
    ranking = await harness.api.post("/v1/feedback", json={"kind": "comparison", "value": ids}, headers=auth)
    whole = {"target": {"conversation_id": turns[own["id"]].conversation_id}, **VOTE}
    assert ranking.status_code == (await harness.api.post("/v1/feedback", json=whole, headers=auth)).status_code == 403
    # A sender's key belongs to the whole project: it could replace what others have said elsewhere.
    keyed = {"completion_id": turns[own["id"]].id, "key": "f-1", **VOTE}
    assert (await harness.api.post("/v1/feedback", json=keyed, headers=auth)).status_code == 403
    assert (await harness.api.delete("/v1/feedback", params={"key": "f-1"}, headers=auth)).status_code == 403


async def test_batch_with_the_key_has_feedback_on_its_episode_alone(harness: Harness, scripted: ScriptedEngine) -> None:
    own, other = await episodes.create(harness), await episodes.create(harness)
    for episode in (own, other):
        await episodes.chat(harness, episode)
    turns = {turn.episode_id: turn.id for turn in await harness.all(Turn)}
    items = [
        {"completion_id": turns[own["id"]], **VOTE},
        {"completion_id": turns[other["id"]], **VOTE},
        {"target": {"episode_id": other["id"]}, **VOTE},
        {"completion_id": turns[own["id"]], "key": "f-1", **VOTE},
        {"target": {"episode_id": own["id"]}, **VOTE},
    ]
    answer = await harness.api.post("/v1/feedback/batch", json={"items": items}, headers=episodes.auth(own["api_key"]))
    assert [item["status"] for item in answer.json()["data"]] == [201, 403, 403, 403, 201]
    assert {row.episode_id or row.turn_id for row in await harness.all(Feedback)} == {own["id"], turns[own["id"]]}


async def test_anthropic_client_chats_in_its_episode_by_the_key(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness)
    body = {"model": "shop", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
    key = {"x-api-key": episode["api_key"]}
    answer = await harness.api.post("/v1/messages", json=body, headers={"authorization": "", **key})
    assert answer.status_code == 200, answer.text
    assert (await harness.get(Turn, answer.headers["x-completion-id"])).episode_id == episode["id"]


async def test_key_has_no_scope_that_its_creator_lacks(harness: Harness, scripted: ScriptedEngine) -> None:
    chat_only = (await harness.api.post("/v1/keys", json={"scopes": ["chat"]})).json()["key"]
    created = await harness.api.post("/v1/episodes", json={"policy": "shop"}, headers=episodes.auth(chat_only))
    episode = created.json()
    assert (await episodes.chat(harness, episode)).status_code == 200
    path, auth = f"/v1/episodes/{episode['id']}/end", episodes.auth(episode["api_key"])
    assert (await harness.api.post(path, json={"outcome": 1.0}, headers=auth)).status_code == 403
    vote = {"target": {"episode_id": episode["id"]}, **VOTE}
    assert (await harness.api.post("/v1/feedback", json=vote, headers=auth)).status_code == 403
    assert (await harness.api.post(path, json={}, headers=auth)).status_code == 200


async def test_key_ends_with_that_of_its_creator_and_a_day_after_the_episode(
    harness: Harness, scripted: ScriptedEngine, cache: ApiKeyCache
) -> None:
    created = (await harness.api.post("/v1/keys", json={"train": False})).json()
    headers = episodes.auth(created["key"])
    one = (await harness.api.post("/v1/episodes", json={"policy": "shop"}, headers=headers)).json()
    other = await episodes.create(harness)
    assert (await episodes.chat(harness, one)).status_code == 200
    [turn] = await harness.all(Turn)
    assert (turn.key_id, turn.exclusion_reason) == (created["id"], service.NO_CONSENT)
    await harness.api.delete(f"/v1/keys/{created['id']}")
    assert (await episodes.chat(harness, one)).status_code == 401
    await episodes.end(harness, other["id"])
    cache.forget()
    assert (await episodes.chat(harness, other)).status_code == 409
    async with harness.db.write() as session:
        await session.execute(update(Episode).values(ended_at=now() - 90_000))
    cache.forget()
    assert (await episodes.chat(harness, other)).status_code == 401


async def test_chat_of_another_policy_is_refused(harness: Harness, scripted: ScriptedEngine) -> None:
    created = await harness.api.post("/v1/policies", json={"name": "other"})
    assert created.status_code == 201, created.text
    episode = await episodes.create(harness)
    refused = await episodes.chat(harness, episode, model="other")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "episode_policy")


async def test_episode_of_an_archived_policy_is_not_created(harness: Harness) -> None:
    await harness.api.post("/v1/policies", json={"name": "other"})
    assert (await harness.api.post("/v1/policies/other/archive", json={})).status_code == 200
    refused = await harness.api.post("/v1/episodes", json={"policy": "other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "policy_archived")
