"""Lists of turns, conversations and feedback: filters, pages, and an index for each statement on PostgreSQL."""

import re
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from app.models import RouteReason, Turn, TurnState
from app.turns import bounded_scan, lists
from app.turns.lists import FeedbackFilter, TurnFilter
from app.turns.story import read_story
from tests.support.deployment import Harness
from tests.support.trained_versions import publish
from workers.curate import curate

GREEDY = "greedy decoding: the reply was not sampled"
SCAN = re.compile(r"Seq Scan on (turns|feedback|rewards|samples)\b")


async def get(harness: Harness, path: str, **params: Any) -> Any:
    response = await harness.api.get(path, params=params)
    assert response.status_code == 200, response.text
    return response.json()


async def ids(harness: Harness, path: str, **params: Any) -> list[str]:
    return [row["id"] for row in (await get(harness, path, **params))["data"]]


async def read_all(harness: Harness, path: str, **params: Any) -> list[str]:
    """Return the ids of every page."""
    found: list[str] = []
    after: dict[str, str] = {}
    for _ in range(50):
        page = await get(harness, path, **params, **after)
        found += [row["id"] for row in page["data"]]
        if not page["has_more"]:
            return found
        after = {"after": page["last_id"]}
    raise AssertionError("the pages do not end")


async def create_turns(harness: Harness) -> list[Turn]:
    """Create turns, the oldest first: of two versions, three users, three conversations, one of them failed."""
    base, version = await harness.serving(), await publish(harness)
    canary = {"route_reason": RouteReason.CANARY, "end_user": "bob", "conversation_id": "b"}
    return [
        await harness.turn(base, created_at=1.0, end_user="ada", conversation_id="a"),
        await harness.turn(base, created_at=2.0, end_user="bob", conversation_id="b"),
        await harness.turn(version, created_at=3.0, **canary),
        await harness.turn(version, created_at=4.0, end_user="ada", conversation_id="a", state=TurnState.FAILED),
        await harness.turn(
            base, created_at=5.0, end_user="eve", conversation_id="e", exclusion_reason="greedy decoding"
        ),
    ]


async def test_turns_are_filtered(harness: Harness) -> None:
    turns = await create_turns(harness)
    await harness.vote(turns[0].id, "up", source="ada")
    await harness.vote(turns[1].id, "down", source="bob")
    await harness.vote(turns[1].id, "up", source="eve")
    await curate(harness.db, harness.settings)
    for params, expected in (
        ({}, [4, 3, 2, 1, 0]),
        ({"policy": "shop"}, [4, 3, 2, 1, 0]),
        ({"policy": "shop", "version": 1}, [3, 2]),
        ({"route": "canary"}, [2]),
        ({"user": "ada"}, [3, 0]),
        ({"user": "bob", "policy": "shop", "version": 0}, [1]),
        ({"conversation_id": "b"}, [2, 1]),
        ({"since": 2.0, "until": 4.0}, [2, 1]),
        ({"state": "failed"}, [3]),
        ({"excluded": True}, [4]),
        ({"judged": True}, [1, 0]),
        ({"judged": False}, [4, 3, 2]),
        ({"vote": "up"}, [1, 0]),
        ({"vote": "down"}, [1]),
        ({"origin": "shadow"}, []),
    ):
        assert await ids(harness, "/v1/turns", **params) == [turns[at].id for at in expected], params
    [row] = (await get(harness, "/v1/turns", vote="down"))["data"]
    assert (row["up"], row["down"], row["version"], row["prompt"], row["reply"]) == (1, 1, "shop@v0", "hi", "hello")
    [excluded] = (await get(harness, "/v1/turns", excluded=True))["data"]
    assert excluded["exclusion"]["code"] == "greedy"
    assert (await harness.api.get("/v1/turns", params={"version": 1})).status_code == 400


async def test_conversations_are_listed_by_their_newest_turn(harness: Harness) -> None:
    turns = await create_turns(harness)
    assert await ids(harness, "/v1/conversations") == [turns[at].id for at in (4, 3, 2)]
    assert await ids(harness, "/v1/conversations", user="ada") == [turns[3].id]
    assert await ids(harness, "/v1/conversations", policy="shop", version=0) == [turns[4].id]
    assert await read_all(harness, "/v1/conversations", limit=1) == [turns[at].id for at in (4, 3, 2)]


async def test_pages_hold_every_row_once(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [await harness.turn(created_at=float(number // 2), conversation_id=f"c{number}") for number in range(9)]
    expected = [turn.id for turn in sorted(turns, key=lambda turn: (turn.created_at, turn.id), reverse=True)]
    for scanned, limit in ((5000, 2), (5000, 9), (3, 2), (1, 1), (3, 100)):
        monkeypatch.setattr(bounded_scan, "MAX_SCANNED", scanned)
        assert await read_all(harness, "/v1/turns", limit=limit) == expected, (scanned, limit)
        assert await read_all(harness, "/v1/conversations", limit=limit) == expected, (scanned, limit)


async def test_page_scans_a_bounded_number_of_turns(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_scan, "MAX_SCANNED", 3)
    turns = [await harness.turn(created_at=float(number)) for number in range(8)]
    await harness.vote(turns[0].id, "down")
    await curate(harness.db, harness.settings)
    first = await get(harness, "/v1/turns", vote="down")
    assert (first["data"], first["has_more"], first["last_id"]) == ([], True, turns[5].id)
    assert await read_all(harness, "/v1/turns", vote="down") == [turns[0].id]


async def test_feedback_is_filtered_and_paged(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = await create_turns(harness)
    sent = [
        (await harness.vote(turns[0].id, "up", source="ada")).json()["id"],
        (await harness.vote(turns[2].id, "down", source="bob", name="tone")).json()["id"],
        (await harness.vote(turns[1].id, "up", source={"kind": "CODE", "id": "till"})).json()["id"],
    ]
    path = "/v1/feedback/search"
    for params, expected in (
        ({}, [2, 1, 0]),
        ({"direction": "down"}, [1]),
        ({"source_id": "ada"}, [0]),
        ({"source_kind": "CODE"}, [2]),
        ({"name": "tone"}, [1]),
        ({"kind": "comment"}, []),
        ({"policy": "shop", "version": 1}, [1]),
        ({"policy": "shop"}, [2, 1, 0]),
        ({"since": 9e9}, []),
    ):
        assert await ids(harness, path, **params) == [sent[at] for at in expected], params
    assert all(row["outcome"]["sentence"] for row in (await get(harness, path))["data"])
    for scanned in (5000, 2, 1):
        monkeypatch.setattr(bounded_scan, "MAX_SCANNED", scanned)
        assert await read_all(harness, path, limit=1) == sent[::-1]
        assert await read_all(harness, path, source_kind="HUMAN") == [sent[1], sent[0]]


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_every_list_uses_an_index(harness: Harness) -> None:
    turns = await create_turns(harness)
    await harness.vote(turns[0].id, "up", source="ada")
    await curate(harness.db, harness.settings)
    statements: dict[str, Any] = {}

    @event.listens_for(harness.db._snapshots.sync_engine, "before_cursor_execute")
    def record(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if statement.startswith(("SELECT", "WITH")):
            statements[statement] = parameters

    project_id = turns[0].project_id
    async with harness.db.read_snapshot() as session:
        for wanted in (
            TurnFilter(),
            TurnFilter(user="ada"),
            TurnFilter(conversation_id="a"),
            TurnFilter(policy="shop", version=1, vote="up"),
            TurnFilter(judged=False, since=1.0, until=9.0),
        ):
            for after in (None, turns[3].id):
                await lists.list_turns(session, project_id, wanted, after=after, limit=20)
                await lists.list_conversations(session, project_id, wanted, after=after, limit=20)
        for sought in (
            FeedbackFilter(),
            FeedbackFilter(source_id="ada"),
            FeedbackFilter(policy="shop", direction="up"),
        ):
            await lists.list_feedback(session, project_id, sought, after=None, limit=20)
        await read_story(session, project_id, turns[0].id)
    assert len(statements) > 20
    url = harness.settings.database_url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(url) as server:
        for way in ("seqscan", "bitmapscan", "sort"):  # each only where no index can be used
            server.execute(f"SET enable_{way} = off")
        for statement, parameters in statements.items():
            plan = "\n".join(line for (line,) in server.execute(f"EXPLAIN {statement}", parameters).fetchall())
            assert not SCAN.search(plan), f"{statement}\n{plan}"
            if "ORDER BY turns.created_at DESC" in statement:  # in order: a page does not sort all that match
                assert "->  Sort" not in plan, f"{statement}\n{plan}"
