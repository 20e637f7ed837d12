"""W3C's `traceparent`: recorded with every turn, and a way to an episode that was created for its trace."""

from typing import Any

import httpx2
import pytest

from app.chat.traces import Trace, parse_traceparent
from app.models import Episode, Turn
from app.projects.service import create_project
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

TRACE, OTHER, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "a" * 32, "00f067aa0ba902b7"


def traceparent(trace_id: str = TRACE, span_id: str = SPAN) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{span_id}-01"}


async def ask(harness: Harness, headers: dict[str, str], **fields: Any) -> httpx2.Response:
    body = {"model": "shop", "messages": episodes.MESSAGES, **fields}
    return await harness.api.post("/v1/chat/completions", json=body, headers=headers)


async def episode_ids(harness: Harness) -> list[str | None]:
    return [turn.episode_id for turn in await harness.all(Turn)]


VALUES: list[tuple[str, Trace | None]] = [
    (f"00-{TRACE}-{SPAN}-01", Trace(TRACE, SPAN)),
    (f" 00-{TRACE}-{SPAN}-00 ", Trace(TRACE, SPAN)),
    (f"01-{TRACE}-{SPAN}-01-later-fields", Trace(TRACE, SPAN)),
    (f"00-{TRACE}-{SPAN}-01-later-fields", None),
    (f"ff-{TRACE}-{SPAN}-01", None),
    (f"00-{TRACE.upper()}-{SPAN}-01", None),
    (f"00-{'0' * 32}-{SPAN}-01", None),
    (f"00-{TRACE}-{'0' * 16}-01", None),
    (f"00-{TRACE[:-1]}-{SPAN}-01", None),
    (f"00-{TRACE}-{SPAN}", None),
    (TRACE, None),
    ("", None),
]


@pytest.mark.parametrize(("value", "trace"), VALUES)
def test_traceparent_is_read_as_the_standard_says(value: str, trace: Trace | None) -> None:
    assert parse_traceparent(value) == trace


@pytest.mark.parametrize("form", ["id", "traceparent"])
async def test_chat_belongs_to_the_episode_of_its_trace(harness: Harness, scripted: ScriptedEngine, form: str) -> None:
    trace_id = TRACE if form == "id" else traceparent()["traceparent"]
    episode = await episodes.create(harness, trace_id=trace_id)
    assert episode["trace_id"] == TRACE
    answers = [
        await ask(harness, traceparent(span_id="b" * 16) | {"x-attune-agent": "planner"}),
        await harness.api.post("/v1/responses", json={"model": "shop", "input": "hi"}, headers=traceparent()),
        await ask(harness, traceparent(OTHER)),
        await ask(harness, {"traceparent": "nonsense"}),
        await ask(harness, {}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5
    rows = [(turn.episode_id, turn.trace_id, turn.span_id) for turn in await harness.all(Turn)]
    id = episode["id"]
    assert rows[:3] == [(id, TRACE, "b" * 16), (id, TRACE, SPAN), (None, OTHER, SPAN)]
    assert rows[3:] == [(None, None, None)] * 2
    found = (await harness.api.get("/v1/turns", params={"trace_id": OTHER})).json()["data"]
    assert len(found) == 1 and found[0]["episode_id"] is None
    story = (await harness.api.get(f"/v1/turns/{found[0]['id']}/story")).json()
    assert (story["trace_id"], story["span_id"]) == (OTHER, SPAN)


async def test_agent_of_an_unknown_trace_has_no_episode(harness: Harness, scripted: ScriptedEngine) -> None:
    refused = await ask(harness, traceparent() | {"x-attune-agent": "planner"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-attune-agent")


async def test_other_ways_to_name_an_episode_are_stronger(harness: Harness, scripted: ScriptedEngine) -> None:
    traced, named = await episodes.create(harness, trace_id=TRACE), await episodes.create(harness)
    assert (await ask(harness, traceparent() | {"x-attune-episode": named["id"]})).status_code == 200
    assert (await episodes.chat(harness, named, traceparent())).status_code == 200
    assert await episode_ids(harness) == [named["id"]] * 2
    assert (await ask(harness, traceparent())).status_code == 200
    assert (await episode_ids(harness))[2:] == [traced["id"]]


async def test_newest_open_episode_of_a_trace_and_policy(harness: Harness, scripted: ScriptedEngine) -> None:
    """A trace may cover several attempts, one after the other, and chats of other policies."""
    await harness.api.post("/v1/policies", json={"name": "judge"})
    first = await episodes.create(harness, trace_id=TRACE)
    await ask(harness, traceparent())
    second = await episodes.create(harness, trace_id=TRACE)
    await ask(harness, traceparent())
    await episodes.end(harness, second["id"])
    await ask(harness, traceparent())
    assert await episode_ids(harness) == [first["id"], second["id"], first["id"]]
    await ask(harness, traceparent(), model="judge")
    await episodes.end(harness, first["id"])
    assert (await ask(harness, traceparent())).status_code == 200
    assert (await episode_ids(harness))[3:] == [None, None], "of another policy, and after the reported ends"


async def test_limits_hold_for_chats_of_the_trace(harness: Harness, scripted: ScriptedEngine) -> None:
    await episodes.create(harness, trace_id=TRACE, limits={"max_turns": 1})
    assert (await ask(harness, traceparent())).status_code == 200
    for _ in range(2):
        refused = await ask(harness, traceparent())
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "episode_max_turns")


@pytest.mark.parametrize("reason", ["max_turns", "max_tokens", "deadline", "infrastructure"])
async def test_trace_goes_on_after_a_reported_limit(harness: Harness, scripted: ScriptedEngine, reason: str) -> None:
    """The agent reached a limit of its own program, and has reported it: its further chats are ordinary ones."""
    episode = await episodes.create(harness, trace_id=TRACE)
    await ask(harness, traceparent())
    await episodes.end(harness, episode["id"], reason=reason)
    assert (await ask(harness, traceparent())).status_code == 200
    assert await episode_ids(harness) == [episode["id"], None]
    refused = await episodes.chat(harness, episode)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "episode_ended")
    assert f"reported as {reason}" in refused.json()["error"]["message"]


async def test_trace_goes_on_after_the_report_of_an_episode_that_a_limit_has_ended(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    episode = await episodes.create(harness, trace_id=TRACE, limits={"max_turns": 1})
    assert [(await ask(harness, traceparent())).status_code for _ in range(2)] == [200, 409]
    await episodes.end(harness, episode["id"])
    assert (await ask(harness, traceparent())).status_code == 200


async def test_trace_of_another_project_leads_nowhere(harness: Harness, scripted: ScriptedEngine) -> None:
    async with harness.db.write() as session:
        _, secret = await create_project(session, "bakery", "shop", "some/model")
    body = {"policy": "shop", "trace_id": TRACE}
    assert (await harness.api.post("/v1/episodes", json=body, headers=episodes.auth(secret))).status_code == 201
    assert (await ask(harness, traceparent())).status_code == 200
    assert await episode_ids(harness) == [None]
    assert len(await harness.all(Episode)) == 1


@pytest.mark.parametrize("value", ["", "7", TRACE.upper(), "0" * 32, f"00-{TRACE}-{SPAN}", f"{TRACE}0"])
async def test_trace_id_of_another_form_is_refused(harness: Harness, value: str) -> None:
    answer = await harness.api.post("/v1/episodes", json={"policy": "shop", "trace_id": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "trace_id")
