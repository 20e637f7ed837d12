"""Lineage: which feedback a version learned from, and which versions learned from a feedback."""

from typing import Any

from sqlalchemy import event, update

from app.core.database import Database
from app.models import Feedback
from tests.support.deployment import Harness
from tests.support.trained_versions import create_batch, create_version

VERSIONS = "/v1/policies/shop/versions"


async def read_lineage(harness: Harness, number: int, **params: Any) -> dict[str, Any]:
    answer = await harness.api.get(f"{VERSIONS}/{number}/lineage", params=params)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def send_feedback(harness: Harness, body: dict[str, Any]) -> str:
    answer = await harness.api.post("/v1/feedback", json=body)
    assert answer.status_code == 201, answer.text
    id: str = answer.json()["id"]
    return id


async def test_lineage_has_exactly_the_feedback_effective_in_time(harness: Harness) -> None:
    turn, other = await harness.turn(end_user="bob"), await harness.turn()
    feedback_id = await send_feedback(
        harness, {"completion_id": turn.id, "kind": "binary", "value": "up", "source": {"id": "ada"}}
    )
    await send_feedback(harness, {"completion_id": turn.id, "kind": "comment", "value": "a comment"})
    better = await send_feedback(harness, {"completion_id": turn.id, "kind": "correction", "value": "well"})
    withdrawn = await send_feedback(harness, {"completion_id": turn.id, "kind": "score", "value": 1, "name": "mood"})
    await harness.api.delete(f"/v1/feedback/{withdrawn}")
    replaced = await send_feedback(harness, {"completion_id": other.id, "kind": "binary", "value": "up"})
    nameless = await send_feedback(harness, {"completion_id": other.id, "kind": "score", "value": -0.5})
    await create_version(harness, turn, other)
    late = await send_feedback(harness, {"completion_id": turn.id, "kind": "rating", "value": 1, "name": "late"})
    body = await read_lineage(harness, 1)
    entries = {row["feedback_id"]: row for row in body["data"]}
    assert set(entries) == {feedback_id, better, nameless}
    entry = entries[feedback_id]
    assert (entry["turn_id"], entry["reply_version"], entry["reward"]) == (turn.id, "shop@v0", 1.0)
    assert (entry["rater"], entry["value"], entry["kind"]) == ("HUMAN/ada", 1.0, "binary")
    assert (body["version"], body["tainted_at"], body["untainted_ancestor"]) == ("shop@v1", None, None)
    for id, versions in ((feedback_id, ["shop@v1"]), (withdrawn, []), (replaced, []), (late, [])):
        learners = (await harness.api.get(f"/v1/feedback/{id}/lineage")).json()["data"]
        assert [row["version"] for row in learners] == versions, id


async def test_lineage_has_comparisons_and_conversation_feedback(harness: Harness) -> None:
    one, two = await harness.turn(conversation_id="c"), await harness.turn()
    order = await send_feedback(harness, {"kind": "comparison", "value": [one.id, two.id]})
    conversation_feedback_id = await send_feedback(
        harness, {"kind": "score", "value": 1, "target": {"conversation_id": "c"}}
    )
    await create_version(harness, one, two)
    entries = sorted((row["turn_id"], row["feedback_id"]) for row in (await read_lineage(harness, 1))["data"])
    assert entries == sorted([(one.id, order), (two.id, order), (one.id, conversation_feedback_id)])
    for id in (order, conversation_feedback_id):
        assert len((await harness.api.get(f"/v1/feedback/{id}/lineage")).json()["data"]) == 1


async def test_pages_have_every_entry_once(harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(5)]
    for turn in turns[:4]:
        for source_id in ("ada", "bob"):
            await harness.vote(turn.id, source={"id": source_id})
    await create_version(harness, *turns)
    all_ids = [row["id"] for row in (await read_lineage(harness, 1))["data"]]
    assert len(set(all_ids)) == 9  # the fifth has no feedback
    ids: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = await read_lineage(harness, 1, limit=2, **after)
        ids += [row["id"] for row in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert ids == all_ids


async def test_lineage_takes_one_query(harness: Harness) -> None:
    counts = []
    for size in (1, 20):
        turns = [await harness.turn() for _ in range(size)]
        for turn in turns:
            await harness.vote(turn.id)
        version = await create_version(harness, *turns)
        statements: list[str] = []
        app_engine = harness.api._transport.app.services.get(Database).engine.sync_engine  # type: ignore[attr-defined]

        def count(conn: Any, cursor: Any, statement: str, *rest: Any, ids: list[str] = statements) -> None:
            ids.append(statement)

        event.listen(app_engine, "before_cursor_execute", count)
        assert len((await read_lineage(harness, version.number))["data"]) == size
        event.remove(app_engine, "before_cursor_execute", count)
        counts.append(sum("samples" in statement for statement in statements))
    assert counts == [2, 2]  # the entries, and what became of their feedback


async def test_completion_lineage_has_versions_and_their_descendants(harness: Harness) -> None:
    turn = await harness.turn()
    await create_version(harness, turn)
    await create_version(harness, await harness.turn())
    other_line = await harness.turn()
    await create_batch(harness, other_line)  # frozen, not trained yet
    rows = (await harness.api.get(f"/v1/chat/completions/{turn.id}/lineage")).json()["data"]
    assert [(row["version"], row["direct"]) for row in rows] == [("shop@v1", True), ("shop@v2", False)]
    assert (await harness.api.get(f"/v1/chat/completions/{other_line.id}/lineage")).json()["data"] == []
    await harness.api.delete(f"/v1/chat/completions/{turn.id}")
    assert (await harness.api.get(f"/v1/chat/completions/{turn.id}/lineage")).json()["data"] == rows
    assert [row["erased"] for row in (await read_lineage(harness, 1))["data"]] == [True]


async def test_discounted_feedback_is_in_the_lineage_of_earlier_turns(harness: Harness) -> None:
    first = await harness.turn(conversation_id="c")
    second = await harness.turn(conversation_id="c", parent_id=first.id)
    feedback_id = (await harness.vote(second.id)).json()["id"]
    await create_version(harness, first)
    assert (await harness.api.get(f"/v1/feedback/{feedback_id}/lineage")).json()["data"] == []
    config = {"sources": [{"type": "explicit", "name": "explicit"}], "discount": 0.5}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=config)).status_code == 200
    rows = (await harness.api.get(f"/v1/feedback/{feedback_id}/lineage")).json()["data"]
    assert [row["version"] for row in rows] == ["shop@v1"]


async def test_lineage_has_the_outcome_of_the_feedback(harness: Harness) -> None:
    turn = await harness.turn()
    feedback_id = (await harness.vote(turn.id)).json()["id"]
    version = await create_version(harness, turn)
    async with harness.db.write() as session:
        await session.execute(update(Feedback).values(batch_id=version.batch_id))
    [entry] = (await read_lineage(harness, 1))["data"]
    body = (await harness.api.get(f"/v1/feedback/{feedback_id}/lineage")).json()
    outcome = (await harness.api.get(f"/v1/feedback/{feedback_id}")).json()["outcome"]
    assert entry["outcome"] == body["outcome"] == outcome
    assert outcome["version"] == body["data"][0]["version"] == "shop@v1"


async def test_first_version_has_no_lineage(harness: Harness) -> None:
    assert (await read_lineage(harness, 0))["data"] == []
    assert (await harness.api.get(f"{VERSIONS}/7/lineage")).status_code == 404


async def test_labels_are_in_the_lineage_if_they_have_a_reward(harness: Harness) -> None:
    turn = await harness.turn()
    await send_feedback(harness, {"completion_id": turn.id, "kind": "categorical", "value": "rude"})
    await create_version(harness, turn)
    assert [row["feedback_id"] for row in (await read_lineage(harness, 1))["data"]] == [None]
    config = {"sources": [{"type": "explicit", "labels": {"rude": -1}}]}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=config)).status_code == 200
    assert [row["kind"] for row in (await read_lineage(harness, 1))["data"]] == ["categorical"]
