"""GET /v1/policies/{name}/votes: what became of the votes, by reason and by version, and how late they came."""

from typing import Any

import pytest
from sqlalchemy import select, update

from app.feedback import vote_counts
from app.models import Feedback, Turn, VersionState
from tests.support.deployment import Harness
from tests.support.trained_versions import create_version
from workers.curate import curate


async def read_votes(harness: Harness) -> dict[str, Any]:
    response = await harness.api.get("/v1/policies/shop/votes")
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_a_policy_without_votes(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "comment", "value": "thanks"})
    none = {"total": 0, "learned": 0, "waiting": 0, "not_learned": 0}
    delays = dict.fromkeys(("median_delay", "p90_delay", "median_staleness", "p90_staleness"))
    assert await read_votes(harness) == {
        **{"object": "votes", "policy": "shop", **none, "people": none, "programs": none},
        **{"is_limited": False, "by_reason": [], "by_version": [], "delays": delays},
    }


async def test_votes_are_counted_by_reason_and_version(harness: Harness) -> None:
    turns = [await harness.turn(finished_at=1000.0) for _ in range(4)]
    for turn in turns[:3]:
        await harness.vote(turn.id)
    await harness.vote(turns[0].id, source={"kind": "CODE", "id": "tests"})
    await curate(harness.db, harness.settings)
    learner = await create_version(harness, turns[0])
    pending = await create_version(harness, turns[1], state=VersionState.VERIFIED)
    async with harness.db.write() as session:
        for version, turn in ((learner, turns[0]), (pending, turns[1])):
            query = update(Feedback).where(Feedback.turn_id == turn.id)
            await session.execute(query.values(batch_id=version.batch_id, created_at=1060.0))
    await harness.vote(turns[3].id)
    body = await read_votes(harness)
    assert (body["total"], body["learned"], body["waiting"], body["not_learned"]) == (5, 2, 3, 0)
    assert (body["people"]["total"], body["programs"]) == (
        4,
        {"total": 1, "learned": 1, "waiting": 0, "not_learned": 0},
    )
    counts = [(row["state"], row["reason"], row["count"], row["people"]) for row in body["by_reason"]]
    assert counts == [
        ("learned", "learned", 2, 1),
        ("waiting", "release", 1, 1),
        ("waiting", "batch", 1, 1),
        ("waiting", "processing", 1, 1),
    ]
    assert [(row["version"], row["state"], row["count"], row["people"]) for row in body["by_version"]] == [
        ("shop@v2", "waiting", 1, 1),
        ("shop@v1", "learned", 2, 1),
    ]
    assert body["delays"] == {"median_delay": 60.0, "p90_delay": 60.0, "median_staleness": 0.0, "p90_staleness": 0.0}


async def test_staleness_is_the_distance_of_the_parent_from_the_version_that_replied(harness: Harness) -> None:
    turn = await harness.turn()
    await harness.vote(turn.id)
    for _ in range(2):
        await create_version(harness)
    version = await create_version(harness, turn)
    async with harness.db.write() as session:
        await session.execute(update(Feedback).values(batch_id=version.batch_id))
        await session.execute(update(Turn).values(finished_at=9e9))  # the vote came while the reply was streamed
    delays = (await read_votes(harness))["delays"]
    assert (delays["median_delay"], delays["median_staleness"], delays["p90_staleness"]) == (0.0, 2.0, 2.0)


async def test_delays_are_quantiles_of_the_votes_that_were_learned_from(harness: Harness) -> None:
    """Those on one reply and those on a conversation; votes of a version that was rolled back do not count."""
    turns = [await harness.turn(conversation_id=f"c{number}", finished_at=1000.0) for number in range(11)]
    for turn in turns[:9]:
        await harness.vote(turn.id)
    conversation = {"target": {"conversation_id": "c9"}, "kind": "score", "value": 1}
    assert (await harness.api.post("/v1/feedback", json=conversation)).status_code == 201
    await harness.vote(turns[10].id)
    learner = await create_version(harness, *turns[:10])
    undone = await create_version(harness, turns[10], state=VersionState.ROLLED_BACK)
    async with harness.db.write() as session:
        feedback = list(await session.scalars(select(Feedback).order_by(Feedback.seq)))
        for delay, row in enumerate(feedback, 1):
            row.batch_id = (learner if delay < 11 else undone).batch_id
            row.created_at = 1000.0 + delay
    delays = (await read_votes(harness))["delays"]
    assert (delays["median_delay"], delays["p90_delay"]) == (5.0, 9.0)


async def test_the_newest_votes_are_counted_and_those_in_the_newest_batches(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [await harness.turn() for _ in range(6)]
    for turn in turns:
        await harness.vote(turn.id)
    await curate(harness.db, harness.settings)
    learner = await create_version(harness, *turns[:2], state=VersionState.VERIFIED)
    async with harness.db.write() as session:
        is_learned = Feedback.turn_id.in_([turn.id for turn in turns[:2]])
        await session.execute(update(Feedback).where(is_learned).values(batch_id=learner.batch_id))
    monkeypatch.setattr(vote_counts, "MAX_WAITING", 6)
    exact = await read_votes(harness)
    assert not exact["is_limited"] and exact["total"] == 6
    monkeypatch.setattr(vote_counts, "MAX_WAITING", 3)
    body = await read_votes(harness)
    assert body["is_limited"]
    assert [(row["reason"], row["count"]) for row in body["by_reason"]] == [("release", 2), ("batch", 3)]
