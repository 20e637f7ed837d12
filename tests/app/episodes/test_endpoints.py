"""Episodes over HTTP: created once, chatted in by key, path, header or metadata, ended once, and learned from."""

from typing import Any

import httpx2
import pytest
from sqlalchemy import update

from app.core.telemetry import Telemetry
from app.models import (
    EndReason,
    Episode,
    EpisodeState,
    Feedback,
    Policy,
    PolicyState,
    Reward,
    Sample,
    SampleState,
    Turn,
)
from app.projects.service import create_project
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate

ONCE = {"idempotency-key": "task-7/attempt-1"}


def code(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def rewards(harness: Harness) -> dict[str, float]:
    return {row.turn_id: round(row.value, 6) for row in await harness.all(Reward)}


async def test_created_episode_names_all_that_a_client_needs(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness, task="guess", metadata={"seed": "7"}, limits={"max_turns": 9})
    assert episode["base_url"] == f"http://attune/v1/episodes/{episode['id']}"
    assert episode["api_key"].startswith("sk-ep-")
    assert episode["limits"] == {"idle_seconds": 900.0, "deadline_seconds": 3600.0, "max_turns": 9, "max_tokens": None}
    assert (await episodes.chat(harness, episode)).status_code == 200
    assert (await episodes.chat(harness, episode, {"x-attune-agent": "planner"})).status_code == 200
    turns = await harness.all(Turn)
    assert [(turn.episode_id, turn.episode_step, turn.agent) for turn in turns] == [
        (episode["id"], 1, None),
        (episode["id"], 2, "planner"),
    ]
    shown = (await harness.api.get(f"/v1/episodes/{episode['id']}")).json()
    assert shown["num_turns"] == 2 and shown["num_tokens"] == sum(turn.num_output_tokens for turn in turns) > 0
    assert shown["start_version"] == "shop@v0" and shown["state"] == "open" and shown["metadata"] == {"seed": "7"}
    assert "api_key" not in shown
    [row] = await harness.all(Episode)
    assert episode["api_key"] not in str(vars(row))


async def test_same_idempotency_key_returns_the_same_episode_and_its_key(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    body = {"policy": "shop", "task": "guess"}
    first = await harness.api.post("/v1/episodes", json=body, headers=ONCE)
    again = await harness.api.post("/v1/episodes", json=body, headers=ONCE)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json() and again.headers["idempotent-replayed"] == "true"
    assert first.headers["cache-control"] == again.headers["cache-control"] == "no-store"
    other = await harness.api.post("/v1/episodes", json={**body, "task": "other"}, headers=ONCE)
    assert code(other) == (422, "idempotency_key_reused")
    key = (await harness.api.post("/v1/keys", json={})).json()["key"]
    of_other_key = await harness.api.post("/v1/episodes", json=body, headers=ONCE | episodes.auth(key))
    assert of_other_key.status_code == 201, "an Idempotency-Key belongs to its API key"
    assert len(await harness.all(Episode)) == 2


@pytest.mark.parametrize("change", ["full", "task", "archived"])
async def test_repeated_request_returns_its_episode_whatever_has_changed_since(
    harness: Harness, scripted: ScriptedEngine, change: str
) -> None:
    """Its group is full, the first attempt of its group is gone and was of another task, or its policy is archived."""
    group = {"id": "ticket-7", "size": 2}
    body = {"policy": "shop", "task": "guess", "group": group}
    first = await harness.api.post("/v1/episodes", json=body, headers=ONCE)
    if change == "full":
        for _ in range(3):
            await episodes.create(harness, task="guess", group=group)
    async with harness.db.write() as session:
        if change == "task":
            await session.execute(update(Episode).values(task="another"))
        if change == "archived":
            await session.execute(update(Policy).values(state=PolicyState.ARCHIVED))
    again = await harness.api.post("/v1/episodes", json=body, headers=ONCE)
    assert (again.status_code, again.json().get("id")) == (200, first.json()["id"])


@pytest.mark.parametrize("way", ["key", "path", "header", "metadata"])
async def test_chat_is_tagged(harness: Harness, scripted: ScriptedEngine, way: str) -> None:
    episode = await episodes.create(harness)
    id: str = episode["id"]
    body: dict[str, Any] = {"model": "shop", "messages": episodes.MESSAGES}
    path, headers = "/v1/chat/completions", {}
    if way == "key":
        headers = episodes.auth(episode["api_key"])
    elif way == "path":
        path = f"/v1/episodes/{id}/chat/completions"
    elif way == "header":
        headers = {"x-attune-episode": id}
    else:
        body["metadata"] = {"attune_episode": id}
    assert (await harness.api.post(path, json=body, headers=headers)).status_code == 200
    [turn] = await harness.all(Turn)
    assert (turn.episode_id, turn.episode_step) == (id, 1)
    assert (await harness.api.post("/v1/responses", json={"model": "shop", "input": "hi"}, headers=headers)).json()
    assert [turn.episode_id for turn in await harness.all(Turn)][1:] == [id if way in ("key", "header") else None]


async def test_request_that_names_two_episodes_is_refused(harness: Harness, scripted: ScriptedEngine) -> None:
    one, other = await episodes.create(harness), await episodes.create(harness)
    refused = await episodes.chat(harness, one, {"x-attune-episode": other["id"]})
    assert code(refused) == (400, "episode_conflict")
    assert one["id"] in refused.text and other["id"] in refused.text
    in_metadata = await episodes.chat(harness, one, metadata={"attune_episode": other["id"]})
    assert code(in_metadata) == (400, "episode_conflict")
    crossed = {**one, "api_key": other["api_key"]}
    assert code(await episodes.chat(harness, crossed)) == (400, "episode_conflict")
    assert (await episodes.chat(harness, one, {"x-attune-episode": one["id"]})).status_code == 200
    lonely = {"model": "shop", "messages": episodes.MESSAGES}
    agent = await harness.api.post("/v1/chat/completions", json=lonely, headers={"x-attune-agent": "planner"})
    assert code(agent) == (400, "invalid_value")
    assert len(await harness.all(Turn)) == 1


WIRES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": episodes.MESSAGES}),
    ("/v1/responses", {"input": "Guess a number."}),
    ("/v1/messages", {"messages": episodes.MESSAGES, "max_tokens": 16}),
]


@pytest.mark.parametrize(("path", "body"), WIRES, ids=["chat", "responses", "messages"])
async def test_request_may_name_the_state(
    harness: Harness, scripted: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    """Of the environment, before the reply: by a header or by the metadata, on each of the wires."""
    episode = await episodes.create(harness)
    headers = episodes.auth(episode["api_key"])
    named = {"metadata": {"attune_state_key": "room 2"}}
    for sent, further in (({"x-attune-state-key": "room 1"}, {}), ({}, named), ({}, {})):
        answer = await harness.api.post(path, json={"model": "shop", **body, **further}, headers=headers | sent)
        assert answer.status_code == 200, answer.text
    turns = sorted(await harness.all(Turn), key=lambda turn: turn.episode_step or 0)
    assert [turn.state_key for turn in turns] == ["room 1", "room 2", None]
    differs = await harness.api.post(
        path, json={"model": "shop", **body, **named}, headers=headers | {"x-attune-state-key": "room 1"}
    )
    assert differs.status_code == 400 and "two states" in differs.text


async def test_state_that_cannot_be_stored_or_is_of_no_episode_is_refused(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    episode = await episodes.create(harness)
    for bad in (513 * "s", "a\x00b"):
        refused = await episodes.chat(harness, episode, metadata={"attune_state_key": bad})
        assert refused.status_code in (400, 422), refused.text
    too_long = await episodes.chat(harness, episode, {"x-attune-state-key": 513 * "s"})
    assert (code(too_long), too_long.json()["error"]["param"]) == ((400, "invalid_value"), "x-attune-state-key")
    lonely = {"model": "shop", "messages": episodes.MESSAGES}
    alone = await harness.api.post("/v1/chat/completions", json=lonely, headers={"x-attune-state-key": "room 1"})
    assert (code(alone), alone.json()["error"]["param"]) == ((400, "invalid_value"), "x-attune-state-key")
    assert await harness.all(Turn) == []


async def test_metadata_may_name_the_agent(harness: Harness, scripted: ScriptedEngine) -> None:
    episode, named = await episodes.create(harness), {"attune_agent": "worker"}
    assert (await episodes.chat(harness, episode, metadata=named)).status_code == 200
    assert (await episodes.chat(harness, episode, {"x-attune-agent": "worker"}, metadata=named)).status_code == 200
    differs = await episodes.chat(harness, episode, {"x-attune-agent": "planner"}, metadata=named)
    assert code(differs) == (400, "invalid_value") and "two agents" in differs.text
    too_long = await episodes.chat(harness, episode, metadata={"attune_agent": "w" * 64})
    assert (code(too_long), too_long.json()["error"]["param"]) == ((400, "invalid_value"), "metadata.attune_agent")
    lonely = {"model": "shop", "messages": episodes.MESSAGES, "metadata": named}
    assert code(await harness.api.post("/v1/chat/completions", json=lonely)) == (400, "invalid_value")
    assert [turn.agent for turn in await harness.all(Turn)] == ["worker", "worker"]


async def test_outcome_becomes_the_reward_of_every_chat(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness)
    for agent in ("planner", "worker", "planner"):
        assert (await episodes.chat(harness, episode, {"x-attune-agent": agent})).status_code == 200
    other = await episodes.create(harness)
    await episodes.chat(harness, other)
    ended = await episodes.end(harness, episode["id"], outcome=0.5)
    assert ended.status_code == 200, ended.text
    assert (ended.json()["state"], ended.json()["end_reason"], ended.json()["outcome"]) == ("ended", "completed", 0.5)
    await curate(harness.db, harness.settings)
    turns = [turn for turn in await harness.all(Turn) if turn.episode_id == episode["id"]]
    assert await rewards(harness) == {turn.id: 0.5 for turn in turns}
    samples = await harness.all(Sample)
    assert {sample.turn_id for sample in samples} == {turn.id for turn in turns}
    assert {sample.state for sample in samples} == {SampleState.OPEN}


async def test_outcome_is_discounted_as_feedback_on_a_conversation_is(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    config = {"spread": "discounted", "discount": 0.5, "sources": [{"type": "explicit"}]}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=config)).status_code == 200
    episode = await episodes.create(harness)
    for _ in range(3):
        await episodes.chat(harness, episode)
    await episodes.end(harness, episode["id"], outcome=1.0)
    await curate(harness.db, harness.settings)
    assert sorted((await rewards(harness)).values()) == [0.25, 0.5, 1.0]


async def test_the_same_end_again_changes_nothing_and_another_one_is_refused(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    episode = await episodes.create(harness)
    first = await episodes.end(harness, episode["id"], outcome=1.0)
    again = await episodes.end(harness, episode["id"], outcome=1.0, reason="completed")
    assert first.json() == again.json() and again.status_code == 200
    for report in ({"outcome": -1.0}, {"outcome": 1.0, "reason": "failed"}, {}):
        refused = await episodes.end(harness, episode["id"], **report)
        assert code(refused) == (409, "episode_ended") and "POST /v1/feedback" in refused.text
    assert len(await harness.all(Feedback)) == 1
    assert code(await episodes.chat(harness, episode)) == (409, "episode_ended")
    assert await harness.all(Turn) == []


async def test_feedback_on_an_open_episode_waits_for_its_end(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness)
    await episodes.chat(harness, episode)
    body = {"kind": "score", "value": 0.5, "target": {"episode_id": episode["id"]}}
    submitted = await harness.api.post("/v1/feedback", json=body)
    assert submitted.status_code == 201 and submitted.json()["episode_id"] == episode["id"]
    assert await curate(harness.db, harness.settings) == 0
    outcome = (await harness.api.get(f"/v1/feedback/{submitted.json()['id']}")).json()["outcome"]
    assert (outcome["state"], outcome["waiting_for"]) == ("waiting", "episode_open")
    await episodes.chat(harness, episode)
    await episodes.end(harness, episode["id"])
    await curate(harness.db, harness.settings)
    assert list((await rewards(harness)).values()) == [0.5, 0.5]
    outcome = (await harness.api.get(f"/v1/feedback/{submitted.json()['id']}")).json()["outcome"]
    assert outcome["waiting_for"] == "batch"


async def test_late_feedback_on_an_episode_counts_together_with_its_outcome(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    episode = await episodes.create(harness)
    await episodes.chat(harness, episode)
    await episodes.end(harness, episode["id"], outcome=1.0)
    await curate(harness.db, harness.settings)
    late = {"kind": "binary", "value": "down", "source": "ada", "target": {"episode_id": episode["id"]}}
    assert (await harness.api.post("/v1/feedback", json=late)).status_code == 201
    await curate(harness.db, harness.settings)
    [turn] = await harness.all(Turn)
    found = {row.source: row.value for row in await harness.all(Reward)}
    assert found == {"episode/outcome/CODE/episode": 1.0, "episode/default/HUMAN/ada": -1.0}
    listed = (await harness.api.get("/v1/feedback", params={"episode_id": episode["id"]})).json()["data"]
    assert [row["value"] for row in listed] == [1.0, -1.0]
    withdrawn = await harness.api.delete(f"/v1/feedback/{listed[0]['id']}")
    assert withdrawn.json()["withdrawn"] is True
    await curate(harness.db, harness.settings)
    assert {row.source: row.value for row in await harness.all(Reward)} == {"episode/default/HUMAN/ada": -1.0}
    assert turn.episode_id == episode["id"]


async def test_lists_of_episodes(harness: Harness) -> None:
    ids = [(await episodes.create(harness, task=task))["id"] for task in ("a", "b", "a")]
    await episodes.end(harness, ids[0], outcome=-1.0, reason="failed")

    async def listed(**query: Any) -> list[str]:
        return [row["id"] for row in (await harness.api.get("/v1/episodes", params=query)).json()["data"]]

    assert sorted(await listed()) == sorted(ids)
    assert set(await listed(task="a")) == {ids[0], ids[2]}
    assert await listed(state="ended") == [ids[0]]
    assert await listed(order="desc") == (await listed())[::-1]
    page = (await harness.api.get("/v1/episodes", params={"limit": 2})).json()
    assert page["has_more"] is True
    assert [row["id"] for row in page["data"]] + await listed(after=page["last_id"]) == await listed()
    assert (await harness.api.get("/v1/episodes", params={"policy": "nope"})).status_code == 404


END_STATES: list[tuple[str, dict[str, Any], tuple[str, float | None]]] = [
    ("open", {"outcome": 1.0}, ("completed", 1.0)),
    ("open", {}, ("completed", None)),
    ("open", {"outcome": -1.0, "reason": "failed"}, ("failed", -1.0)),
    ("open", {"reason": "failed"}, ("failed", None)),
    ("open", {"reason": "abandoned"}, ("abandoned", None)),
    ("open", {"reason": "infrastructure"}, ("infrastructure", None)),
    ("open", {"outcome": -0.5, "reason": "deadline"}, ("deadline", -0.5)),
    *((reason, {"outcome": 1.0}, (reason, 1.0)) for reason in ("idle_timeout", "deadline", "max_turns", "max_tokens")),
    ("deadline", {"reason": "abandoned"}, ("deadline", None)),
]


@pytest.mark.parametrize(("before", "report", "after"), END_STATES, ids=str)
async def test_end_states(
    harness: Harness, before: str, report: dict[str, Any], after: tuple[str, float | None]
) -> None:
    episode = await episodes.create(harness)
    turn = await harness.turn(episode_id=episode["id"], episode_step=1)
    if before != "open":
        async with harness.db.write() as session:
            row = await session.get_one(Episode, episode["id"])
            row.state, row.end_reason, row.ended_at = EpisodeState.ENDED, EndReason(before), row.created_at
    ended = await episodes.end(harness, episode["id"], **report)
    assert ended.status_code == 200, ended.text
    assert (ended.json()["end_reason"], ended.json()["outcome"]) == after
    assert (await episodes.end(harness, episode["id"], **report)).json() == ended.json()
    await curate(harness.db, harness.settings)
    reward = -1.0 if report == {"reason": "failed"} else after[1]
    assert await rewards(harness) == ({} if reward is None else {turn.id: reward})


@pytest.mark.parametrize(
    "report",
    [
        {"outcome": 1.5},
        {"outcome": "1"},
        {"outcome": True},
        {"reason": "idle_timeout"},
        {"reason": "abandoned", "outcome": 0.0},
        {"reason": "infrastructure", "outcome": 0.0},
    ],
    ids=str,
)
async def test_impossible_reports_are_refused(harness: Harness, report: dict[str, Any]) -> None:
    episode = await episodes.create(harness)
    assert (await episodes.end(harness, episode["id"], **report)).status_code == 400
    [row] = await harness.all(Episode)
    assert row.state == EpisodeState.OPEN and row.end_fingerprint is None


@pytest.mark.parametrize("way", ["path", "header", "metadata"])
async def test_unknown_episode_and_that_of_another_project_are_the_same_404(
    harness: Harness, scripted: ScriptedEngine, way: str
) -> None:
    async with harness.db.write() as session:
        _, secret = await create_project(session, "bakery", "bread", "some/model")
    created = await harness.api.post("/v1/episodes", json={"policy": "bread"}, headers=episodes.auth(secret))
    foreign, unknown = created.json()["id"], f"ep-{'0' * 32}"
    texts = []
    for id in (foreign, unknown):
        body: dict[str, Any] = {"model": "shop", "messages": episodes.MESSAGES}
        path, headers = "/v1/chat/completions", {}
        if way == "path":
            path = f"/v1/episodes/{id}/chat/completions"
        elif way == "header":
            headers = {"x-attune-episode": id}
        else:
            body["metadata"] = {"attune_episode": id}
        answer = await harness.api.post(path, json=body, headers=headers)
        assert code(answer) == (404, "not_found")
        texts.append(answer.text.replace(id, "ID"))
    assert texts[0] == texts[1]
    assert await harness.all(Turn) == []


def test_chats_below_the_path_of_an_episode_are_timed() -> None:
    timed = Telemetry.timed_route
    assert timed("POST", "/v1/episodes/ep-1/chat/completions") == "chat"
    assert timed("POST", "/v1/episodes/ep-1/responses") == "responses"
    assert timed("POST", "/v1/episodes/ep-1/end") is timed("POST", "/v1/episodes/ep-1/feedback") is None
    assert timed("GET", "/v1/episodes/ep-1/models") is timed("POST", "/v1/episodes") is None


async def test_group_has_at_most_twice_as_many_attempts_as_planned(harness: Harness) -> None:
    body = {"policy": "shop", "group": {"id": "ticket-8", "size": 2}}
    answers = [await harness.api.post("/v1/episodes", json=body) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [201, 201, 201, 201, 409]
    assert answers[-1].json()["error"]["code"] == "episode_group_full"
