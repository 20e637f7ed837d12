"""Turns leave as Parquet: all of them, once, in order, bit for bit, and nobody else's."""

import json
import struct
from array import array

import pytest

from alignment.types import Sample
from app.datasets import turn_rows
from app.models import Policy, Project, Turn, TurnState, Version
from tests.support.deployment import Harness
from tests.support.parquet_files import rows_of, say


async def test_a_turn_leaves_with_everything_that_was_recorded(harness: Harness) -> None:
    turn = await harness.turn(
        conversation_id="c-1",
        parent_id="chatcmpl-0",
        prefix_reuse="exact",
        route_reason="canary",
        end_user="ada",
        request_metadata={"page": "7", "ü": "☃"},
        request_params={"tools": [{"type": "function", "function": {"name": "find"}}]},
        sampling={"temperature": 0.7, "top_p": 1.0},
    )
    [row] = rows_of(await harness.api.get("/v1/exports/turns"))
    assert (row["id"], row["completion_id"], row["choice_index"]) == (turn.id, turn.id, 0)
    assert (row["model"], row["policy"], row["version"]) == ("shop@v0", "shop", 0)
    assert (row["conversation_id"], row["parent_id"], row["prefix_reuse"]) == ("c-1", "chatcmpl-0", "exact")
    assert row["route_reason"] == "canary"
    assert (row["end_user"], row["finish_reason"], row["exclusion_reason"], row["state"]) == (
        "ada",
        "stop",
        None,
        "done",
    )
    assert dict(row["metadata"]) == {"page": "7", "ü": "☃"}
    assert json.loads(row["messages"]) == turn.messages
    assert json.loads(row["reply"]) == turn.reply
    assert json.loads(row["request_params"]) == turn.request_params
    assert (json.loads(row["sampling"]), row["temperature"]) == (turn.sampling, 0.7)
    assert row["created_at"] == (await harness.get(Turn, turn.id)).created_at
    assert row["feedback"] == []


async def test_the_sample_of_a_turn_is_rebuilt_bit_for_bit(harness: Harness) -> None:
    logprobs = list(array("f", [-0.1, -1e-7, -3.4028234e38, -1.1754944e-38, 0.0, -17.123457]))
    turn = await harness.turn(prompt_ids=[0, 151_936, 2**31 - 1], output_ids=[1, 2, 3, 4, 5, 6], logprobs=logprobs)
    [row] = rows_of(await harness.api.get("/v1/exports/turns"))
    kept = await harness.get(Turn, turn.id)

    def sample(prompt: list[int], output: list[int], told: list[float], version: int, temperature: float) -> Sample:
        return Sample(turn.id, tuple(prompt), tuple(output), tuple(told), 1.0, version, temperature)

    left = sample(row["prompt_ids"], row["output_ids"], row["logprobs"], row["version"], row["temperature"])
    assert left == sample(kept.prompt_ids, kept.output_ids, kept.logprobs, 0, kept.sampling["temperature"])
    assert struct.pack("<6f", *left.logprobs) == struct.pack("<6f", *logprobs)


async def test_pages_and_row_groups_neither_lose_nor_repeat_a_turn(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_rows, "PAGE", 3)
    monkeypatch.setattr("app.datasets.parquet_writer.GROUP_ROWS", 4)
    made = [await harness.turn(created_at=1000.0 + index // 4) for index in range(12)]  # four share each moment
    rows = rows_of(await harness.api.get("/v1/exports/turns"))
    assert [row["id"] for row in rows] == [turn.id for turn in sorted(made, key=lambda t: (t.created_at, t.id))]


async def test_what_comes_during_an_export_is_never_there_twice(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_rows, "PAGE", 2)
    before = [await harness.turn() for _ in range(5)]
    read = turn_rows.repository.turns_after
    later: list[Turn] = []

    async def busy(*args: object) -> object:
        if len(later) < 3:
            later.append(await harness.turn())
        return await read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(turn_rows.repository, "turns_after", busy)
    ids = [row["id"] for row in rows_of(await harness.api.get("/v1/exports/turns"))]
    assert len(ids) == len(set(ids))
    assert {turn.id for turn in before} <= set(ids) <= {turn.id for turn in before + later}


async def test_deleted_turns_never_leave_and_an_empty_file_is_a_file(harness: Harness) -> None:
    await harness.turn(deleted_at=5.0, messages=[], reply=None)
    assert rows_of(await harness.api.get("/v1/exports/turns")) == []


async def test_another_projects_turns_never_leave(harness: Harness) -> None:
    mine, foreign = await harness.turn(), await harness.turn()
    async with harness.db.write() as session:
        session.add(Project(id="prj-x", name="x"))
        await session.flush()
        session.add(Policy(id="pol-x", project_id="prj-x", name="theirs", base_model="m"))
        await session.flush()
        session.add(Version(id="ver-x", policy_id="pol-x", number=0, state="live"))
        await session.flush()
        turn = await session.get_one(Turn, foreign.id)
        turn.project_id, turn.policy_id, turn.version_id = "prj-x", "pol-x", "ver-x"
    assert [row["id"] for row in rows_of(await harness.api.get("/v1/exports/turns"))] == [mine.id]
    theirs = await harness.api.get("/v1/exports/turns", params={"policy": "theirs"})
    unknown = await harness.api.get("/v1/exports/turns", params={"policy": "nobodys"})
    assert theirs.status_code == 404
    assert theirs.text.replace("theirs", "nobodys") == unknown.text


async def test_filters_choose(harness: Harness) -> None:
    newer = await harness.version()
    a = await harness.turn(created_at=10.0)
    b = await harness.turn(created_at=20.0, exclusion_reason="greedy: nothing was sampled")
    c = await harness.turn(newer, created_at=30.0)
    d = await harness.turn(created_at=40.0, state=TurnState.OPEN, output_ids=None, logprobs=None, reply=None)
    await say(harness, b)

    async def ids(**params: object) -> list[str]:
        return [row["id"] for row in rows_of(await harness.api.get("/v1/exports/turns", params=params))]

    assert await ids() == [a.id, b.id, c.id, d.id]
    assert await ids(policy="shop", version=newer.number) == [c.id]
    assert await ids(since=20, until=30) == [b.id]
    assert await ids(trainable="true") == [a.id, c.id]
    assert await ids(trainable="false") == [b.id, d.id]
    assert await ids(with_feedback="true") == [b.id]
    assert await ids(with_feedback="false") == [a.id, c.id, d.id]


async def test_feedback_leaves_with_its_turn_and_only_the_latest_of_a_source_counts(harness: Harness) -> None:
    turn, other = await harness.turn(created_at=1.0), await harness.turn(created_at=2.0)
    first = await say(harness, turn, value=1.0, raw_value=True, source_id="ada")
    second = await say(harness, turn, value=-1.0, raw_value=False, source_id="ada", comment="no ☃")
    judge = await say(harness, turn, "score", value=0.25, raw_value=0.25, source_kind="LLM_JUDGE", source_id="ada")
    named = await say(harness, turn, "rating", value=0.5, raw_value={"value": 4}, name="tone", source_id="ada")
    nobody = await say(harness, turn, value=1.0, raw_value="up")
    gone = await say(harness, turn, value=1.0, raw_value=True, source_id="bob")
    tombstone = await say(harness, turn, "withdrawal", source_id="bob", request_metadata={"withdraws": gone.id})
    words = await say(harness, turn, "comment", raw_value="Well.", source_id="ada")
    ranking = await say(harness, None, "ranking", ranks=[(turn, 0), (other, 1)], raw_value=[[turn.id], [other.id]])
    rows = rows_of(await harness.api.get("/v1/exports/turns"))
    said = {row["id"]: row for row in rows[0]["feedback"]}
    assert list(said) == [row.id for row in (first, second, judge, named, nobody, gone, tombstone, words, ranking)]
    counting = [id for id, row in said.items() if row["counts"]]
    assert counting == [row.id for row in (second, judge, named, nobody, words, ranking)]
    assert (said[second.id]["value"], said[second.id]["said"], said[second.id]["comment"]) == (-1.0, "false", "no ☃")
    assert json.loads(said[named.id]["said"]) == {"value": 4}
    assert (said[tombstone.id]["said"], said[tombstone.id]["kind"]) == (None, "withdrawal")
    assert [row["id"] for row in rows[1]["feedback"]] == [ranking.id]


async def test_feedback_that_was_withdrawn_is_no_feedback(harness: Harness) -> None:
    turn = await harness.turn()
    await say(harness, turn, source_id="ada", value=1.0)
    last = await say(harness, turn, source_id="ada", value=-1.0)
    await say(harness, turn, "withdrawal", source_id="ada", request_metadata={"withdraws": last.id})
    assert rows_of(await harness.api.get("/v1/exports/turns", params={"with_feedback": "true"})) == []


@pytest.mark.parametrize(
    "query", ["since=nan", "since=inf", "until=-1", "version=-1", "version=99999999999", "trainable=perhaps", "policy="]
)
async def test_wrong_filters_are_a_400_in_the_error_shape(harness: Harness, query: str) -> None:
    answer = await harness.api.get(f"/v1/exports/turns?{query}")
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["exports/turns", "exports/preferences", "datasets", "datasets/ds-1"])
async def test_only_an_admin_may(harness: Harness, path: str) -> None:
    answer = await harness.api.get(f"/v1/{path}", headers={"authorization": "Bearer nope"})
    assert answer.status_code == 401


async def test_an_export_and_the_reads_of_feedback_agree_on_what_counts(harness: Harness) -> None:
    turn, other = await harness.turn(), await harness.turn()
    about = {"completion_id": turn.id}
    ids = []
    for body in (
        {**about, "kind": "binary", "value": True},
        {**about, "kind": "score", "value": -0.5},
        {**about, "kind": "comment", "value": "Well."},
        {**about, "kind": "correction", "value": "Better."},
        {**about, "kind": "binary", "value": True, "source": {"kind": "CODE", "id": "lint"}},
        {"kind": "comparison", "value": [other.id, turn.id]},
    ):
        answer = await harness.api.post("/v1/feedback", json=body)
        assert answer.status_code == 201, answer.text
        ids.append(answer.json()["id"])
    for gone in (ids[2], ids[4]):
        assert (await harness.api.delete(f"/v1/feedback/{gone}")).status_code == 200
    said = (await harness.api.get("/v1/feedback", params=about)).json()["data"]
    rows = rows_of(await harness.api.get("/v1/exports/turns"))
    [exported] = [row["feedback"] for row in rows if row["id"] == turn.id]
    counting = {row["id"] for row in exported if row["counts"]}
    assert counting == {row["id"] for row in said if row["counts"]} == {ids[1], ids[3], ids[5]}
    pairs = rows_of(await harness.api.get("/v1/exports/preferences"))
    assert {row["feedback_id"] for row in pairs} <= {ids[3], ids[5]} and len(pairs) == 1
