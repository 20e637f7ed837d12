"""Limits of episodes: on time, turns and tokens. The next chat, or the reconciler, ends an episode that reached one."""

import asyncio
from typing import Any

import httpx2
import pytest
from sqlalchemy import update

from app.chat.episode_limits import OpenEpisode, end_expired
from app.core.database import now
from app.models import Episode, EpisodeState, Turn, TurnState
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate
from workers.reconcile import reconcile


def refusal(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def age(harness: Harness, seconds: float) -> None:
    """Move all episodes and turns into the past."""
    async with harness.db.write() as session:
        await session.execute(
            update(Episode).values(created_at=Episode.created_at - seconds, deadline_at=Episode.deadline_at - seconds)
        )
        times = {"created_at": Turn.created_at - seconds, "finished_at": Turn.finished_at - seconds}
        await session.execute(update(Turn).values(times))


async def ends(harness: Harness) -> list[tuple[str, str | None]]:
    return [(row.state, row.end_reason) for row in await harness.all(Episode)]


LIMITS: list[tuple[dict[str, Any], float, str]] = [
    ({"idle_seconds": 60.0}, 61.0, "idle_timeout"),
    ({"idle_seconds": 60.0, "deadline_seconds": 50.0}, 61.0, "deadline"),
    ({"deadline_seconds": 300.0}, 301.0, "deadline"),
    ({"max_turns": 1}, 0.0, "max_turns"),
    ({"max_tokens": 1}, 0.0, "max_tokens"),
]


@pytest.mark.parametrize(("limits", "seconds", "reason"), LIMITS, ids=str)
async def test_next_chat_is_refused_and_ends_the_episode(
    harness: Harness, scripted: ScriptedEngine, limits: dict[str, Any], seconds: float, reason: str
) -> None:
    episode = await episodes.create(harness, limits=limits)
    assert (await episodes.chat(harness, episode)).status_code == 200
    await age(harness, seconds)
    for _ in range(2):
        refused = await episodes.chat(harness, episode)
        assert refusal(refused) == (409, f"episode_{reason}")
        assert refused.headers["x-should-retry"] == "false"
    assert await ends(harness) == [("ended", reason)]
    assert len(await harness.all(Turn)) == 1
    ended = await episodes.end(harness, episode["id"], outcome=1.0)
    assert (ended.json()["end_reason"], ended.json()["outcome"]) == (reason, 1.0)
    assert await curate(harness.db, harness.settings) == 1


@pytest.mark.parametrize(("limits", "seconds", "reason"), LIMITS, ids=str)
async def test_reconciler_ends_what_ran_out_of_time(
    harness: Harness, scripted: ScriptedEngine, limits: dict[str, Any], seconds: float, reason: str
) -> None:
    episode, other = await episodes.create(harness, limits=limits), await episodes.create(harness)
    await episodes.chat(harness, episode)
    await reconcile(harness.db, harness.settings)
    assert await ends(harness) == [("open", None)] * 2
    await age(harness, seconds)
    await reconcile(harness.db, harness.settings)
    # An agent that is within its limits on turns and tokens has not reached them before it asks for more.
    by_time = reason in ("idle_timeout", "deadline")
    found = {row.id: row.end_reason for row in await harness.all(Episode)}
    assert found == {episode["id"]: reason if by_time else None, other["id"]: None}


async def test_episode_with_a_running_chat_is_not_idle(harness: Harness) -> None:
    episode = await episodes.create(harness, limits={"idle_seconds": 60.0})
    turn = await harness.turn(episode_id=episode["id"], episode_step=1, state=TurnState.OPEN, finished_at=None)
    await age(harness, 100.0)
    assert await end_expired(harness.db) == 0
    async with harness.db.write() as session:
        row = await session.get_one(Turn, turn.id)
        row.state, row.finished_at = TurnState.DONE, now() - 59
    assert await end_expired(harness.db) == 0
    async with harness.db.write() as session:
        (await session.get_one(Turn, turn.id)).finished_at = now() - 61
    assert await end_expired(harness.db) == 1
    assert await end_expired(harness.db) == 0


async def test_concurrent_chats_do_not_exceed_the_limit_on_turns(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness, limits={"max_turns": 3})
    answers = await asyncio.gather(*(episodes.chat(harness, episode) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [409] * 5
    assert sorted(turn.episode_step for turn in await harness.all(Turn)) == [1, 2, 3]
    assert await ends(harness) == [("ended", "max_turns")]


async def test_chats_that_an_engine_has_failed_use_no_turn_up(harness: Harness, scripted: ScriptedEngine) -> None:
    """Else an agent whose client repeats a chat would end at a limit that it has not reached."""
    episode = await episodes.create(harness, limits={"max_turns": 2})
    scripted.refuse_status = 503
    for _ in range(3):
        assert (await episodes.chat(harness, episode)).status_code == 503
    scripted.refuse_status = None
    answers = [await episodes.chat(harness, episode) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 409]
    assert refusal(answers[2]) == (409, "episode_max_turns")
    answered = [turn.episode_step for turn in await harness.all(Turn) if turn.state == TurnState.DONE]
    assert len(answered) == 2 and await ends(harness) == [("ended", "max_turns")]


async def test_chat_that_was_planned_before_the_end_is_refused(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await episodes.create(harness)

    async def admit(*_: Any) -> OpenEpisode:
        async with harness.db.write() as session:
            await session.execute(update(Episode).values(state=EpisodeState.ENDED, end_reason="completed"))
        return OpenEpisode(episode["id"], (await harness.policy()).id)

    monkeypatch.setattr("app.chat.planning.require_open", admit)
    assert refusal(await episodes.chat(harness, episode)) == (409, "episode_ended")
    assert await harness.all(Turn) == []


@pytest.mark.parametrize("has_report", [True, False])
async def test_reason_of_a_newer_release_ends_an_episode_as_any(
    harness: Harness, scripted: ScriptedEngine, has_report: bool
) -> None:
    """Processes of two releases run side by side during an upgrade."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    episode = await episodes.create(harness, trace_id=trace)
    values = {"state": EpisodeState.ENDED, "end_reason": "preempted", "ended_at": now()}
    async with harness.db.write() as session:
        await session.execute(update(Episode).values(values | {"reported_reason": "preempted" if has_report else None}))
    refused = await episodes.chat(harness, episode)
    assert refusal(refused) == (409, "episode_ended") and "preempted" in refused.text
    read = await harness.api.get(f"/v1/episodes/{episode['id']}")
    assert (read.status_code, read.json()["end_reason"]) == (200, "preempted")
    body, headers = {"model": "shop", "messages": episodes.MESSAGES}, {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    traced = await harness.api.post("/v1/chat/completions", json=body, headers=headers)
    assert traced.status_code == (200 if has_report else 409)


async def test_choices_of_a_chat_are_one_step(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness, limits={"max_turns": 2})
    assert (await episodes.chat(harness, episode, n=2)).status_code == 200
    assert (await episodes.chat(harness, episode)).status_code == 200
    assert sorted(turn.episode_step for turn in await harness.all(Turn)) == [1, 1, 2]


@pytest.mark.parametrize(
    "limits",
    [{"max_turns": 0}, {"max_turns": 1.5}, {"idle_seconds": 0}, {"deadline_seconds": 1e9}, {"seconds": 1}],
    ids=str,
)
async def test_impossible_limits_are_refused(harness: Harness, limits: dict[str, Any]) -> None:
    answer = await harness.api.post("/v1/episodes", json={"policy": "shop", "limits": limits})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("limits.")
