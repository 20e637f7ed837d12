"""Lineage: which feedback taught which version, both ways round."""

from typing import Any

from sqlalchemy import event

from app.core.database import Database
from tests.support.deployment import Harness
from tests.support.trained_versions import frozen, trained

VERSIONS = "/v1/policies/shop/versions"


async def lineage(harness: Harness, number: int, **params: Any) -> dict[str, Any]:
    answer = await harness.api.get(f"{VERSIONS}/{number}/lineage", params=params)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def said(harness: Harness, body: dict[str, Any]) -> str:
    answer = await harness.api.post("/v1/feedback", json=body)
    assert answer.status_code == 201, answer.text
    id: str = answer.json()["id"]
    return id


async def test_what_was_said_in_time_taught_the_version_and_nothing_else(harness: Harness) -> None:
    turn, other = await harness.turn(end_user="bob"), await harness.turn()
    thumb = await said(harness, {"completion_id": turn.id, "kind": "binary", "value": "up", "source": {"id": "ada"}})
    await said(harness, {"completion_id": turn.id, "kind": "comment", "value": "words alone"})
    better = await said(harness, {"completion_id": turn.id, "kind": "correction", "value": "well"})
    taken_back = await said(harness, {"completion_id": turn.id, "kind": "score", "value": 1, "name": "mood"})
    await harness.api.delete(f"/v1/feedback/{taken_back}")
    replaced = await said(harness, {"completion_id": other.id, "kind": "binary", "value": "up"})
    nameless = await said(harness, {"completion_id": other.id, "kind": "score", "value": -0.5})
    await trained(harness, turn, other)
    late = await said(harness, {"completion_id": turn.id, "kind": "rating", "value": 1, "name": "late"})
    body = await lineage(harness, 1)
    entries = {row["feedback_id"]: row for row in body["data"]}
    assert set(entries) == {thumb, better, nameless}
    told = entries[thumb]
    assert (told["turn_id"], told["spoken_by"], told["reward"]) == (turn.id, "shop@v0", 1.0)
    assert (told["rater"], told["value"], told["kind"]) == ("HUMAN/ada", 1.0, "binary")
    assert (body["version"], body["erased_at"], body["clean"]) == ("shop@v1", None, None)
    for id, versions in ((thumb, ["shop@v1"]), (taken_back, []), (replaced, []), (late, [])):
        learners = (await harness.api.get(f"/v1/feedback/{id}/lineage")).json()["data"]
        assert [row["version"] for row in learners] == versions, id


async def test_comparisons_and_words_about_a_conversation_are_in_it(harness: Harness) -> None:
    one, two = await harness.turn(conversation_id="c"), await harness.turn()
    order = await said(harness, {"kind": "comparison", "value": [one.id, two.id]})
    whole = await said(harness, {"kind": "score", "value": 1, "target": {"conversation_id": "c"}})
    await trained(harness, one, two)
    found = sorted((row["turn_id"], row["feedback_id"]) for row in (await lineage(harness, 1))["data"])
    assert found == sorted([(one.id, order), (two.id, order), (one.id, whole)])
    for id in (order, whole):
        assert len((await harness.api.get(f"/v1/feedback/{id}/lineage")).json()["data"]) == 1


async def test_pages_hold_every_entry_once(harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(5)]
    for turn in turns[:4]:
        for who in ("ada", "bob"):
            await harness.thumb(turn.id, source={"id": who})
    await trained(harness, *turns)
    whole = [row["id"] for row in (await lineage(harness, 1))["data"]]
    assert len(set(whole)) == 9  # the fifth was judged by machines alone
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = await lineage(harness, 1, limit=2, **after)
        seen += [row["id"] for row in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == whole


async def test_it_is_one_query_however_much_there_is(harness: Harness) -> None:
    counts = []
    for size in (1, 20):
        turns = [await harness.turn() for _ in range(size)]
        for turn in turns:
            await harness.thumb(turn.id)
        version = await trained(harness, *turns)
        statements: list[str] = []
        app_engine = harness.api._transport.app.services.get(Database).engine.sync_engine  # type: ignore[attr-defined]

        def count(conn: Any, cursor: Any, statement: str, *rest: Any, seen: list[str] = statements) -> None:
            seen.append(statement)

        event.listen(app_engine, "before_cursor_execute", count)
        assert len((await lineage(harness, version.number))["data"]) == size
        event.remove(app_engine, "before_cursor_execute", count)
        counts.append(sum("samples" in statement for statement in statements))
    assert counts == [1, 1]


async def test_a_completion_taught_the_version_and_all_that_stand_on_it(harness: Harness) -> None:
    turn = await harness.turn()
    await trained(harness, turn)
    await trained(harness, await harness.turn())
    other_line = await harness.turn()
    await frozen(harness, other_line)  # frozen, and not trained yet
    rows = (await harness.api.get(f"/v1/chat/completions/{turn.id}/lineage")).json()["data"]
    assert [(row["version"], row["direct"]) for row in rows] == [("shop@v1", True), ("shop@v2", False)]
    assert (await harness.api.get(f"/v1/chat/completions/{other_line.id}/lineage")).json()["data"] == []
    await harness.api.delete(f"/v1/chat/completions/{turn.id}")
    assert (await harness.api.get(f"/v1/chat/completions/{turn.id}/lineage")).json()["data"] == rows
    assert [row["erased"] for row in (await lineage(harness, 1))["data"]] == [True]


async def test_what_is_said_later_taught_the_turns_before_where_credit_flows_back(harness: Harness) -> None:
    first = await harness.turn(conversation_id="c")
    second = await harness.turn(conversation_id="c", parent_id=first.id)
    thumb = (await harness.thumb(second.id)).json()["id"]
    await trained(harness, first)
    assert (await harness.api.get(f"/v1/feedback/{thumb}/lineage")).json()["data"] == []
    config = {"sources": [{"type": "explicit", "name": "explicit"}], "discount": 0.5}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=config)).status_code == 200
    rows = (await harness.api.get(f"/v1/feedback/{thumb}/lineage")).json()["data"]
    assert [row["version"] for row in rows] == ["shop@v1"]


async def test_a_base_version_learned_from_nobody(harness: Harness) -> None:
    assert (await lineage(harness, 0))["data"] == []
    assert (await harness.api.get(f"{VERSIONS}/7/lineage")).status_code == 404


async def test_labels_taught_where_the_policy_gives_them_a_worth(harness: Harness) -> None:
    turn = await harness.turn()
    await said(harness, {"completion_id": turn.id, "kind": "categorical", "value": "rude"})
    await trained(harness, turn)
    assert [row["feedback_id"] for row in (await lineage(harness, 1))["data"]] == [None]
    config = {"sources": [{"type": "explicit", "labels": {"rude": -1}}]}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=config)).status_code == 200
    assert [row["kind"] for row in (await lineage(harness, 1))["data"]] == ["categorical"]
