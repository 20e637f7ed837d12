"""The stream of events: what is new, once and in order; it continues after the last event's id, and ends on a drain."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import httpx2
import pytest

from app.core.draining_server import STATE, DrainSignal, is_draining
from app.models import AuditAction, record_audit
from app.ops import audit_chain, event_stream
from app.ops.event_stream import Position, read_end, read_events, stream_events
from tests.support.deployment import Harness


async def audit(harness: Harness, action: AuditAction) -> None:
    async with harness.db.write() as session:
        project_id = (await harness.policy()).project_id
        record_audit(session, "test", action, "shop", "why", project_id=project_id)
    await audit_chain.seal_entries(harness.db)


async def read(harness: Harness, position: Position) -> tuple[list[tuple[str, Any]], Position]:
    """Return the next events as (event, data), and the position after them."""
    async with harness.db.read_snapshot() as session:
        chunks, after = await read_events(session, (await harness.policy()).project_id, position)
    return [parse(chunk)[1:] for chunk in chunks], after


def parse(chunk: bytes) -> tuple[str, str, Any]:
    lines = dict(line.split(": ", 1) for line in chunk.decode().strip().splitlines())
    return lines["id"], lines["event"], json.loads(lines["data"])


async def test_events_come_once_and_after_the_position(harness: Harness) -> None:
    await harness.vote((await harness.turn(created_at=1.0)).id)
    await audit(harness, AuditAction.TRAINING_HALTED)
    async with harness.db.read_snapshot() as session:
        end = await read_end(session, (await harness.policy()).project_id)
    assert await read(harness, end._replace(turn_time=9e9)) == ([], end._replace(turn_time=9e9))
    turn = await harness.turn(created_at=end.turn_time + 0.001, conversation_id="talk")
    feedback_id = (await harness.vote(turn.id, "down", comment="private")).json()["id"]
    await audit(harness, AuditAction.KEY_CREATED)  # no event
    await audit(harness, AuditAction.DEPLOYMENT_ROLLED_BACK)
    await asyncio.sleep(event_stream.SETTLE_SECONDS)
    events, after = await read(harness, Position.parse(str(end)))
    assert [kind for kind, _ in events] == ["turn", "feedback", "audit"]
    assert (events[0][1]["id"], events[0][1]["version"]) == (turn.id, "shop@v0")
    assert (events[1][1]["id"], events[1][1]["value"], "comment" in events[1][1]) == (feedback_id, -1.0, False)
    assert (events[2][1]["action"], events[2][1]["reason"]) == ("deployment.rolled_back", "why")
    assert await read(harness, after) == ([], after)


async def test_young_turns_wait_for_those_that_are_not_committed_yet(harness: Harness) -> None:
    async with harness.db.read_snapshot() as session:
        end = await read_end(session, (await harness.policy()).project_id)
    await harness.turn(created_at=end.turn_time + event_stream.SETTLE_SECONDS + 60)
    assert await read(harness, end) == ([], end)


async def test_backlog_is_read_in_parts(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_ROWS", 2)
    turns = [await harness.turn(created_at=float(number // 2)) for number in range(1, 6)]
    position, seen = Position(0, 0, 0.0, "-"), []
    for _ in range(4):
        events, position = await read(harness, position)
        assert len(events) <= 2
        seen += [data["id"] for _, data in events]
    expected = [turn.id for turn in sorted(turns, key=lambda turn: (turn.created_at, turn.id))]
    assert seen == expected


async def test_stream_has_heartbeats_and_ends_when_the_server_stops(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(event_stream, "HEARTBEAT_SECONDS", 0.02)
    signal = DrainSignal()
    scope = {"state": {STATE: signal}}

    async def is_over() -> bool:
        return is_draining(scope)

    project_id = (await harness.policy()).project_id
    async with aclosing(stream_events(harness.db, project_id, Position(0, 0, 9e9, ""), is_over)) as chunks:  # type: ignore[type-var]
        assert await anext(chunks) == b"retry: 1000\n\n"
        assert await anext(chunks) == b": heartbeat\n\n"
        signal.is_set = True
        assert [chunk async for chunk in chunks] == []


async def test_stream_over_http(harness: Harness, live_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, headers = f"{live_url}/v1/events/stream", {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=30, trust_env=False) as client:
        refused = await client.get(path, headers={"last-event-id": "yesterday"})
        assert refused.status_code == 400 and "No event has the id 'yesterday'" in refused.text
        async with client.stream("GET", path, headers={"last-event-id": "0-0-0.0-"}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            assert await anext(lines) == "retry: 1000"
            turn = await harness.turn(created_at=1.0)
            while not (line := await anext(lines)).startswith("data: "):
                pass
            assert json.loads(line.removeprefix("data: "))["id"] == turn.id
            monkeypatch.setattr(event_stream, "MAX_STREAMS", 1)
            full = await client.get(path)
            assert full.status_code == 429 and full.json()["error"]["code"] == "too_many_streams"
