"""Erasure of a data subject: nothing of it can be read or trained on any more."""

import asyncio
import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from app.core import leases
from app.deployments import service
from app.models import (
    Audit,
    AuditAction,
    Base,
    Batch,
    BatchState,
    Engine,
    Feedback,
    Judgement,
    JudgementState,
    Rater,
    RaterStanding,
    Reward,
    Sample,
    SampleState,
    Turn,
    Version,
    VersionState,
    new_id,
    record_audit,
)
from app.policies.locks import lock_policy
from app.policies.service import Attribution
from app.privacy import erasure
from app.projects import service as projects
from tests.support.deployment import Harness
from tests.support.trained_versions import create_batch, create_version
from tests.support.updates import TRAINED
from workers.curate import curate
from workers.training import batch_claims, batches

CANARY = "canary-5f1c0e"
FEEDBACK: dict[str, Any] = {
    "source": {"id": CANARY},
    "comment": CANARY,
    "metadata": {CANARY: CANARY},
    "id": f"key-{CANARY}",
}


async def erase(harness: Harness, id: str = CANARY) -> dict[str, Any]:
    answer = await harness.api.delete(f"/v1/subjects/{id}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def create_turn(harness: Harness, **values: Any) -> Turn:
    """Create a turn with the canary text in every field that a client can set."""
    return await harness.turn(
        **{
            "end_user": CANARY,
            "conversation_id": CANARY,
            "own_messages": [{"role": "user", "content": f"my name is {CANARY}"}],
            "reply": {"role": "assistant", "content": f"hello {CANARY}"},
            "request_metadata": {"name": CANARY},
            "request_params": {"tools": [CANARY]},
            "sampling": {"temperature": 1.0, "stop": [CANARY]},
            "request_sha256": "0" * 64,
            "prefix_hash": "0" * 64,
            **values,
        }
    )


async def dump_tables(harness: Harness) -> str:
    """Return every row of every table, as text."""
    async with harness.db.read() as session:
        rows = [
            repr(tuple(row)) for table in Base.metadata.sorted_tables for row in await session.execute(table.select())
        ]
    return "\n".join(rows)


def count_on_disk(harness: Harness) -> int:
    """Return how often the canary text is in the embedded database's files."""
    if not harness.db.embedded:
        return 0
    files = Path(harness.settings.database_url.removeprefix("sqlite+aiosqlite:///")).parent.glob("attune.db*")
    return sum(path.read_bytes().count(CANARY.encode()) for path in files)


async def give_all_feedback(harness: Harness, turn: Turn, other: Turn) -> None:
    about = {"completion_id": turn.id}
    bodies: tuple[dict[str, Any], ...] = (
        {**about, "kind": "binary", "value": True},
        {**about, "kind": "correction", "value": f"say {CANARY}"},
        {**about, "kind": "comment", "value": f"it is {CANARY}"},
        {**about, "kind": "categorical", "value": CANARY},
        {"completion_id": other.id, "kind": "score", "value": -1},
        {"target": {"conversation_id": CANARY}, "kind": "score", "value": 0.5},
        {"kind": "comparison", "value": [turn.id, other.id]},
    )
    for number, body in enumerate(bodies):
        answer = await harness.api.post("/v1/feedback", json={**FEEDBACK, **body, "id": f"key-{CANARY}-{number}"})
        assert answer.status_code == 201, answer.text


async def test_nothing_is_left_in_any_table_or_file(harness: Harness) -> None:
    other = await harness.turn(end_user="bob", conversation_id="bobs")
    turn = await create_turn(harness)
    later = await harness.turn(
        parent_id=turn.id, own_messages=[{"role": "user", "content": CANARY}], conversation_id=CANARY
    )
    await give_all_feedback(harness, turn, other)
    await harness.api.post(f"/v1/chat/completions/{turn.id}", json={"metadata": {"name": CANARY}})
    await harness.vote(turn.id, source={"id": "bob"}, comment=f"{CANARY} was rude")
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        project_id = turn.project_id
        await session.merge(Rater(project_id=project_id, name=f"HUMAN/{CANARY}", reason=CANARY))
        await session.merge(Rater(project_id=project_id, name=f"conversation/{CANARY}"))
        name, action = f"HUMAN/{CANARY}", AuditAction.RATER_QUARANTINED
        record_audit(session, "curate", action, name, f"is {CANARY}", project_id=project_id, rater=name)
        fields = {"policy_id": turn.policy_id, "source": "judge", "due_at": 0.0, "value": 0.5}
        session.add(Judgement(id=new_id("jdg"), turn_id=turn.id, details={"answer": CANARY}, reason=CANARY, **fields))
    assert (await dump_tables(harness)).count(CANARY) > 20 and (count_on_disk(harness) > 20 or not harness.db.embedded)
    body = await erase(harness)
    assert (body["turns"], body["purged"]) == (2, True)
    assert CANARY not in await dump_tables(harness)
    assert count_on_disk(harness) == 0
    assert {row.deleted_at is None for row in await harness.all(Turn) if row.id in (turn.id, later.id)} == {False}
    assert (await harness.get(Turn, other.id)).deleted_at is None
    [judgement] = [row for row in await harness.all(Judgement) if row.turn_id == turn.id]
    assert (judgement.state, judgement.value, judgement.fence) == (JudgementState.SKIPPED, None, 1)


async def test_id_with_a_kind_excludes_other_kinds(harness: Harness) -> None:
    turn = await harness.turn()
    for kind in ("HUMAN", "CODE"):
        assert (await harness.vote(turn.id, source={"kind": kind, "id": "user-7"})).status_code == 201
    body = await erase(harness, "HUMAN%2Fuser-7")
    assert (body["id"], body["feedback"]) == ("HUMAN/user-7", 1)
    assert [row.source_kind for row in await harness.all(Feedback) if row.kind == "binary"] == ["CODE"]


async def test_feedback_of_others_on_others_turns_stays_effective(harness: Harness) -> None:
    turn = await harness.turn(end_user="bob")
    await harness.vote(turn.id, "down", **FEEDBACK)
    await harness.vote(turn.id, "up", source={"id": "bob"})
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, turn.id)).reward == 0.0
    await erase(harness)
    assert (await harness.get(Sample, turn.id)).state == SampleState.DROPPED  # it is not trained on meanwhile
    await curate(harness.db, harness.settings)
    sample = await harness.get(Sample, turn.id)
    assert (sample.state, sample.reward, sample.rater) == (SampleState.OPEN, 1.0, "HUMAN/bob")
    assert [row.rater for row in await harness.all(Reward)] == ["HUMAN/bob"]
    assert CANARY not in await dump_tables(harness)


async def test_sample_without_other_feedback_stays_dropped(harness: Harness) -> None:
    turn = await harness.turn(end_user="bob")
    await harness.vote(turn.id, "down", **FEEDBACK)
    await curate(harness.db, harness.settings)
    await erase(harness)
    await curate(harness.db, harness.settings)
    sample = await harness.get(Sample, turn.id)
    assert (sample.state, sample.rule) == (SampleState.DROPPED, "withdrawn")
    assert await harness.all(Reward) == []


@pytest.mark.parametrize("state", [SampleState.OPEN, SampleState.QUARANTINED])
async def test_waiting_samples_are_dropped_with_a_reason(harness: Harness, state: SampleState) -> None:
    turn = await create_turn(harness)
    await harness.vote(turn.id, source={"id": "bob"})
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = state
    await erase(harness)
    sample = await harness.get(Sample, turn.id)
    assert (sample.state, sample.rule, sample.conversation_id) == (SampleState.DROPPED, "erased", None)
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, turn.id)).state == SampleState.DROPPED


async def test_frozen_batch_is_refused_and_other_samples_are_reopened(harness: Harness) -> None:
    turn, other = await create_turn(harness), await harness.turn(end_user="bob")
    batch = await create_batch(harness, turn, other)
    body = await erase(harness)
    assert body["batches"] == [batch.id]
    row = await harness.get(Batch, batch.id)
    assert (row.state, row.reason, row.fence) == (BatchState.REFUSED, "some of its samples were erased", 1)
    assert row.settled_at is not None
    samples = {row.turn_id: (row.state, row.batch_id) for row in await harness.all(Sample)}
    assert samples == {turn.id: (SampleState.DROPPED, None), other.id: (SampleState.OPEN, None)}


async def test_trainer_that_claimed_the_batch_cannot_commit(harness: Harness, tmp_path: Path) -> None:
    turn = await create_turn(harness)
    other = await harness.turn(end_user="bob", own_prompt_ids=[1, 2], output_ids=[3, 4])
    await create_batch(harness, turn, other)
    claimed = await batch_claims.claim(harness.db, "trainer", harness.settings)
    assert claimed is not None and len(claimed.batch.samples) == 2
    await erase(harness)
    with pytest.raises(leases.LeaseLost):
        await batches.commit(harness.db, claimed, replace(TRAINED, directory=tmp_path))
    assert [row.number for row in await harness.all(Version)] == [0]
    assert (await harness.policy()).head_version_id == claimed.parent.id
    assert await batch_claims.claim(harness.db, "trainer", harness.settings) is None


async def test_versions_that_learned_are_tainted_with_their_descendants(harness: Harness) -> None:
    turn, other = await create_turn(harness), await harness.turn(end_user="bob")
    untainted = await create_version(harness, await harness.turn())
    await create_version(harness, turn, other)
    child = await create_version(harness, await harness.turn())
    await serve(harness, child)
    before = (await harness.api.get(f"/v1/subjects/{CANARY}")).json()
    body = await erase(harness)
    learned = [(row["version"], row["direct"]) for row in body["versions"]]
    assert learned == [("shop@v2", True), ("shop@v3", False)]
    assert [row["version"] for row in before["versions"]] == ["shop@v2", "shop@v3"]
    assert body["rollback"] == [{"policy": "shop", "serving": "shop@v3", "untainted_ancestor": "shop@v1", "version": 1}]
    assert (await harness.get(Version, untainted.id)).tainted_at is None
    later = await create_version(
        harness, await harness.turn(), state=VersionState.TRAINED
    )  # after the erasure, from a tainted version
    rows = {row["name"]: row for row in (await harness.api.get("/v1/policies/shop/versions")).json()["data"]}
    assert [rows[f"shop@v{number}"]["tainted_at"] is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert rows[f"shop@v{later.number}"]["untainted_ancestor"] == "shop@v1"
    assert (await harness.api.get("/v1/policies/shop")).json()["untainted_ancestor"] == "shop@v1"
    assert (await harness.api.post("/v1/policies/shop/rollback", json={"version": 1})).status_code in (200, 409)


async def test_rollback_that_the_erasure_names_returns_to_an_untainted_version(harness: Harness) -> None:
    untainted = await create_version(harness, await harness.turn())
    await serve(harness, await create_version(harness, await create_turn(harness)))
    assert untainted.adapter_name is not None
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = [untainted.adapter_name]
    [target] = (await erase(harness))["rollback"]
    answer = await harness.api.post(f"/v1/policies/{target['policy']}/rollback", json={"version": target["version"]})
    assert (answer.status_code, answer.json()["serving"]) == (200, "shop@v1")
    view = (await harness.api.get("/v1/policies/shop")).json()
    assert (view["untainted_ancestor"], view["head"]) == (None, "shop@v1")
    assert (await erase(harness))["rollback"] == []


async def serve(harness: Harness, version: Version) -> None:
    async with harness.db.write() as session:
        locked = await lock_policy(session, version.policy_id)
        await service.set_live(locked, await session.get_one(Version, version.id), Attribution("t", "t"))


async def test_feedback_on_others_turns_taints_only_versions_that_used_it(harness: Harness) -> None:
    turn = await harness.turn(end_user="bob")
    await harness.vote(turn.id, "down", **FEEDBACK)
    version = await create_version(harness, turn)
    late = await harness.turn(end_user="bob")
    await create_version(harness, late)
    await harness.vote(
        late.id, "down", **FEEDBACK | {"id": "late"}
    )  # after its batch was frozen, so no version used it
    comment = {"completion_id": late.id, "kind": "comment", "value": CANARY, "source": {"id": CANARY}}
    await harness.api.post("/v1/feedback", json=comment)
    body = await erase(harness)
    assert [(row["version"], row["direct"]) for row in body["versions"]] == [("shop@v1", True), ("shop@v2", False)]
    assert (await harness.get(Version, version.id)).tainted_at is not None


async def test_repeated_request_erases_what_a_crash_left(harness: Harness, monkeypatch: Any) -> None:
    monkeypatch.setattr(erasure, "CHUNK", 2)
    first = await create_turn(harness)
    for _ in range(4):
        await harness.turn(parent_id=first.id, own_messages=[{"role": "user", "content": CANARY}])
    for _ in range(2):
        await harness.vote((await harness.turn(end_user="bob")).id, **FEEDBACK | {"id": new_id("key")})
    calls = 0
    erase_chunk = erasure._erase_chunk

    async def fail_second_chunk(session: AsyncSession, **arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the process died here")
        return await erase_chunk(session, **arguments)

    with monkeypatch.context() as patched:
        patched.setattr(erasure, "_erase_chunk", fail_second_chunk)
        assert (await harness.api.delete(f"/v1/subjects/{CANARY}")).status_code == 500
    remaining = await harness.api.get(f"/v1/subjects/{CANARY}")
    assert remaining.json()["turns"] == 3
    assert CANARY in await dump_tables(harness)
    assert (await erase(harness))["turns"] == 3
    assert CANARY not in await dump_tables(harness)
    assert count_on_disk(harness) == 0


async def test_repeated_request_changes_nothing(harness: Harness) -> None:
    await create_turn(harness)
    await erase(harness)
    repeated = await erase(harness)
    assert (repeated["turns"], repeated["feedback"], repeated["versions"]) == (0, 0, [])
    assert (await harness.api.get(f"/v1/subjects/{CANARY}")).status_code == 404
    assert (await harness.api.delete("/v1/subjects/nobody")).status_code == 404
    assert len([row for row in await harness.all(Audit) if row.action == "subject.erased"]) == 1


async def test_audit_has_a_hash_in_place_of_the_name(harness: Harness) -> None:
    turn = await create_turn(harness)
    await erase(harness)
    [row] = [row for row in await harness.all(Audit) if row.action == "subject.erased"]
    assert row.subject == hashlib.sha256(f"{turn.project_id}/{CANARY}".encode()).hexdigest()
    assert (row.details["turns"], row.actor) == (1, harness.key[:16])


async def test_running_reply_is_aborted(harness: Harness) -> None:
    done, running = (
        await create_turn(harness),
        await create_turn(harness, state="open", reply=None, output_ids=None, logprobs=None),
    )
    await erase(harness)
    assert (await harness.get(Turn, running.id)).state == "aborted"
    assert (await harness.get(Turn, done.id)).state == "done"


async def test_subject_of_another_project_stays(harness: Harness) -> None:
    own_turn = await create_turn(harness)
    foreign_turn = await create_turn(harness, conversation_id="elsewhere")
    async with harness.db.write() as session:
        project, _ = await projects.create_project(session, "bakery", "bread", "some/model")
        (await session.get_one(Turn, foreign_turn.id)).project_id = project.id
    await erase(harness)
    assert (await harness.get(Turn, own_turn.id)).end_user is None
    assert (await harness.get(Turn, foreign_turn.id)).end_user == CANARY


async def test_export_has_every_row_as_a_line_of_json(harness: Harness) -> None:
    turn, other = await create_turn(harness), await harness.turn(end_user="bob")
    await give_all_feedback(harness, turn, other)
    await curate(harness.db, harness.settings)
    answer = await harness.api.get(f"/v1/subjects/{CANARY}/export")
    assert answer.headers["content-type"] == "application/x-ndjson"
    rows = [orjson.loads(line) for line in answer.text.splitlines()]
    kinds = Counter(row["object"] for row in rows)
    assert (kinds["turn"], kinds["feedback"], kinds["sample"]) == (1, 7, 1) and kinds["reward"] > 0
    [exported_turn] = [row for row in rows if row["object"] == "turn"]
    assert (exported_turn["id"], exported_turn["end_user"], exported_turn["messages"]) == (
        turn.id,
        CANARY,
        turn.own_messages,
    )
    assert not {"fence", "lease_owner", "request_sha256"} & {name for row in rows for name in row}
    summary = (await harness.api.get(f"/v1/subjects/{CANARY}")).json()
    assert (summary["turns"], summary["feedback"], summary["raters"]) == (1, 7, [f"HUMAN/{CANARY}"])
    assert (await harness.api.get("/v1/subjects/nobody/export")).status_code == 404


@pytest.mark.parametrize(("other_quarantined", "state"), [(False, SampleState.OPEN), (True, SampleState.QUARANTINED)])
async def test_quarantined_sample_is_released_unless_another_rater_is_quarantined(
    harness: Harness, other_quarantined: bool, state: SampleState
) -> None:
    turn = await harness.turn(end_user="bob")
    await harness.vote(turn.id, "down", **FEEDBACK)
    await harness.vote(turn.id, "up", source={"id": "bob"})
    await curate(harness.db, harness.settings)
    assert (await harness.api.get("/v1/raters")).status_code == 200
    async with harness.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = SampleState.QUARANTINED
        (await session.get_one(Rater, (turn.project_id, f"HUMAN/{CANARY}"))).standing = RaterStanding.QUARANTINED
        if other_quarantined:
            (await session.get_one(Rater, (turn.project_id, "HUMAN/bob"))).standing = RaterStanding.QUARANTINED
    await erase(harness)
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, turn.id)).state == state


async def test_concurrent_commit_and_erasure_leave_no_untainted_version(harness: Harness, tmp_path: Path) -> None:
    for number in range(5):  # a sixth would be staler than a batch may hold
        end_user = f"user-{number}"
        turn = await harness.turn(end_user=end_user)
        batch = await create_batch(harness, turn, await harness.turn(end_user="bob"))
        claimed = await batch_claims.claim(harness.db, "trainer", harness.settings)
        assert claimed is not None and claimed.batch.id == batch.id
        path = tmp_path / end_user
        committing = batches.commit(harness.db, claimed, replace(TRAINED, directory=path))
        erased, committed = await asyncio.gather(
            harness.api.delete(f"/v1/subjects/{end_user}"), committing, return_exceptions=True
        )
        assert not isinstance(erased, BaseException) and erased.status_code == 200, erased
        row = await harness.get(Batch, batch.id)
        if isinstance(committed, leases.LeaseLost):
            assert (row.state, row.version_id) == (BatchState.REFUSED, None)
        else:
            assert committed is True and row.state == BatchState.TRAINED
            assert (await harness.get(Version, row.version_id)).tainted_at is not None
