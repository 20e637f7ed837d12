"""Rewards name the feedback that they come from."""

from typing import Any

import pytest
from sqlalchemy import event, insert, update

from app.models import Feedback, FeedbackRank, Rater, Reward
from tests.support.deployment import Harness
from workers.curate import curate


async def submit(harness: Harness, **body: object) -> None:
    response = await harness.api.post("/v1/feedback", json=body)
    assert response.status_code == 201, response.text


async def read_seqs(harness: Harness) -> dict[tuple[str, str], int | None]:
    return {(row.turn_id, row.source.partition("/")[0]): row.feedback_seq for row in await harness.all(Reward)}


async def test_a_reward_names_the_feedback_about_its_turn_conversation_or_ranking(harness: Harness) -> None:
    first, second = [await harness.turn(conversation_id="c") for _ in range(2)]
    await submit(harness, completion_id=first.id, kind="binary", value=True)
    await submit(harness, target={"conversation_id": "c"}, kind="score", value=0.5)
    await submit(harness, kind="comparison", value=[first.id, second.id])
    await submit(harness, completion_id=first.id, kind="comment", value="a comment")
    await curate(harness.db, harness.settings)
    assert await read_seqs(harness) == {
        (first.id, "default"): 1,
        (first.id, "conversation"): 2,
        (second.id, "conversation"): 2,
        (first.id, "comparison"): 3,
        (second.id, "comparison"): 3,
    }


async def test_a_reward_follows_a_repeated_vote_that_is_no_new_signal(harness: Harness) -> None:
    turn = await harness.turn()
    for _ in range(2):
        await harness.vote(turn.id, "up", source={"id": "ada"})
        await curate(harness.db, harness.settings)
    [reward] = await harness.all(Reward)
    ada = await harness.get(Rater, ((await harness.policy()).project_id, "HUMAN/ada"))
    assert (reward.feedback_seq, reward.value, ada.num_up) == (2, 1.0, 1)


async def test_a_label_without_a_reward_replaces_a_label_with_one(harness: Harness) -> None:
    config = {"sources": [{"type": "explicit", "labels": {"rude": -1.0}}]}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=config)).status_code == 200
    turn = await harness.turn()
    for label, seqs in (("rude", [1]), ("greeting", [])):
        await submit(harness, completion_id=turn.id, kind="categorical", value=label)
        await curate(harness.db, harness.settings)
        assert [row.feedback_seq for row in await harness.all(Reward)] == seqs


async def test_a_correction_of_a_conversation_gives_its_turns_a_reward(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c")
    await submit(harness, target={"conversation_id": "c"}, kind="correction", value="better")
    await submit(harness, target={"conversation_id": "c"}, kind="comment", value="a comment")
    assert await curate(harness.db, harness.settings) == 1  # a comment has nothing to do
    assert await read_seqs(harness) == {(turn.id, "conversation"): 1}


async def test_a_withdrawn_correction_no_longer_counts(harness: Harness) -> None:
    turn = await harness.turn()
    await submit(harness, completion_id=turn.id, kind="correction", value="better", id="c-1")
    await curate(harness.db, harness.settings)
    [row] = (await harness.api.get("/v1/feedback", params={"completion_id": turn.id})).json()["data"]
    await harness.api.delete(f"/v1/feedback/{row['id']}")
    assert await curate(harness.db, harness.settings) == 1
    assert await harness.all(Reward) == []


@pytest.mark.parametrize("kind", ["turn", "conversation", "ranking"])
async def test_latest_feedback_of_a_source_is_selected_by_the_database(harness: Harness, kind: str) -> None:
    turns = [await harness.turn(conversation_id="c") for _ in range(2)]
    bodies: dict[str, dict[str, Any]] = {
        "turn": {"kind": "score", "value": 0.5, "completion_id": turns[0].id},
        "conversation": {"kind": "score", "value": 0.5, "target": {"conversation_id": "c"}},
        "ranking": {"kind": "ranking", "value": [turns[0].id, turns[1].id]},
    }
    assert (await harness.api.post("/v1/feedback", json=bodies[kind])).status_code == 201
    [row] = await harness.all(Feedback)
    ranks = await harness.all(FeedbackRank)
    columns = {column.key: getattr(row, column.key) for column in Feedback.__table__.columns}
    copies = [
        {**columns, "seq": number, "id": f"fb-{number}", "idempotency_key": f"k{number}", "value": -0.5}
        for number in range(row.seq + 1, row.seq + 2_001)
    ]
    async with harness.db.write() as session:
        await session.execute(insert(Feedback), copies)
        for rank in ranks:
            copy = {"turn_id": rank.turn_id, "rank": rank.rank}
            await session.execute(insert(FeedbackRank), [{**copy, "feedback_seq": one["seq"]} for one in copies])
        await session.execute(update(Feedback).where(Feedback.seq < copies[-1]["seq"]).values(processed=True))
    loaded: list[int] = []

    def record_load(row: Feedback, context: Any) -> None:
        loaded.append(row.seq)

    event.listen(Feedback, "load", record_load)
    await curate(harness.db, harness.settings)
    event.remove(Feedback, "load", record_load)
    assert {reward.feedback_seq for reward in await harness.all(Reward)} == set(loaded) == {copies[-1]["seq"]}
    assert len(loaded) == 1
