"""The export of turns: each of the project's turns once, in order, exact to the bit."""

import json
import struct
from array import array

import pytest

from alignment.types import Sample
from app.datasets import turn_rows
from app.models import Policy, Project, Turn, TurnState, Version
from tests.support.deployment import Harness
from tests.support.parquet_files import create_feedback, read_rows
from tests.support.shared_histories import FOLLOW_UP, follow_up


async def test_row_has_everything_that_was_recorded(harness: Harness) -> None:
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
    [row] = read_rows(await harness.api.get("/v1/exports/turns"))
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
    assert json.loads(row["messages"]) == turn.own_messages
    assert json.loads(row["reply"]) == turn.reply
    assert json.loads(row["request_params"]) == turn.request_params
    assert (json.loads(row["sampling"]), row["temperature"]) == (turn.sampling, 0.7)
    assert row["created_at"] == (await harness.get(Turn, turn.id)).created_at
    assert row["feedback"] == []


async def test_rows_have_whole_prompts_of_turns_that_share_their_histories(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_rows, "PAGE_SIZE", 1)  # so that a history is on another page
    first = await harness.turn(created_at=1.0)
    await harness.turn(created_at=2.0, **follow_up(first))
    rows = read_rows(await harness.api.get("/v1/exports/turns"))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, FOLLOW_UP]
    assert [json.loads(row["messages"]) for row in rows] == [messages[:1], messages]
    assert [row["prompt_ids"] for row in rows] == [[1, 2, 3], [1, 2, 3, 4, 5, 7, 8]]


async def test_sample_can_be_rebuilt_from_its_row(harness: Harness) -> None:
    logprobs = list(array("f", [-0.1, -1e-7, -3.4028234e38, -1.1754944e-38, 0.0, -17.123457]))
    turn = await harness.turn(own_prompt_ids=[0, 151_936, 2**31 - 1], output_ids=[1, 2, 3, 4, 5, 6], logprobs=logprobs)
    [row] = read_rows(await harness.api.get("/v1/exports/turns"))
    stored = await harness.get(Turn, turn.id)

    def sample(prompt: list[int], output: list[int], logprobs: list[float], version: int, temperature: float) -> Sample:
        return Sample(turn.id, tuple(prompt), tuple(output), tuple(logprobs), 1.0, version, temperature)

    exported = sample(row["prompt_ids"], row["output_ids"], row["logprobs"], row["version"], row["temperature"])
    assert exported == sample(
        stored.own_prompt_ids, stored.output_ids, stored.logprobs, 0, stored.sampling["temperature"]
    )
    assert struct.pack("<6f", *exported.logprobs) == struct.pack("<6f", *logprobs)


async def test_pages_and_row_groups_have_every_turn_once(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_rows, "PAGE_SIZE", 3)
    monkeypatch.setattr("app.datasets.parquet_writer.GROUP_ROWS", 4)
    turns = [await harness.turn(created_at=1000.0 + index // 4) for index in range(12)]  # four turns at each time
    rows = read_rows(await harness.api.get("/v1/exports/turns"))
    assert [row["id"] for row in rows] == [turn.id for turn in sorted(turns, key=lambda t: (t.created_at, t.id))]


async def test_turns_created_during_an_export_are_not_repeated(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_rows, "PAGE_SIZE", 2)
    before = [await harness.turn() for _ in range(5)]
    read = turn_rows.read_turns
    later: list[Turn] = []

    async def read_and_create(*args: object) -> object:
        if len(later) < 3:
            later.append(await harness.turn())
        return await read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(turn_rows, "read_turns", read_and_create)
    ids = [row["id"] for row in read_rows(await harness.api.get("/v1/exports/turns"))]
    assert len(ids) == len(set(ids))
    assert {turn.id for turn in before} <= set(ids) <= {turn.id for turn in before + later}


async def test_deleted_turns_are_not_exported_and_an_empty_export_is_valid(harness: Harness) -> None:
    await harness.turn(deleted_at=5.0, own_messages=[], reply=None)
    assert read_rows(await harness.api.get("/v1/exports/turns")) == []


async def test_turns_of_other_projects_are_not_exported(harness: Harness) -> None:
    own, foreign = await harness.turn(), await harness.turn()
    async with harness.db.write() as session:
        session.add(Project(id="prj-x", name="x"))
        await session.flush()
        session.add(Policy(id="pol-x", project_id="prj-x", name="theirs", base_model="m"))
        await session.flush()
        session.add(Version(id="ver-x", policy_id="pol-x", number=0, state="live"))
        await session.flush()
        turn = await session.get_one(Turn, foreign.id)
        turn.project_id, turn.policy_id, turn.version_id = "prj-x", "pol-x", "ver-x"
    assert [row["id"] for row in read_rows(await harness.api.get("/v1/exports/turns"))] == [own.id]
    foreign_policy = await harness.api.get("/v1/exports/turns", params={"policy": "theirs"})
    unknown = await harness.api.get("/v1/exports/turns", params={"policy": "nobodys"})
    assert foreign_policy.status_code == 404
    assert foreign_policy.text.replace("theirs", "nobodys") == unknown.text


async def test_filters_apply(harness: Harness) -> None:
    newer = await harness.version()
    a = await harness.turn(created_at=10.0)
    b = await harness.turn(created_at=20.0, exclusion_reason="greedy: nothing was sampled")
    c = await harness.turn(newer, created_at=30.0)
    d = await harness.turn(created_at=40.0, state=TurnState.OPEN, output_ids=None, logprobs=None, reply=None)
    await create_feedback(harness, b)

    async def ids(**params: str | int) -> list[str]:
        return [row["id"] for row in read_rows(await harness.api.get("/v1/exports/turns", params=params))]

    assert await ids() == [a.id, b.id, c.id, d.id]
    assert await ids(policy="shop", version=newer.number) == [c.id]
    assert await ids(since=20, until=30) == [b.id]
    assert await ids(trainable="true") == [a.id, c.id]
    assert await ids(trainable="false") == [b.id, d.id]
    assert await ids(with_feedback="true") == [b.id]
    assert await ids(with_feedback="false") == [a.id, c.id, d.id]


async def test_feedback_is_exported_with_its_turn_and_marked_effective(harness: Harness) -> None:
    turn, other = await harness.turn(created_at=1.0), await harness.turn(created_at=2.0)
    first = await create_feedback(harness, turn, value=1.0, raw_value=True, source_id="ada")
    second = await create_feedback(harness, turn, value=-1.0, raw_value=False, source_id="ada", comment="no ☃")
    judge = await create_feedback(
        harness, turn, "score", value=0.25, raw_value=0.25, source_kind="LLM_JUDGE", source_id="ada"
    )
    named = await create_feedback(
        harness, turn, "rating", value=0.5, raw_value={"value": 4}, name="tone", source_id="ada"
    )
    anonymous = await create_feedback(harness, turn, value=1.0, raw_value="up")
    withdrawn = await create_feedback(harness, turn, value=1.0, raw_value=True, source_id="bob")
    tombstone = await create_feedback(harness, turn, "withdrawal", source_id="bob", withdraws=withdrawn.id)
    comment = await create_feedback(harness, turn, "comment", raw_value="Well.", source_id="ada")
    ranking = await create_feedback(
        harness, None, "ranking", ranks=[(turn, 0), (other, 1)], raw_value=[[turn.id], [other.id]]
    )
    rows = read_rows(await harness.api.get("/v1/exports/turns"))
    feedback = {row["id"]: row for row in rows[0]["feedback"]}
    assert list(feedback) == [
        row.id for row in (first, second, judge, named, anonymous, withdrawn, tombstone, comment, ranking)
    ]
    effective_ids = [id for id, row in feedback.items() if row["effective"]]
    assert effective_ids == [row.id for row in (second, judge, named, anonymous, comment, ranking)]
    assert (feedback[second.id]["value"], feedback[second.id]["raw_value"], feedback[second.id]["comment"]) == (
        -1.0,
        "false",
        "no ☃",
    )
    assert json.loads(feedback[named.id]["raw_value"]) == {"value": 4}
    assert (feedback[tombstone.id]["raw_value"], feedback[tombstone.id]["kind"]) == (None, "withdrawal")
    assert [row["id"] for row in rows[1]["feedback"]] == [ranking.id]


async def test_withdrawn_feedback_is_no_feedback(harness: Harness) -> None:
    turn = await harness.turn()
    await create_feedback(harness, turn, source_id="ada", value=1.0)
    last = await create_feedback(harness, turn, source_id="ada", value=-1.0)
    await create_feedback(harness, turn, "withdrawal", source_id="ada", withdraws=last.id)
    assert read_rows(await harness.api.get("/v1/exports/turns", params={"with_feedback": "true"})) == []


@pytest.mark.parametrize(
    "query", ["since=nan", "since=inf", "until=-1", "version=-1", "version=99999999999", "trainable=perhaps", "policy="]
)
async def test_invalid_filters_are_a_400(harness: Harness, query: str) -> None:
    answer = await harness.api.get(f"/v1/exports/turns?{query}")
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["exports/turns", "exports/preferences", "datasets", "datasets/ds-1"])
async def test_exports_need_an_admin_key(harness: Harness, path: str) -> None:
    answer = await harness.api.get(f"/v1/{path}", headers={"authorization": "Bearer nope"})
    assert answer.status_code == 401


async def test_export_and_feedback_api_agree_on_effective_feedback(harness: Harness) -> None:
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
    for withdrawn in (ids[2], ids[4]):
        assert (await harness.api.delete(f"/v1/feedback/{withdrawn}")).status_code == 200
    feedback = (await harness.api.get("/v1/feedback", params=about)).json()["data"]
    rows = read_rows(await harness.api.get("/v1/exports/turns"))
    [exported] = [row["feedback"] for row in rows if row["id"] == turn.id]
    effective_ids = {row["id"] for row in exported if row["effective"]}
    assert effective_ids == {row["id"] for row in feedback if row["effective"]} == {ids[1], ids[3], ids[5]}
    pairs = read_rows(await harness.api.get("/v1/exports/preferences"))
    assert {row["feedback_id"] for row in pairs} <= {ids[3], ids[5]} and len(pairs) == 1
