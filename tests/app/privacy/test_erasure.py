"""Erasing a subject: nothing of it is left to read, or to learn from."""

import asyncio
import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from app.core import leases
from app.deployments import service
from app.models import (
    Audit,
    Base,
    Batch,
    BatchState,
    Feedback,
    Judgement,
    JudgementState,
    Policy,
    Rater,
    RaterStanding,
    Reward,
    Sample,
    SampleState,
    Turn,
    Version,
    VersionState,
    new_id,
)
from app.privacy import erasure
from app.projects import service as projects
from tests.support.deployment import Harness
from tests.support.trained_versions import frozen, trained
from workers.feedback.curate import curate
from workers.training import batches

CANARY = "canary-5f1c0e"
SAID = {"source": {"id": CANARY}, "comment": CANARY, "metadata": {CANARY: CANARY}, "id": f"key-{CANARY}"}


async def erase(harness: Harness, id: str = CANARY) -> dict[str, Any]:
    answer = await harness.api.delete(f"/v1/subjects/{id}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def theirs(harness: Harness, **values: Any) -> Turn:
    """A turn with the canary wherever a client may put text."""
    return await harness.turn(
        **{
            "end_user": CANARY,
            "conversation_id": CANARY,
            "messages": [{"role": "user", "content": f"my name is {CANARY}"}],
            "reply": {"role": "assistant", "content": f"hello {CANARY}"},
            "request_metadata": {"name": CANARY},
            "request_params": {"tools": [CANARY]},
            "sampling": {"temperature": 1.0, "stop": [CANARY]},
            "request_sha256": "0" * 64,
            "prefix_hash": "0" * 64,
            **values,
        }
    )


async def dumped(harness: Harness) -> str:
    """Every row of every table, as text."""
    async with harness.db.read() as session:
        rows = [
            repr(tuple(row)) for table in Base.metadata.sorted_tables for row in await session.execute(table.select())
        ]
    return "\n".join(rows)


def on_disk(harness: Harness) -> int:
    """How often the canary stands in the embedded database's files."""
    if not harness.db.embedded:
        return 0
    files = Path(harness.settings.database.removeprefix("sqlite+aiosqlite:///")).parent.glob("attune.db*")
    return sum(path.read_bytes().count(CANARY.encode()) for path in files)


async def say_everything(harness: Harness, turn: Turn, other: Turn) -> None:
    about = {"completion_id": turn.id}
    for number, body in enumerate(
        (
            {**about, "kind": "binary", "value": True},
            {**about, "kind": "correction", "value": f"say {CANARY}"},
            {**about, "kind": "comment", "value": f"it is {CANARY}"},
            {**about, "kind": "categorical", "value": CANARY},
            {"completion_id": other.id, "kind": "score", "value": -1},
            {"target": {"conversation_id": CANARY}, "kind": "score", "value": 0.5},
            {"kind": "comparison", "value": [turn.id, other.id]},
        )
    ):
        answer = await harness.api.post("/v1/feedback", json={**SAID, **body, "id": f"key-{CANARY}-{number}"})
        assert answer.status_code == 201, answer.text


async def test_no_word_of_theirs_is_left_in_any_table_or_file(harness: Harness) -> None:
    other = await harness.turn(end_user="bob", conversation_id="bobs")
    turn = await theirs(harness)
    later = await harness.turn(
        parent_id=turn.id, messages=[{"role": "user", "content": CANARY}], conversation_id=CANARY
    )
    await say_everything(harness, turn, other)
    await harness.api.post(f"/v1/chat/completions/{turn.id}", json={"metadata": {"name": CANARY}})
    await harness.thumb(turn.id, source={"id": "bob"}, comment=f"{CANARY} was rude")
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        project_id = turn.project_id
        await session.merge(Rater(project_id=project_id, name=f"HUMAN/{CANARY}", reason=CANARY))
        await session.merge(Rater(project_id=project_id, name=f"conversation/{CANARY}"))
        session.add(
            Audit(project_id=project_id, actor="a", action="hold", subject=f"HUMAN/{CANARY}", reason=f"is {CANARY}")
        )
        question = {"policy_id": turn.policy_id, "source": "judge", "due_at": 0.0, "value": 0.5}
        session.add(Judgement(id=new_id("jdg"), turn_id=turn.id, details={"answer": CANARY}, reason=CANARY, **question))
    assert (await dumped(harness)).count(CANARY) > 20 and (on_disk(harness) > 20 or not harness.db.embedded)
    body = await erase(harness)
    assert (body["turns"], body["scrubbed"]) == (2, True)
    assert CANARY not in await dumped(harness)
    assert on_disk(harness) == 0
    assert {row.deleted_at is None for row in await harness.all(Turn) if row.id in (turn.id, later.id)} == {False}
    assert (await harness.get(Turn, other.id)).deleted_at is None
    [question_left] = [row for row in await harness.all(Judgement) if row.turn_id == turn.id]
    assert (question_left.state, question_left.value, question_left.fence) == (JudgementState.SKIPPED, None, 1)


async def test_a_name_with_a_kind_means_that_person_and_not_the_program(harness: Harness) -> None:
    turn = await harness.turn()
    for kind in ("HUMAN", "CODE"):
        assert (await harness.thumb(turn.id, source={"kind": kind, "id": "user-7"})).status_code == 201
    body = await erase(harness, "HUMAN%2Fuser-7")
    assert (body["id"], body["feedback"]) == ("HUMAN/user-7", 1)
    assert [row.source_kind for row in await harness.all(Feedback) if row.kind == "binary"] == ["CODE"]


async def test_others_words_about_others_turns_stay_and_count_on(harness: Harness) -> None:
    turn = await harness.turn(end_user="bob")
    await harness.thumb(turn.id, "down", **SAID)
    await harness.thumb(turn.id, "up", source={"id": "bob"})
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, turn.id)).reward == 0.0
    await erase(harness)
    assert (await harness.get(Sample, turn.id)).state == SampleState.DROPPED  # nobody trains on it meanwhile
    await curate(harness.db, harness.settings)
    sample = await harness.get(Sample, turn.id)
    assert (sample.state, sample.reward, sample.rater) == (SampleState.OPEN, 1.0, "HUMAN/bob")
    assert [row.rater for row in await harness.all(Reward)] == ["HUMAN/bob"]
    assert CANARY not in await dumped(harness)


async def test_where_nobody_else_spoke_the_sample_stays_dropped(harness: Harness) -> None:
    turn = await harness.turn(end_user="bob")
    await harness.thumb(turn.id, "down", **SAID)
    await curate(harness.db, harness.settings)
    await erase(harness)
    await curate(harness.db, harness.settings)
    sample = await harness.get(Sample, turn.id)
    assert (sample.state, sample.reason) == (SampleState.DROPPED, "withdrawn")
    assert await harness.all(Reward) == []


@pytest.mark.parametrize("state", [SampleState.OPEN, SampleState.QUARANTINED])
async def test_samples_of_theirs_that_wait_are_dropped_with_a_reason(harness: Harness, state: SampleState) -> None:
    turn = await theirs(harness)
    await harness.thumb(turn.id, source={"id": "bob"})
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = state
    await erase(harness)
    sample = await harness.get(Sample, turn.id)
    assert (sample.state, sample.reason, sample.conversation_id) == (SampleState.DROPPED, "erased", None)
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, turn.id)).state == SampleState.DROPPED


async def test_a_frozen_batch_is_refused_and_the_others_samples_are_open_again(harness: Harness) -> None:
    turn, other = await theirs(harness), await harness.turn(end_user="bob")
    batch = await frozen(harness, turn, other)
    body = await erase(harness)
    assert body["batches"] == [batch.id]
    row = await harness.get(Batch, batch.id)
    assert (row.state, row.reason, row.fence) == (BatchState.REFUSED, "some of its samples were erased", 1)
    assert row.settled_at is not None
    samples = {row.turn_id: (row.state, row.batch_id) for row in await harness.all(Sample)}
    assert samples == {turn.id: (SampleState.DROPPED, None), other.id: (SampleState.OPEN, None)}


async def test_a_trainer_that_holds_the_batch_cannot_commit(harness: Harness, tmp_path: Path) -> None:
    turn, other = await theirs(harness), await harness.turn(end_user="bob", prompt_ids=[1, 2], output_ids=[3, 4])
    await frozen(harness, turn, other)
    claimed = await batches.claim(harness.db, "trainer", harness.settings)
    assert claimed is not None and len(claimed.batch.samples) == 2
    await erase(harness)
    result: dict[str, Any] = {"probe": {}, "metrics": {}, "timings": {"export": 0.0}}
    with pytest.raises(leases.LeaseLost):
        await batches.commit(harness.db, claimed, path=tmp_path, manifest_sha256="0" * 64, **result)
    assert [row.number for row in await harness.all(Version)] == [0]
    assert (await harness.policy()).head_version_id == claimed.parent_id
    assert await batches.claim(harness.db, "trainer", harness.settings) is None


async def test_versions_that_learned_are_marked_with_all_that_stand_on_them(harness: Harness) -> None:
    turn, other = await theirs(harness), await harness.turn(end_user="bob")
    clean = await trained(harness, await harness.turn())
    await trained(harness, turn, other)
    child = await trained(harness, await harness.turn())
    await serve(harness, child)
    before = (await harness.api.get(f"/v1/subjects/{CANARY}")).json()
    body = await erase(harness)
    learned = [(row["version"], row["direct"]) for row in body["versions"]]
    assert learned == [("shop@v2", True), ("shop@v3", False)]
    assert [row["version"] for row in before["versions"]] == ["shop@v2", "shop@v3"]
    assert body["rollback"] == [{"policy": "shop", "serving": "shop@v3", "clean": "shop@v1", "version": 1}]
    assert (await harness.get(Version, clean.id)).tainted_at is None
    later = await trained(
        harness, await harness.turn(), state=VersionState.TRAINED
    )  # after the erasure, on marked ground
    rows = {row["name"]: row for row in (await harness.api.get("/v1/policies/shop/versions")).json()["data"]}
    assert [rows[f"shop@v{number}"]["erased_at"] is not None for number in range(5)] == [False, False, True, True, True]
    assert rows[f"shop@v{later.number}"]["clean"] == "shop@v1"
    assert (await harness.api.get("/v1/policies/shop")).json()["clean"] == "shop@v1"
    assert (await harness.api.post("/v1/policies/shop/rollback", json={"version": 1})).status_code in (200, 409)


async def serve(harness: Harness, version: Version) -> None:
    async with harness.db.write() as session:
        policy = await session.get_one(Policy, version.policy_id)
        await service.point_to(session, policy, await session.get_one(Version, version.id), actor="t", reason="t")


async def test_their_word_about_anothers_turn_marks_only_what_it_taught(harness: Harness) -> None:
    turn = await harness.turn(end_user="bob")
    await harness.thumb(turn.id, "down", **SAID)
    taught = await trained(harness, turn)
    late = await harness.turn(end_user="bob")
    await trained(harness, late)
    await harness.thumb(late.id, "down", **SAID | {"id": "late"})  # after its batch was frozen: it taught nothing
    comment = {"completion_id": late.id, "kind": "comment", "value": CANARY, "source": {"id": CANARY}}
    await harness.api.post("/v1/feedback", json=comment)
    body = await erase(harness)
    assert [(row["version"], row["direct"]) for row in body["versions"]] == [("shop@v1", True), ("shop@v2", False)]
    assert (await harness.get(Version, taught.id)).tainted_at is not None


async def test_what_is_left_after_a_crash_is_erased_by_asking_again(harness: Harness, monkeypatch: Any) -> None:
    monkeypatch.setattr(erasure, "CHUNK", 2)
    first = await theirs(harness)
    for _ in range(4):
        await harness.turn(parent_id=first.id, messages=[{"role": "user", "content": CANARY}])
    for _ in range(2):
        await harness.thumb((await harness.turn(end_user="bob")).id, **SAID | {"id": new_id("key")})
    calls = 0
    whole = erasure._part

    async def dies(session: AsyncSession, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the process died here")
        return await whole(session, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(erasure, "_part", dies)
        assert (await harness.api.delete(f"/v1/subjects/{CANARY}")).status_code == 500
    left = await harness.api.get(f"/v1/subjects/{CANARY}")
    assert left.json()["turns"] == 3
    assert CANARY in await dumped(harness)
    assert (await erase(harness))["turns"] == 3
    assert CANARY not in await dumped(harness)
    assert on_disk(harness) == 0


async def test_asking_again_is_answered_and_changes_nothing(harness: Harness) -> None:
    await theirs(harness)
    await erase(harness)
    again = await erase(harness)
    assert (again["turns"], again["feedback"], again["versions"]) == (0, 0, [])
    assert (await harness.api.get(f"/v1/subjects/{CANARY}")).status_code == 404
    assert (await harness.api.delete("/v1/subjects/nobody")).status_code == 404
    assert len([row for row in await harness.all(Audit) if row.action == "erase subject"]) == 1


async def test_the_audit_holds_a_hash_in_place_of_the_name(harness: Harness) -> None:
    turn = await theirs(harness)
    await erase(harness)
    [row] = [row for row in await harness.all(Audit) if row.action == "erase subject"]
    assert row.subject == hashlib.sha256(f"{turn.project_id}/{CANARY}".encode()).hexdigest()
    assert (row.details["turns"], row.actor) == (1, harness.key[:16])


async def test_a_reply_that_is_still_being_said_is_not_kept(harness: Harness) -> None:
    done, speaking = (
        await theirs(harness),
        await theirs(harness, state="open", reply=None, output_ids=None, logprobs=None),
    )
    await erase(harness)
    assert (await harness.get(Turn, speaking.id)).state == "aborted"
    assert (await harness.get(Turn, done.id)).state == "done"


async def test_another_projects_subject_of_the_same_name_is_left_alone(harness: Harness) -> None:
    mine = await theirs(harness)
    foreign = await theirs(harness, conversation_id="elsewhere")
    async with harness.db.write() as session:
        project, _ = await projects.create_project(session, "bakery", "bread", "some/model")
        (await session.get_one(Turn, foreign.id)).project_id = project.id
    await erase(harness)
    assert (await harness.get(Turn, mine.id)).end_user is None
    assert (await harness.get(Turn, foreign.id)).end_user == CANARY


async def test_all_of_it_can_be_taken_away_as_lines_of_json(harness: Harness) -> None:
    turn, other = await theirs(harness), await harness.turn(end_user="bob")
    await say_everything(harness, turn, other)
    await curate(harness.db, harness.settings)
    answer = await harness.api.get(f"/v1/subjects/{CANARY}/export")
    assert answer.headers["content-type"] == "application/x-ndjson"
    rows = [orjson.loads(line) for line in answer.text.splitlines()]
    kinds = Counter(row["object"] for row in rows)
    assert (kinds["turn"], kinds["feedback"], kinds["sample"]) == (1, 7, 1) and kinds["reward"] > 0
    [said] = [row for row in rows if row["object"] == "turn"]
    assert (said["id"], said["end_user"], said["messages"]) == (turn.id, CANARY, turn.messages)
    assert not {"fence", "lease_owner", "request_sha256"} & {name for row in rows for name in row}
    summary = (await harness.api.get(f"/v1/subjects/{CANARY}")).json()
    assert (summary["turns"], summary["feedback"], summary["raters"]) == (1, 7, [f"HUMAN/{CANARY}"])
    assert (await harness.api.get("/v1/subjects/nobody/export")).status_code == 404


@pytest.mark.parametrize(("doubted", "state"), [(False, SampleState.OPEN), (True, SampleState.QUARANTINED)])
async def test_a_sample_that_was_held_for_their_word_is_free_unless_another_is_held_too(
    harness: Harness, doubted: bool, state: SampleState
) -> None:
    turn = await harness.turn(end_user="bob")
    await harness.thumb(turn.id, "down", **SAID)
    await harness.thumb(turn.id, "up", source={"id": "bob"})
    await curate(harness.db, harness.settings)
    assert (await harness.api.get("/v1/raters")).status_code == 200
    async with harness.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = SampleState.QUARANTINED
        (await session.get_one(Rater, (turn.project_id, f"HUMAN/{CANARY}"))).standing = RaterStanding.QUARANTINED
        if doubted:
            (await session.get_one(Rater, (turn.project_id, "HUMAN/bob"))).standing = RaterStanding.QUARANTINED
    await erase(harness)
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, turn.id)).state == state


async def test_a_commit_and_an_erasure_at_once_leave_no_unmarked_version(harness: Harness, tmp_path: Path) -> None:
    result: dict[str, Any] = {"probe": {}, "metrics": {}, "timings": {"export": 0.0}}
    for number in range(5):  # a sixth would be staler than a batch may hold
        who = f"user-{number}"
        turn = await harness.turn(end_user=who)
        batch = await frozen(harness, turn, await harness.turn(end_user="bob"))
        claimed = await batches.claim(harness.db, "trainer", harness.settings)
        assert claimed is not None and claimed.batch.id == batch.id
        path = tmp_path / who
        committing = batches.commit(harness.db, claimed, path=path, manifest_sha256="0" * 64, **result)
        erased, kept = await asyncio.gather(
            harness.api.delete(f"/v1/subjects/{who}"), committing, return_exceptions=True
        )
        assert not isinstance(erased, BaseException) and erased.status_code == 200, erased
        row = await harness.get(Batch, batch.id)
        if isinstance(kept, leases.LeaseLost):
            assert (row.state, row.version_id) == (BatchState.REFUSED, None)
        else:
            assert kept is True and row.state == BatchState.TRAINED
            assert (await harness.get(Version, row.version_id)).tainted_at is not None
