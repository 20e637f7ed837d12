"""TurnWriter: every turn is finished, however its reply ends, and keeps its exclusion reason."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import httpx2
import orjson
import pytest
from sqlalchemy import update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError

from app.chat import turn_writer
from app.chat.new_turn import NewTurn
from app.chat.turn_writer import SERVER_STOPPED, TurnEnd, TurnStart, TurnWriter
from app.core.errors import AttuneError
from app.inference.stream import StreamState
from app.main import create_app
from app.models import SERVER_LOST, Turn, TurnState
from tests.app.chat.test_endpoints import MESSAGES, ask
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
    monkeypatch.setattr("app.inference.sglang.client.capture_choice", raise_unexpected)
    async with asyncio.timeout(20):
        response = await ask(harness, stream=stream, n=n)
    error = response.json()["error"]  # of a stream too, which has not begun
    assert (
        response.status_code == 503
        and error["code"] == "engine_unavailable"
        and "could not be processed" in error["message"]
    )
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
    columns = {field.name: getattr(old, field.name) for field in fields(NewTurn)}
    ids = [f"chatcmpl-{at:032x}" for at in range(2)]
    app = create_app(harness.settings)
    async with app.router.lifespan_context(app):
        writer = app.services.get(TurnWriter)
        for id in ids:
            await writer.record_start(TurnStart([NewTurn(**columns | {"id": id, "completion_id": id})]))
        writer.drain = lambda seconds: TurnWriter.drain(writer, 0.2)  # type: ignore[method-assign]
    for id in ids:
        turn = await harness.get(Turn, id)
        assert (turn.state, turn.finish_reason, turn.exclusion_reason) == (
            TurnState.ABORTED,
            SERVER_STOPPED,
            SERVER_STOPPED,
        )


class Outage:
    """Makes the writes of ended turns fail as if the database were away, a number of times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
        self.num_failures, self.num_calls = num_failures, 0
        write = turn_writer.write_group

        def write_group(connection: Connection, items: Sequence[TurnStart | TurnEnd]) -> list[AttuneError | None]:
            results = write(connection, items)
            if isinstance(items[0], TurnEnd):
                self.num_calls += 1
                if self.num_calls <= self.num_failures:
                    raise OperationalError("UPDATE turns", {}, OSError("the server closed the connection"))
            return results

        monkeypatch.setattr(turn_writer, "write_group", write_group)


@pytest.mark.parametrize("stream", [False, True])
async def test_turn_survives_a_short_outage_at_its_end(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    outage = Outage(monkeypatch, num_failures=2)
    async with new_api(harness) as api:
        response = await api.post(
            "/v1/chat/completions", json={"model": "shop", "messages": MESSAGES, "stream": stream}
        )
    assert response.status_code == 200 and "error" not in response.text and outage.num_calls == 3
    [turn] = await harness.all(Turn)
    assert turn.state == TurnState.DONE and turn.output_ids


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_long_outage_at_the_end_is_an_error_of_the_usual_form(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, stream: bool, path: str
) -> None:
    Outage(monkeypatch, num_failures=10**6)
    monkeypatch.setattr(turn_writer, "END_RETRY_SECONDS", 0.3)
    body = {"model": "shop", "stream": stream, ("input" if path == "responses" else "messages"): MESSAGES}
    async with asyncio.timeout(60), new_api(harness) as api:  # it would wait for ever
        response = await api.post(f"/v1/{path}", json=body)
    if not stream:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "database_unavailable")
        return
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    if path == "responses":
        assert orjson.loads(events[-1])["type"] == "response.failed"
    else:
        assert events[-1] == "[DONE]" and orjson.loads(events[-2])["error"]["code"] == "database_unavailable"


@pytest.mark.parametrize("part", ["end", "start"])
async def test_no_turn_stays_open_after_an_outage(
    harness: Harness, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The end of a turn is not recorded in time, or the answer to the commit of its start is lost."""
    monkeypatch.setattr(turn_writer, "END_RETRY_SECONDS", 0.2)
    monkeypatch.setattr(turn_writer, "UNRECORDED_PAUSE", 0.05)
    outage = Outage(monkeypatch, num_failures=10**6)
    async with asyncio.timeout(60), new_api(harness) as api:
        if part == "start":
            commit = harness_writer(api)._group_commit.submit

            async def lose_answer(item: TurnStart | TurnEnd) -> None:
                await commit(item)
                if isinstance(item, TurnStart):
                    raise OperationalError("COMMIT", {}, OSError("the server closed the connection"))

            monkeypatch.setattr(harness_writer(api)._group_commit, "submit", lose_answer)
        response = await api.post("/v1/chat/completions", json={"model": "shop", "messages": MESSAGES})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "database_unavailable")
        assert [turn.state for turn in await harness.all(Turn)] == [TurnState.OPEN]
        outage.num_failures = 0
        while (turn := (await harness.all(Turn))[0]).state == TurnState.OPEN:
            await asyncio.sleep(0.02)
    assert (turn.state, turn.exclusion_reason) == (TurnState.FAILED, turn_writer.DATABASE_AWAY)


def harness_writer(api: httpx2.AsyncClient) -> TurnWriter:
    """Return the turn writer of the API process of this client."""
    writer: TurnWriter = api._transport.app.services.get(TurnWriter)  # type: ignore[attr-defined]
    return writer


@asynccontextmanager
async def new_api(harness: Harness) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a new API process, whose turn writer is created after the test has changed it."""
    app, headers = create_app(harness.settings), {"authorization": f"Bearer {harness.key}"}
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://attune", headers=headers, timeout=60) as api,
    ):
        yield api
