"""TurnWriter: every turn is finished, however its reply ends, and keeps its exclusion reason."""

import asyncio
from typing import Any

import httpx2
import pytest
from sqlalchemy import update

from app.chat.turn_writer import SERVER_STOPPED, TurnStart, TurnWriter
from app.inference.stream import StreamState
from app.main import create_app
from app.models import SERVER_LOST, Turn, TurnState
from tests.app.chat.test_endpoints import MESSAGES, ask, chunks
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from workers.reconcile import reconcile


@pytest.mark.parametrize("n", [1, 3])
async def test_disconnect_before_first_token_aborts_request(
    harness: Harness, scripted: ScriptedEngine, live_url: str, n: int
) -> None:
    scripted.hang = True
    body = {"model": "shop", "messages": MESSAGES, "stream": True, "n": n}
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=live_url, headers=headers, timeout=60) as client:
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while len(scripted.requests) < n:
            await asyncio.sleep(0.02)
        scripted.hang = False  # for the abort
        task.cancel()
        await asyncio.wait([task])
    async with asyncio.timeout(60):
        while {turn.state for turn in await harness.all(Turn)} != {TurnState.ABORTED}:
            await asyncio.sleep(0.05)
    turns = await harness.all(Turn)
    assert scripted.aborted == {turn.id for turn in turns} and len(turns) == n
    assert {turn.finish_reason for turn in turns} == {"client_disconnect"}


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_is_repeated_until_engine_knows_request(
    harness: Harness, scripted: ScriptedEngine, live_url: str, stream: bool
) -> None:
    scripted.reply_text, scripted.seconds_per_token, scripted.accept_seconds = "word " * 2000, 0.02, 0.3
    body = {"model": "shop", "messages": MESSAGES, "stream": stream, "max_tokens": 2000}
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=live_url, headers=headers, timeout=60) as client:
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while not scripted.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
    turn = await harness.wait_for_turn()
    assert (turn.state, turn.finish_reason) == (TurnState.ABORTED, "client_disconnect")
    assert turn.num_output_tokens is not None
    assert turn.num_output_tokens < 1000, "the engine stopped after the abort"
    assert not scripted.running


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_engine_response_fails_turn(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, stream: bool, n: int
) -> None:
    def raise_unexpected(*args: Any) -> None:
        raise IndexError("an unexpected format")

    monkeypatch.setattr(StreamState, "add_chunk", raise_unexpected)
    monkeypatch.setattr("app.inference.client.capture_choice", raise_unexpected)
    async with asyncio.timeout(20):
        response = await ask(harness, stream=stream, n=n)
    error = chunks(response)[-1]["error"] if stream else response.json()["error"]
    assert error["code"] == "engine_unavailable" and "could not be processed" in error["message"]
    turns = await harness.all(Turn)
    assert len(turns) == n and {turn.state for turn in turns} == {TurnState.FAILED}


async def test_exclusion_reason_survives_being_marked_lost(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.is_blocked = lambda reply: True
    tasks = [asyncio.create_task(ask(harness, temperature=temperature)) for temperature in (0.0, 1.0)]
    while len(scripted.requests) < 2 or len(await harness.all(Turn)) < 2:
        await asyncio.sleep(0.02)
    async with harness.db.write() as session:
        await session.execute(update(Turn).values(created_at=Turn.created_at - 10_000))
    await reconcile(harness.db, harness.settings)
    assert {turn.finish_reason for turn in await harness.all(Turn)} == {SERVER_LOST}
    scripted.is_blocked = lambda reply: False
    greedy, sampled = [(await task).json()["id"] for task in tasks]
    turns = [await harness.get(Turn, id) for id in (greedy, sampled)]
    assert {turn.state for turn in turns} == {TurnState.DONE}
    assert "greedy" in turns[0].exclusion_reason and turns[1].exclusion_reason is None


async def test_drain_ends_open_turns(harness: Harness) -> None:
    old = await harness.get(Turn, (await harness.turn()).id)
    opened = {column.key: getattr(old, column.key) for column in Turn.__table__.columns if column.key != "state"}
    ids = [f"chatcmpl-{at:032x}" for at in range(2)]
    app = create_app(harness.settings)
    async with app.router.lifespan_context(app):
        writer = app.services.get(TurnWriter)
        for id in ids:
            await writer.record_start(TurnStart([opened | {"id": id, "completion_id": id, "finished_at": None}]))
        writer.drain = lambda seconds: TurnWriter.drain(writer, 0.2)  # type: ignore[method-assign]
    for id in ids:
        turn = await harness.get(Turn, id)
        assert (turn.state, turn.finish_reason, turn.exclusion_reason) == (
            TurnState.ABORTED,
            SERVER_STOPPED,
            SERVER_STOPPED,
        )
