"""Claims of attempts: leases that run out, late reports, tries that are lost, groups that are stale."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.environments import expired_leases
from app.environments.claims import MAX_EXPIRED, settle_expired
from app.models import Episode, Feedback, PlannedRun, Policy, Project, RunAttempt
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.planned_runs import act, claim, expire, finish, join, post, read, start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trained_versions import publish
from workers.reconcile import reconcile


def places(attempts: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(attempt["task_index"], attempt["attempt_index"]) for attempt in attempts]


async def test_attempts_are_claimed_group_by_group(harness: Harness) -> None:
    await join(harness, num_tasks=2, group_size=2)
    attempts = [await claim(harness, owner=f"owner-{number}") for number in range(4)]
    assert places(attempts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    none = (await post(harness, "claim", owner="other")).json()
    assert (none["attempt"], none["is_complete"]) == (None, False)
    for attempt in attempts:
        await start(harness, attempt)
        await finish(harness, attempt, outcome=1.0)
    last = (await post(harness, "claim", owner="other")).json()
    assert (last["attempt"], last["is_complete"]) == (None, True)


async def test_claims_at_the_same_time_have_different_attempts(harness: Harness) -> None:
    await join(harness, num_tasks=5, group_size=2)
    attempts = await asyncio.gather(*[claim(harness, owner=f"owner-{number}") for number in range(10)])
    assert sorted(places(attempts)) == [(task, number) for task in range(5) for number in range(2)]


async def test_claim_that_is_sent_again_returns_the_same_attempt(harness: Harness) -> None:
    await join(harness, num_tasks=2)
    assert await claim(harness) == await claim(harness)
    assert (await read(harness))["attempts"]["under_way"] == 1


async def test_episode_has_what_the_plan_says(harness: Harness) -> None:
    limits = {"max_turns": 4, "max_tokens": 50, "max_reply_tokens": 9, "deadline_seconds": 60.0}
    plan = {"metadata": {"environment": "rooms", "user": "plan"}, "seed": 7, "split": "test", "version": "leash"}
    await join(harness, num_tasks=2, group_size=3, limits=limits, **plan)
    attempt = await claim(harness)
    begin = {"task": "first", "description": {"user": "scripted", "mood": "bad"}}
    episode = await start(harness, attempt, **begin)
    assert episode["metadata"] == {
        "environment": "rooms",
        "user": "plan",
        "mood": "bad",
        "run": "monday",
        "split": "test",
        "seed": "7",
    }
    assert (episode["task"], episode["group"]) == ("first", {"id": "monday/first", "size": 3})
    assert (episode["sampling"], episode["service_tier"], episode["version"]) == ("policy", "flex", "leash")
    assert episode["limits"] == {"idle_seconds": 65, "deadline_seconds": 65, "max_turns": 4, "max_tokens": 50}
    assert (await start(harness, attempt, **begin))["id"] == episode["id"], "the same request again"
    assert len(await harness.all(Episode)) == 1


async def test_other_task_under_the_same_number_is_refused(harness: Harness) -> None:
    """Two processes whose environments differ would fill a group with attempts at different tasks."""
    await join(harness, group_size=2)
    first, second = await claim(harness), await claim(harness, owner="two")
    await start(harness, first, task="france")
    refused = await act(harness, second, "start", task="spain")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "run_task_differs")


async def test_attempt_of_a_dead_process_is_played_again_in_its_group(harness: Harness) -> None:
    await join(harness, num_tasks=2, group_size=2)
    dead = await claim(harness, owner="dead")
    lost = await start(harness, dead)
    await expire(harness, dead)
    again = await claim(harness)
    assert (again["id"], again["episode"]) == (dead["id"], None) and again["fence"] > dead["fence"]
    episode = await start(harness, again)
    assert episode["id"] != lost["id"]
    await finish(harness, again, outcome=1.0)
    rows = {row.id: row for row in await harness.all(Episode)}
    assert rows[lost["id"]].end_reason == rows[lost["id"]].reported_reason == "infrastructure"
    assert (rows[lost["id"]].group_id, rows[lost["id"]].outcome) == (None, None), "it leaves its place in the group"
    assert (rows[episode["id"]].group_id, rows[episode["id"]].outcome) == ("monday/task-0", 1.0)


async def test_late_finish_is_refused_and_counts_nothing(harness: Harness) -> None:
    await join(harness)
    dead = await claim(harness, owner="dead")
    await start(harness, dead)
    await expire(harness, dead)
    again = await claim(harness)
    for body in ({"outcome": 1.0}, {"reason": "infrastructure"}, {"reason": "failed"}):
        late = await act(harness, dead, "finish", **body)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "lease_lost")
    for verb, fields in (("start", {"task": "task-0"}), ("release", {})):
        assert (await act(harness, dead, verb, **fields)).json()["error"]["code"] == "lease_lost"
    assert await harness.all(Feedback) == []
    await start(harness, again)
    assert (await finish(harness, again, outcome=0.5))["state"] == "done"
    assert (await act(harness, dead, "finish", outcome=1.0)).status_code == 409
    assert [row.value for row in await harness.all(Feedback)] == [0.5]


async def test_finish_before_anybody_has_claimed_again_counts(harness: Harness) -> None:
    """The process was only slow."""
    await join(harness)
    attempt = await claim(harness)
    await start(harness, attempt)
    await expire(harness, attempt)
    first, second = [await finish(harness, attempt, outcome=1.0) for _ in range(2)]
    assert first == second and first["state"] == "done", "the same report again changes nothing"
    assert len(await harness.all(Feedback)) == 1


async def test_episode_of_a_dead_process_ends_though_nobody_claims_again(harness: Harness) -> None:
    """The command was killed and nobody has started it again: the episode, and its version, would stay in use."""
    await join(harness, num_tasks=2)
    dead, slow = await claim(harness, owner="dead"), await claim(harness, owner="slow")
    lost, open_still = await start(harness, dead), await start(harness, slow)
    await expire(harness, dead)
    await expire(harness, slow, seconds_ago=1.0)
    await reconcile(harness.db, harness.settings)
    rows = {row.id: row for row in await harness.all(Episode)}
    assert (rows[lost["id"]].end_reason, rows[open_still["id"]].end_reason) == ("infrastructure", None)
    assert (await act(harness, dead, "finish", outcome=1.0)).json()["error"]["code"] == "lease_lost"
    assert (await finish(harness, slow, outcome=1.0))["state"] == "done"
    again = await claim(harness)
    assert (again["id"], again["episode"]) == (dead["id"], None)


async def test_attempt_of_a_dead_process_that_reported_its_end_is_done(harness: Harness) -> None:
    """It died between the end of its episode and its own report."""
    await join(harness)
    dead = await claim(harness, owner="dead")
    episode = await start(harness, dead)
    await episodes.end(harness, episode["id"], outcome=1.0)
    await expire(harness, dead)
    await reconcile(harness.db, harness.settings)
    counts = (await read(harness))["attempts"]
    assert (counts["done"], counts["waiting"]) == (1, 0)


async def test_failing_attempt_holds_up_no_other(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose lease ran out first comes first in each pass."""
    await join(harness, num_tasks=2)
    broken, other = [await claim(harness, owner=f"owner-{number}") for number in range(2)]
    for attempt, seconds_ago in ((broken, 7200.0), (other, 3600.0)):
        await start(harness, attempt)
        await expire(harness, attempt, seconds_ago)

    async def fail_once(session: AsyncSession, project_id: str, attempt: RunAttempt) -> None:
        if attempt.id == broken["id"]:
            raise RuntimeError("it fails")
        await settle_expired(session, project_id, attempt)

    monkeypatch.setattr(expired_leases, "settle_expired", fail_once)
    with pytest.raises(ExceptionGroup):
        await expired_leases.settle_attempts(harness.db, harness.settings)
    owners = {row.id: row.lease_owner for row in await harness.all(RunAttempt)}
    assert owners == {broken["id"]: "owner-0", other["id"]: None}


async def test_project_whose_attempts_fail_in_every_pass_holds_up_no_other(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attempts expired first, and are as many as one pass settles."""
    monkeypatch.setattr(expired_leases, "MAX_SETTLED", 2)
    await join(harness, num_tasks=3)
    attempts = [await claim(harness, owner=f"owner-{number}") for number in range(3)]
    for number, attempt in enumerate(attempts):
        await start(harness, attempt)
        await expire(harness, attempt, 7200.0 - number)
    async with harness.db.write() as session:  # the last one belongs to another project
        project = Project(id="prj-other", name="other")
        session.add(project)
        await session.flush()
        run = await session.scalar(select(PlannedRun))
        assert run is not None
        columns = {column.key: getattr(run, column.key) for column in PlannedRun.__table__.columns}
        session.add(PlannedRun(**(columns | {"id": "run-other", "project_id": project.id})))
        await session.flush()
        moved = update(RunAttempt).where(RunAttempt.id == attempts[-1]["id"]).values(run_id="run-other")
        await session.execute(moved)
    settled = []

    async def settle(session: AsyncSession, project_id: str, attempt: RunAttempt) -> None:
        settled.append(project_id)

    monkeypatch.setattr(expired_leases, "settle_expired", settle)
    assert await expired_leases.settle_attempts(harness.db, harness.settings) == 2
    assert "prj-other" in settled


async def test_attempts_that_fail_in_every_pass_hold_up_no_other_of_their_project(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They expired first, and are as many as one pass settles."""
    monkeypatch.setattr(expired_leases, "MAX_SETTLED", 2)
    monkeypatch.setattr(random, "sample", lambda pairs, count: list(reversed(pairs))[:count])
    await join(harness, num_tasks=3)
    attempts = [await claim(harness, owner=f"owner-{number}") for number in range(3)]
    for number, attempt in enumerate(attempts):
        await start(harness, attempt)
        await expire(harness, attempt, 7200.0 - number)
    settled = []

    async def settle(session: AsyncSession, project_id: str, attempt: RunAttempt) -> None:
        settled.append(attempt.id)

    monkeypatch.setattr(expired_leases, "settle_expired", settle)
    assert await expired_leases.settle_attempts(harness.db, harness.settings) == 2
    assert attempts[2]["id"] in settled, "the order of a pass is random"


async def test_renewed_lease_stays_and_a_lost_one_is_named(harness: Harness) -> None:
    await join(harness, num_tasks=3)
    mine, expired, taken = [await claim(harness, owner=f"owner-{number}") for number in range(3)]
    for attempt in (expired, taken):
        await expire(harness, attempt)
    await post(harness, "renew", leases=[{"id": expired["id"], "fence": expired["fence"]}])
    again = await claim(harness, owner="other")
    assert again["id"] == taken["id"], "the other one was renewed"
    leases = [{"id": attempt["id"], "fence": attempt["fence"]} for attempt in (mine, expired, taken)]
    assert (await post(harness, "renew", leases=leases)).json()["lost"] == [taken["id"]]


async def test_renewal_after_the_finish_holds_nothing(harness: Harness) -> None:
    await join(harness)
    attempt = await claim(harness)
    await start(harness, attempt)
    await finish(harness, attempt, reason="infrastructure")
    renewed = await post(harness, "renew", leases=[{"id": attempt["id"], "fence": attempt["fence"]}])
    assert renewed.json()["lost"] == [attempt["id"]]
    assert (await claim(harness, owner="two"))["id"] == attempt["id"]


async def test_lost_attempt_is_repeated_once(harness: Harness) -> None:
    await join(harness, group_size=2)
    states = []
    for _ in range(2):
        attempt = await claim(harness)
        await start(harness, attempt)
        states.append((await finish(harness, attempt, reason="infrastructure"))["state"])
        assert (await finish(harness, attempt, reason="infrastructure"))["state"] == states[-1], "sent again"
    assert states == ["open", "lost"]
    assert places([await claim(harness)]) == [(0, 1)]
    row = next(row for row in await harness.all(RunAttempt) if row.attempt_index == 0)
    assert (row.state, row.reason) == ("lost", "failed_tries")


async def test_attempt_that_never_began_is_lost_without_an_episode(harness: Harness) -> None:
    await join(harness)
    attempt = await claim(harness)
    refused = await act(harness, attempt, "finish", outcome=1.0)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "attempt_not_begun")
    assert (await finish(harness, attempt, reason="infrastructure"))["episode"] is None
    assert await harness.all(Episode) == []


async def test_released_attempt_costs_no_try_and_no_place(harness: Harness) -> None:
    await join(harness, group_size=2)
    for _ in range(5):
        attempt = await claim(harness)
        await start(harness, attempt)
        for _ in range(2):
            assert (await act(harness, attempt, "release")).json()["state"] == "open"
    for _ in range(2):
        attempt = await claim(harness)
        await start(harness, attempt)
        await finish(harness, attempt, outcome=1.0)
    rows = await harness.all(Episode)
    assert [row.end_reason for row in rows] == ["abandoned"] * 5 + ["completed"] * 2
    assert [row.group_id for row in rows] == [None] * 5 + ["monday/task-0"] * 2


async def test_attempt_that_kills_its_processes_is_given_up(harness: Harness) -> None:
    await join(harness, num_tasks=2)
    for _ in range(MAX_EXPIRED):
        attempt = await claim(harness)
        assert attempt["task_index"] == 0
        await start(harness, attempt)
        await expire(harness, attempt)
    assert places([await claim(harness)]) == [(1, 0)]
    row = next(row for row in await harness.all(RunAttempt) if row.task_index == 0)
    assert (row.state, row.reason) == ("lost", "dead_processes")


async def test_end_that_the_environment_has_reported_itself_counts(harness: Harness) -> None:
    """Its process died between that report and its own."""
    await join(harness)
    attempt = await claim(harness)
    episode = await start(harness, attempt)
    await episodes.end(harness, episode["id"], outcome=0.75)
    await expire(harness, attempt)
    none = (await post(harness, "claim", owner="two")).json()
    assert (none["attempt"], none["is_complete"]) == (None, True)
    view = await read(harness)
    assert (view["attempts"]["done"], view["mean_outcome"]) == (1, 0.75)


async def test_environment_with_fewer_tasks_makes_the_run_shorter(harness: Harness) -> None:
    await join(harness, num_tasks=9, group_size=2)
    for number in range(4):
        await claim(harness, owner=f"owner-{number}")
    assert places([await claim(harness, owner="owner-3", num_tasks=3)]) == [(1, 1)], "it holds one of those there are"
    none = (await post(harness, "claim", owner="owner-3", num_tasks=1)).json()
    assert none["attempt"] is None, "the one that it held is not there any more"
    assert (await read(harness))["num_tasks"] == 1


async def test_stale_group_is_cancelled_and_complete_ones_stay(harness: Harness, scripted: ScriptedEngine) -> None:
    async with harness.db.write() as session:
        await session.execute(update(Policy).values(settings={"trainer": {"max_staleness": 1}}))
    await join(harness, num_tasks=3, group_size=2)
    for number in range(3):  # the first group, and one of the second
        attempt = await claim(harness, owner=f"owner-{number}")
        episode = await start(harness, attempt)
        assert (await episodes.chat(harness, episode)).status_code == 200
        if number < 2:
            await finish(harness, attempt, outcome=1.0)
    await publish(harness)
    waiting = await claim(harness, owner="near")
    assert places([waiting]) == [(1, 1)], "one version behind is not too far"
    await act(harness, waiting, "release")
    await publish(harness)
    assert places([await claim(harness, owner="far")]) == [(2, 0)]
    states = {(row.task_index, row.attempt_index): (row.state, row.reason) for row in await harness.all(RunAttempt)}
    assert states == {
        (0, 0): ("done", None),
        (0, 1): ("done", None),
        (1, 0): ("open", None),
        (1, 1): ("cancelled", "stale_group"),
        (2, 0): ("open", None),
        (2, 1): ("open", None),
    }
    assert (await read(harness))["attempts"]["cancelled"] == 1


@pytest.mark.parametrize("settings_of_policy", [{}, {"trainer": {"max_staleness": 9}}])
async def test_group_that_may_be_learned_from_goes_on(
    harness: Harness, scripted: ScriptedEngine, settings_of_policy: dict[str, Any]
) -> None:
    async with harness.db.write() as session:
        await session.execute(update(Policy).values(settings=settings_of_policy))
    await join(harness, group_size=2)
    episode = await start(harness, await claim(harness))
    assert (await episodes.chat(harness, episode)).status_code == 200
    for _ in range(3):
        await publish(harness)
    assert places([await claim(harness, owner="two")]) == [(0, 1)]
