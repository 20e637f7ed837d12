"""Retention: what expires, what is kept because something needs it, and what stays of it."""

from typing import Any

import pytest
from sqlalchemy import delete
from sqlalchemy.exc import DatabaseError

from app.core.database import now
from app.core.retention_config import RetentionConfig
from app.models import (
    Audit,
    AuditAction,
    AuditChain,
    Feedback,
    Judgement,
    Origin,
    Project,
    Reward,
    RewardModelState,
    RewardModelTurn,
    Sample,
    SampleState,
    Turn,
    TurnState,
)
from app.ops import audit_chain
from app.privacy import retention
from tests.support.deployment import Harness
from tests.support.human_feedback import create_reward_model
from tests.support.settings import change_in_place
from tests.support.trained_versions import create_batch, create_version
from workers.curate import curate
from workers.retention import remove_expired

DAY = 86_400.0
SECRET = "secret-5f1c0e"


def days_ago(days: float) -> Any:
    return now() - days * DAY


async def old_turn(harness: Harness, days: float = 100, **values: Any) -> Turn:
    values = {"created_at": days_ago(days), "processed": True, "end_user": SECRET, **values}
    return await harness.turn(reply={"role": "assistant", "content": SECRET}, **values)


async def remove(harness: Harness) -> int:
    return await remove_expired(harness.db, harness.settings)


async def remaining(harness: Harness) -> set[str]:
    """Return the ids of the turns that have their content."""
    return {turn.id for turn in await harness.all(Turn) if turn.deleted_at is None}


async def test_expired_turn_is_emptied_and_its_row_stays(harness: Harness) -> None:
    old, young = await old_turn(harness), await old_turn(harness, days=80)
    assert await remove(harness) == 1
    assert await remaining(harness) == {young.id}
    row = await harness.get(Turn, old.id)
    assert row.reply is None and row.output_ids is None and row.own_messages == [] and row.end_user is None
    assert (row.num_output_tokens, row.version_id, row.state) == (2, old.version_id, TurnState.DONE)
    assert await remove(harness) == 0


async def test_turn_in_use_does_not_expire(harness: Harness) -> None:
    waiting, batched, quarantined, trained, fitted, judged, unprocessed, running = [
        await old_turn(harness) for _ in range(8)
    ]
    other_choice = await old_turn(harness, completion_id=waiting.id, choice_index=1)
    await create_batch(harness, batched)
    await create_version(harness, trained)
    model = await create_reward_model(harness, RewardModelState.OPEN)
    async with harness.db.write() as session:
        for turn, state in ((waiting, SampleState.OPEN), (quarantined, SampleState.QUARANTINED)):
            same = {"policy_id": turn.policy_id, "version_id": turn.version_id, "ready_at": 0.0}
            session.add(Sample(turn_id=turn.id, reward=1.0, state=state, **same))
        session.add(RewardModelTurn(reward_model_id=model.id, turn_id=fitted.id))
        judgement = {"policy_id": judged.policy_id, "source": "judge", "due_at": 0.0}
        session.add(Judgement(id="jud-1", turn_id=judged.id, **judgement))
        (await session.get_one(Turn, unprocessed.id)).processed = False
        (await session.get_one(Turn, running.id)).state = TurnState.OPEN
    await remove(harness)
    assert await remaining(harness) == {
        turn.id for turn in (waiting, batched, quarantined, fitted, judged, unprocessed, running, other_choice)
    }


async def test_turn_expires_after_the_turns_that_quote_it(harness: Harness) -> None:
    first = await old_turn(harness)
    second = await old_turn(harness, days=80, history_id=first.id, num_history_messages=1)
    await remove(harness)
    assert await remaining(harness) == {first.id, second.id}
    async with harness.db.write() as session:
        (await session.get_one(Turn, second.id)).created_at = days_ago(91)
    assert await remove(harness) == 2
    assert await remaining(harness) == set()


async def test_expired_conversation_is_emptied_in_one_step(harness: Harness) -> None:
    turns = [await old_turn(harness, days=100)]
    for days in (99, 98, 97, 96):
        turns.append(await old_turn(harness, days=days, history_id=turns[-1].id, num_history_messages=1))
    assert await remove(harness) == 5
    assert await remaining(harness) == set()


@pytest.mark.parametrize("blocked_by", ["age", "use"])
async def test_kept_branch_keeps_what_it_quotes_and_nothing_else(harness: Harness, blocked_by: str) -> None:
    """first <- second <- (blocking, other <- last): only the branch of `other` goes."""
    first = await old_turn(harness, days=100)
    second = await old_turn(harness, days=99, history_id=first.id, num_history_messages=1)
    age, processed = (50, True) if blocked_by == "age" else (98, False)
    blocking = await old_turn(harness, days=age, history_id=second.id, num_history_messages=1, processed=processed)
    other = await old_turn(harness, days=97, history_id=second.id, num_history_messages=1)
    await old_turn(harness, days=96, history_id=other.id, num_history_messages=1)
    expired = (await harness.api.get("/v1/retention/preview")).json()["data"]
    assert {row["kind"]: row["rows"] for row in expired}["turns"] == 2
    assert await remove(harness) == 2
    assert await remaining(harness) == {first.id, second.id, blocking.id}
    assert await remove(harness) == 0


async def test_long_conversation_is_emptied_from_its_end(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "STEP", 3)
    blocked = [await old_turn(harness, days=200)]
    for days in (199, 198, 197, 10):  # older than the others, and more than a step: they must not hold them up
        blocked.append(await old_turn(harness, days=days, history_id=blocked[-1].id, num_history_messages=1))
    turns = [await old_turn(harness, days=100)]
    for days in (99, 98, 97, 96, 95, 94):
        turns.append(await old_turn(harness, days=days, history_id=turns[-1].id, num_history_messages=1))
    blocking = {turn.id for turn in blocked}
    for count, left in ((3, 4), (3, 1), (1, 0), (0, 0)):
        assert await remove(harness) == count
        assert await remaining(harness) == blocking | {turn.id for turn in turns[:left]}


@pytest.mark.parametrize("use", ["judgement", "running", "unprocessed"])
async def test_turn_whose_shadow_reply_is_in_use_does_not_expire(harness: Harness, use: str) -> None:
    chat = await old_turn(harness)
    shadow = await old_turn(harness, origin=Origin.SHADOW, shadow_of_id=chat.id)
    async with harness.db.write() as session:
        row = await session.get_one(Turn, shadow.id)
        if use == "judgement":
            judged = {"policy_id": row.policy_id, "turn_id": row.id}
            session.add(Judgement(id="jud-1", source="judge", due_at=0.0, **judged))
        elif use == "running":
            row.state = TurnState.OPEN
        else:
            row.processed = False
    assert await remove(harness) == 0
    assert await remaining(harness) == {chat.id, shadow.id}


async def test_group_samples_lose_their_rater_with_the_chat(harness: Harness) -> None:
    chat = await old_turn(harness)
    group = {"origin": Origin.GROUP_SAMPLE, "completion_id": chat.id, "choice_index": 1}
    rollout = await old_turn(harness, days=1, **group)
    async with harness.db.write() as session:
        same = {"policy_id": rollout.policy_id, "version_id": rollout.version_id, "ready_at": 0.0}
        session.add(Sample(turn_id=rollout.id, reward=1.0, state=SampleState.TRAINED, rater=SECRET, **same))
    assert await remove(harness) == 1
    assert await remaining(harness) == set()
    assert (await harness.get(Sample, rollout.id)).rater is None
    assert (await harness.get(Turn, rollout.id)).sampling == {}


@pytest.mark.parametrize("use", ["sample", "feedback", "judgement"])
async def test_turn_whose_group_sample_is_in_use_does_not_expire(harness: Harness, use: str) -> None:
    chat = await old_turn(harness)
    group = {"origin": Origin.GROUP_SAMPLE, "completion_id": chat.id, "choice_index": 1, "history_id": None}
    rollout = await old_turn(harness, days=101, **group)
    async with harness.db.write() as session:
        same = {"policy_id": rollout.policy_id, "turn_id": rollout.id}
        if use == "sample":
            session.add(Sample(reward=1.0, state=SampleState.OPEN, version_id=rollout.version_id, ready_at=0.0, **same))
        elif use == "judgement":
            session.add(Judgement(id="jud-1", source="judge", due_at=0.0, **same))
        else:  # the API takes no feedback on a rollout, since nobody sees it
            names = {"id": "fb-1", "idempotency_key": "fb-1", "fingerprint": "", "name": "thumb", "kind": "binary"}
            source = {"source_kind": "CODE", "project_id": rollout.project_id, "turn_id": rollout.id}
            session.add(Feedback(value=1.0, raw_value="up", **names, **source))
    assert await remove(harness) == 0
    assert await remaining(harness) == {chat.id, rollout.id}


async def test_expired_feedback_keeps_its_value_and_loses_its_source(harness: Harness) -> None:
    turn = await old_turn(harness, days=400)
    for source, value in ((SECRET, "up"), ("other", "down"), (SECRET, "down")):
        assert (await harness.vote(turn.id, value, source={"id": source}, comment=SECRET)).status_code == 201
    await curate(harness.db, harness.settings)
    before = (await harness.api.get("/v1/policies/shop/votes")).json()
    async with harness.db.write() as session:
        for row in await harness.all(Feedback):
            (await session.get_one(Feedback, row.seq)).created_at = days_ago(366)
    before_drop = {row.source: row.value for row in await harness.all(Reward)}
    assert await remove(harness) == 0, "its sample waits"
    async with harness.db.write() as session:
        (await session.get_one(Sample, turn.id)).state = SampleState.DROPPED
    assert await remove(harness) == 4
    rows = await harness.all(Feedback)
    assert [row.value for row in rows] == [1.0, -1.0, -1.0]
    assert rows[0].source_id == rows[2].source_id != rows[1].source_id
    rewards = await harness.all(Reward)
    assert sorted(reward.value for reward in rewards) == sorted(before_drop.values())
    for row in (*rows, *rewards, *await harness.all(Sample)):
        assert SECRET not in str(vars(row)), row
    after = (await harness.api.get("/v1/policies/shop/votes")).json()
    assert after["total"] == before["total"] == 3


@pytest.mark.parametrize("id", [SECRET, f"HUMAN/{SECRET}"])
async def test_source_is_erased_by_its_name_after_its_feedback_has_expired(harness: Harness, id: str) -> None:
    turn = await old_turn(harness, days=400, end_user=None)
    for source in (SECRET, "other"):
        assert (await harness.vote(turn.id, source={"id": source})).status_code == 201
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        for row in await harness.all(Feedback):
            (await session.get_one(Feedback, row.seq)).created_at = days_ago(366)
        (await session.get_one(Sample, turn.id)).state = SampleState.DROPPED
    await remove(harness)
    rows = await harness.all(Feedback)
    assert SECRET not in str([vars(row) for row in rows])
    answer = await harness.api.delete(f"/v1/subjects/{id}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["feedback"] == 1
    left = [row for row in await harness.all(Feedback) if row.kind == "binary"]
    assert [row.seq for row in left] == [rows[1].seq], "the feedback of the other source stays"
    assert not [row for row in await harness.all(Reward) if row.rater == f"HUMAN/{rows[0].source_id}"]
    assert (await harness.api.delete(f"/v1/subjects/{id}")).json()["feedback"] == 0


async def test_feedback_on_a_conversation_expires_after_its_turns(harness: Harness) -> None:
    turn = await old_turn(harness, conversation_id="conv-1")
    await harness.turn(conversation_id="conv-2")
    for conversation_id, status in (("conv-1", 201), ("conv-3", 404)):
        target = {"conversation_id": conversation_id}
        body = {"target": target, "kind": "binary", "value": "up", "comment": SECRET}
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == status
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        for row in await harness.all(Feedback):
            (await session.get_one(Feedback, row.seq)).created_at = days_ago(366)
            (await session.get_one(Feedback, row.seq)).processed = True
        for sample in await harness.all(Sample):
            (await session.get_one(Sample, sample.turn_id)).state = SampleState.DROPPED
        (await session.get_one(Turn, turn.id)).created_at = days_ago(10)
    await remove(harness)
    assert [row.comment for row in await harness.all(Feedback) if row.conversation_id == "conv-1"] == [SECRET]
    async with harness.db.write() as session:
        (await session.get_one(Turn, turn.id)).created_at = days_ago(100)
    await remove(harness)
    assert [row.comment for row in await harness.all(Feedback)] == [None]


async def test_feedback_is_kept_as_long_as_turns(harness: Harness) -> None:
    """The deployment's values may change after a project has set its own."""
    assert (await harness.api.put("/v1/retention", json={"turns": 180})).status_code == 200
    change_in_place(harness.settings, {"privacy__retention__turns": 30, "privacy__retention__feedback": 120})
    effective = (await harness.api.get("/v1/retention")).json()["effective"]
    assert (effective["turns"], effective["feedback"]) == (180, 180)


async def test_values_of_a_newer_release_are_left_out(harness: Harness) -> None:
    async with harness.db.write() as session:
        project = await session.get_one(Project, (await harness.policy()).project_id)
        project.retention = {"turns": 10, "traces": {"days": 3}}
    body = (await harness.api.get("/v1/retention")).json()
    assert body["own"] == {"turns": 10} and body["effective"]["turns"] == 10
    old = await old_turn(harness, days=11)
    assert await remove(harness) == 1 and old.id not in await remaining(harness)


async def test_failure_of_one_kind_does_not_stop_the_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> int:
        raise RuntimeError("damaged row")

    monkeypatch.setitem(retention.STEPS, "turns", (fail, fail))
    body = await expire_audit(harness, old=3, young=2)
    assert body["expired"] == 3 and "damaged row" in caplog.text


async def test_own_values_replace_those_of_the_deployment(harness: Harness) -> None:
    answer = await harness.api.put("/v1/retention", json={"turns": 10, "feedback": 0})
    assert answer.status_code == 200 and answer.json()["own"] == {"turns": 10, "feedback": None}
    effective = answer.json()["effective"]
    assert (effective["turns"], effective["feedback"], effective["versions"]) == (10, None, 200)
    old = await old_turn(harness, days=11)
    assert await remove(harness) == 1 and old.id not in await remaining(harness)
    assert (await harness.api.put("/v1/retention", json={})).json()["own"] == {}


@pytest.mark.parametrize("body", [{"turns": -1}, {"turns": 400}, {"turns": 0}, {"logs": 1}, {"versions": 1.5}])
async def test_invalid_values_are_refused(harness: Harness, body: dict[str, Any]) -> None:
    assert (await harness.api.put("/v1/retention", json=body)).status_code == 400


def test_null_and_zero_are_for_ever() -> None:
    config = RetentionConfig.model_validate({"turns": 0, "feedback": None, "versions": 0})
    assert (config.turns, config.feedback, config.versions) == (None, None, None)


async def test_preview_counts_rows_and_bytes_and_removes_nothing(harness: Harness) -> None:
    turns = [await old_turn(harness) for _ in range(3)]
    body = (await harness.api.get("/v1/retention/preview")).json()
    expired = {row["kind"]: row for row in body["data"]}
    assert expired["turns"]["rows"] == 3 and expired["turns"]["bytes"] > 3 * 100
    assert expired["feedback"] == {"kind": "feedback", "rows": 0, "bytes": 0}
    assert len(await remaining(harness)) == len(turns)


async def test_steps_are_bounded(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "STEP", 2)
    for _ in range(5):
        await old_turn(harness)
    answers = [(await harness.api.post("/v1/retention/run", json={})).json()["removed"]["turns"] for _ in range(4)]
    assert answers == [2, 2, 1, 0]
    entries = [row for row in await harness.all(Audit) if row.action == AuditAction.RETENTION_APPLIED]
    assert [row.details["rows"] for row in entries] == [2, 2, 1]


async def test_background_steps_are_recorded_once_a_day(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "STEP", 2)
    for _ in range(5):
        await old_turn(harness)
    assert [await remove(harness) for _ in range(3)] == [2, 2, 1]
    entries = [row for row in await harness.all(Audit) if row.action == AuditAction.RETENTION_APPLIED]
    assert [(row.actor, row.details) for row in entries] == [("retention", {"kind": "turns", "days": 90})]


async def expire_audit(harness: Harness, old: int, young: int) -> dict[str, Any]:
    """Seal `old` entries of long ago and `young` of now, then expire; return the verification."""
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        for number in range(old + young):
            created_at = days_ago(100) if number < old else now()
            entry = {"actor": "sk", "action": AuditAction.KEY_CREATED, "subject": f"key-{number}", "details": {}}
            session.add(Audit(project_id=project_id, created_at=created_at, **entry))
            await session.flush()
    await audit_chain.seal_entries(harness.db)
    assert (await harness.api.put("/v1/retention", json={"audit": 30})).status_code == 200
    await audit_chain.seal_entries(harness.db)
    await remove(harness)
    return await verify(harness)


async def test_audit_expires_once_a_day(harness: Harness) -> None:
    body = await expire_audit(harness, old=2, young=1)
    assert body["expired"] == 2
    await audit_chain.seal_entries(harness.db)
    entries = [row.created_at for row in await harness.all(Audit)]
    age = (now() - min(entries)) / DAY
    policy = await harness.policy()
    count = await retention.remove_expired(harness.db, policy.project_id, "audit", age / 2)
    assert count == 0, "less than a day has expired"


async def verify(harness: Harness, **params: str) -> dict[str, Any]:
    body: dict[str, Any] = (await harness.api.get("/v1/audit/verify", params=params)).json()
    return body


async def test_chain_is_intact_after_its_beginning_expired(harness: Harness) -> None:
    body = await expire_audit(harness, old=3, young=2)
    assert (body["ok"], body["expired"], body["entries"], body["unsealed"]) == (True, 3, 3, 1)
    await audit_chain.seal_entries(harness.db)
    body = await verify(harness)
    assert (body["ok"], body["expired"], body["entries"], body["unsealed"]) == (True, 3, 4, 0)
    checkpoint = (await harness.all(AuditChain))[0].start_hash
    assert (await verify(harness, known_hash=checkpoint))["ok"]
    assert (await verify(harness, known_hash=body["head"]))["ok"]


async def test_entries_that_have_not_expired_cannot_be_deleted(harness: Harness) -> None:
    await expire_audit(harness, old=1, young=2)
    with pytest.raises(DatabaseError, match="cannot be changed or deleted"):
        async with harness.db.write() as session:
            await session.execute(delete(Audit))


async def test_a_start_that_no_entry_names_is_found(harness: Harness) -> None:
    await expire_audit(harness, old=1, young=2)
    await audit_chain.seal_entries(harness.db)
    async with harness.db.write() as session:  # somebody removes one more entry, as retention does
        chain = await session.get_one(AuditChain, (await harness.policy()).project_id)
        entry = next(row for row in await harness.all(Audit) if row.chain_number == 2)
        chain.start_number, chain.start_hash = 2, entry.chain_hash
        await session.flush()
        await session.execute(delete(Audit).where(Audit.chain_number == 2))
    body = await verify(harness)
    assert not body["ok"] and body["problem"] == "entries up to 2 are missing, and no entry says that they have expired"
