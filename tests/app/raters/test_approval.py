"""Approval counts what one person said about one reply, once: the last word. Votes go the whole way through curate."""

from typing import Any

import pytest

from app.core.settings import Settings
from tests.support.deployment import Harness
from workers.curate import curate


@pytest.fixture
def settings(settings: Settings) -> Settings:
    sources = [{"type": "explicit", "labels": {"solved": 1.0}}, {"type": "next_turn"}]
    return settings.replace({"rewards": {"sources": sources}})


async def send(harness: Harness, turn_id: str, value: Any = "up", **fields: Any) -> str:
    """Submit feedback, and return its id."""
    body = {"completion_id": turn_id, "kind": "binary", "value": value, **fields}
    response = await harness.api.post("/v1/feedback", json=body)
    assert response.status_code == 201, response.text
    id: str = response.json()["id"]
    return id


async def read_approval(harness: Harness) -> Any:
    """Return the number of votes and the approval."""
    await curate(harness.db, harness.settings)
    [version] = (await harness.api.get("/v1/policies/shop/versions")).json()["data"]
    return version["rated"], version["approval"]


async def test_each_person_has_one_vote_on_a_reply_and_the_last_word_counts(harness: Harness) -> None:
    first, second = await harness.turn(), await harness.turn()
    await send(harness, first.id, "up", source="ada")
    await send(harness, first.id, "down", source="ada", name="tone")
    await send(harness, first.id, "down", source="bob")
    await send(harness, second.id, "up", source="ada")
    assert await read_approval(harness) == (3, pytest.approx(1 / 3))
    await send(harness, first.id, "up", source="ada")  # her last word about it
    assert await read_approval(harness) == (3, pytest.approx(2 / 3))


async def test_withdrawn_and_undecided_feedback_is_no_vote(harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(4)]
    withdrawn = await send(harness, turns[0].id, source="ada")
    await send(harness, turns[1].id, 0.5, kind="score", source="ada")
    await send(harness, turns[2].id, "fine", kind="comment", source="ada")
    await send(harness, turns[3].id, 0.0, kind="score", source="bob")
    before = await read_approval(harness)
    await harness.api.delete(f"/v1/feedback/{withdrawn}")
    after = await read_approval(harness)
    assert before[0] - after[0] == 1 and after[1] is not None


async def test_programs_judges_and_blocked_raters_have_no_vote(harness: Harness) -> None:
    turn, other = await harness.turn(), await harness.turn()
    await send(harness, turn.id, "up", source={"kind": "CODE", "id": "checkout"})
    await send(harness, turn.id, "up", source={"kind": "LLM_JUDGE", "id": "gpt"})
    assert await read_approval(harness) == (0, None)
    await send(harness, turn.id, "down", source="ada")
    await send(harness, other.id, "up", source="mallory")
    assert await read_approval(harness) == (2, 0.5)
    await harness.api.put("/v1/raters/HUMAN/mallory", json={"standing": "blocked"})
    assert await read_approval(harness) == (1, 0.0)


async def test_people_without_a_name_are_their_conversations_users(harness: Harness) -> None:
    turn, other = await harness.turn(end_user="ada"), await harness.turn(end_user="bob")
    await send(harness, turn.id, "up")
    await send(harness, turn.id, "down")
    await send(harness, other.id, "down")
    assert await read_approval(harness) == (2, 0.0)
