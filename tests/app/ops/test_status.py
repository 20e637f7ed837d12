"""Pages that do not read whole tables: what they count and list is bounded, and what waits is counted exactly."""

import pytest
from sqlalchemy import update

from app.models import Audit, AuditAction, Engine, EngineState, Origin, Sample, SampleState, Turn, VersionState
from app.ops import status
from app.policies import version_statistics
from tests.support.deployment import Harness
from tests.support.statement_work import count_work
from tests.support.trained_versions import publish
from tests.support.waiting_samples import add_turns, analyze


async def test_status_counts_the_newest_rows(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_ROWS", 3)
    for number in range(5):
        await harness.turn(created_at=float(number), state="done" if number % 2 else "aborted")
    body = (await harness.api.get("/v1/status")).json()
    assert body["counted"] == 3 and body["turns"] == {"aborted": 2, "done": 1}


async def test_status_counts_all_samples_that_wait(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_ROWS", 2)
    states = [SampleState.OPEN] * 3 + [SampleState.QUARANTINED] + [SampleState.TRAINED] * 3
    turns = [await harness.turn() for _ in states]
    async with harness.db.write() as session:
        for number, (turn, state) in enumerate(zip(turns, states, strict=True)):
            same = {"policy_id": turn.policy_id, "version_id": turn.version_id, "ready_at": 0.0}
            session.add(Sample(turn_id=turn.id, reward=1.0, state=state, created_at=float(number), **same))
    samples = (await harness.api.get("/v1/status")).json()["samples"]
    assert samples == {"open": 3, "quarantined": 1, "trained": 2}


async def test_events_leave_out_what_applications_do_for_each_reply(harness: Harness) -> None:
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        for action in (AuditAction.KEY_CREATED, AuditAction.TOKEN_CREATED, AuditAction.FEEDBACK_WITHDRAWN):
            session.add(Audit(project_id=project_id, actor="sk", action=action, subject="x", details={}))
    events = (await harness.api.get("/v1/status")).json()["events"]
    assert [event["action"] for event in events] == [AuditAction.KEY_CREATED]


async def test_reason_of_an_engine_that_is_down_names_nothing_of_other_projects(harness: Harness) -> None:
    reason = "the engine exited with code 1; its last log line: bank-loans-v3 (it was loading bank-loans-v4)"
    async with harness.db.write() as session:
        engine = await session.get_one(Engine, "engine-0")
        engine.state, engine.reason = EngineState.DOWN, reason
    [engine] = (await harness.api.get("/v1/status")).json()["engines"]
    assert engine["reason"] == "the engine exited with code 1" and "bank" not in str(engine)


@pytest.mark.parametrize("state", [EngineState.READY, EngineState.STARTING])
async def test_only_an_engine_that_is_down_has_a_reason(harness: Harness, state: EngineState) -> None:
    async with harness.db.write() as session:
        engine = await session.get_one(Engine, "engine-0")
        engine.state, engine.reason = state, "bank-loans-v3: damaged"
    [engine] = (await harness.api.get("/v1/status")).json()["engines"]
    assert engine["reason"] is None and engine["not_loaded"] == {}


async def test_models_are_those_that_engines_hold(harness: Harness) -> None:
    held, other = await publish(harness), await publish(harness, loaded=False)
    names = {row["id"] for row in (await harness.api.get("/v1/models")).json()["data"]}
    assert f"shop@v{held.number}" in names and f"shop@v{other.number}" not in names
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = []
    names = {row["id"] for row in (await harness.api.get("/v1/models")).json()["data"]}
    assert f"shop@v{held.number}" not in names and "shop@v0" in names


async def test_versions_are_listed_in_pages(harness: Harness) -> None:
    for _ in range(4):
        await harness.version(VersionState.REJECTED)
    path = "/v1/policies/shop/versions"
    first = (await harness.api.get(path, params={"limit": 2})).json()
    assert [row["number"] for row in first["data"]] == [3, 4] and first["has_more"]
    assert [row["parent"] for row in first["data"]] == [2, 3]
    last = (await harness.api.get(path, params={"limit": 3, "before": 3})).json()
    assert [row["number"] for row in last["data"]] == [0, 1, 2] and not last["has_more"]


async def test_statistics_are_of_the_newest_replies(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_statistics, "MAX_TURNS", 3)
    for number in range(5):
        await harness.turn(created_at=float(number), num_output_tokens=10 * number)
    [version] = (await harness.api.get("/v1/policies/shop/versions")).json()["data"]
    assert (version["turns"], version["mean_length"]) == (3, 30.0)


async def test_status_costs_the_same_however_many_turns_are_rollouts(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MAX_ROWS", 50)
    chat, amounts = await harness.turn(), list[int]()
    await harness.api.get("/v1/status")  # the application opens its database
    for prefix, count in (("a", 300), ("b", 1200)):
        await add_turns(harness, count, prefix)
        async with harness.db.write() as session:
            await session.execute(update(Turn).where(Turn.id != chat.id).values(origin=Origin.PROMPT_SET))
        await analyze(harness)
        async with count_work(harness.api_database) as work:
            found = (await harness.api.get("/v1/status")).json()
        assert found["turns"] == {"done": 1}
        amounts.append(work.amount)
    assert amounts[1] < 1.5 * amounts[0]
