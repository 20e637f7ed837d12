"""Chats of the tier `flex`: engines serve them behind all others, and replies name the tier that was asked for."""

import json
from typing import Any

import httpx2
import pytest

from app.inference.request import BELOW_CHATS
from app.models import Turn
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": episodes.MESSAGES}, RESPONSES: {"input": "hi"}}
TIERS = [(None, None), ("auto", "default"), ("default", "default"), ("priority", "default"), ("flex", "flex")]


async def send(harness: Harness, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx2.Response:
    body = {"model": "shop", **BODIES[path], **fields}
    answer = await harness.api.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def priority_of(tier: str | None) -> int | None:
    return BELOW_CHATS if tier == "flex" else None


@pytest.mark.parametrize(("tier", "served"), TIERS)
async def test_tier_of_a_chat(harness: Harness, scripted: ScriptedEngine, tier: str | None, served: str | None) -> None:
    fields: dict[str, Any] = {} if tier is None else {"service_tier": tier}
    whole = (await send(harness, CHAT, **fields)).json()
    assert whole.get("service_tier") == served
    chunks = events_of(await send(harness, CHAT, stream=True, **fields))
    assert {chunk.get("service_tier") for chunk in chunks} == {served}
    assert [sent.get("priority") for sent in scripted.requests] == 2 * [priority_of(served)]
    assert all("service_tier" not in sent for sent in scripted.requests)
    recorded = {turn.request_params.get("service_tier") for turn in await harness.all(Turn)}
    assert recorded == {"flex" if served == "flex" else None}


@pytest.mark.parametrize(("tier", "served"), TIERS)
async def test_tier_of_a_response(
    harness: Harness, scripted: ScriptedEngine, tier: str | None, served: str | None
) -> None:
    fields: dict[str, Any] = {} if tier is None else {"service_tier": tier}
    whole = (await send(harness, RESPONSES, **fields)).json()
    assert whole["service_tier"] == (served or "default")
    assert (await harness.api.get(f"{RESPONSES}/{whole['id']}")).json()["service_tier"] == whole["service_tier"]
    events = events_of(await send(harness, RESPONSES, stream=True, **fields))
    tiers = {event["response"]["service_tier"] for event in events if "response" in event}
    assert tiers == {whole["service_tier"]}
    assert [sent.get("priority") for sent in scripted.requests] == 2 * [priority_of(served)]


async def test_every_choice_has_the_tier(harness: Harness, scripted: ScriptedEngine) -> None:
    await send(harness, CHAT, n=3, service_tier="flex")
    assert [sent.get("priority") for sent in scripted.requests] == 3 * [BELOW_CHATS]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("of_episode", "of_request", "served"),
    [
        ("flex", None, "flex"),
        ("flex", "default", "flex"),
        ("default", "flex", "default"),
        ("auto", "flex", "flex"),
        ("auto", None, None),
    ],
)
async def test_tier_of_an_episode_is_that_of_its_chats(
    harness: Harness, scripted: ScriptedEngine, path: str, of_episode: str, of_request: str | None, served: str | None
) -> None:
    episode = await episodes.create(harness, service_tier=of_episode)
    assert episode["service_tier"] == of_episode
    fields: dict[str, Any] = {} if of_request is None else {"service_tier": of_request}
    reply = (await send(harness, path, episodes.auth(episode["api_key"]), **fields)).json()
    assert reply.get("service_tier") == (served or (None if path == CHAT else "default"))
    [sent] = scripted.requests
    assert sent.get("priority") == priority_of(served)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("tier", [5, ["flex"], "x" * 65])
async def test_what_is_no_tier_is_refused(harness: Harness, path: str, tier: object) -> None:
    answer = await harness.api.post(path, json={"model": "shop", **BODIES[path], "service_tier": tier})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")
