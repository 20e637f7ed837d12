"""The judge stage: each source is called once, results are recorded once, and slow sources delay no others."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import insert, select, update

from app.core import leases
from app.core.settings import Settings
from app.models import (
    Judgement,
    JudgementState,
    Policy,
    Project,
    Reward,
    Sample,
    SampleState,
    Turn,
    TurnState,
    new_id,
)
from app.projects.service import create_policy
from tests.support.deployment import Harness
from tests.support.judgements import ScriptedEndpoint, make_judgements_due, run_judging, settings_with_sources
from tests.support.shared_histories import FOLLOW_UP, follow_up
from workers.curate import curate
from workers.judging import judge as judge_module
from workers.judging.judge import MAX_RUNNING, claim_judgements, judge
from workers.queue import leased_job
from workers.stage_metrics import JUDGE_REQUESTS


def http(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "http", "url": url, **fields}


async def test_the_response_of_a_service_becomes_a_reward_and_a_sample(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c-1", request_metadata={"plan": "gold"})
    endpoint = ScriptedEndpoint(lambda body: {"reward": 0.5, "reason": "kind"})
    before = JUDGE_REQUESTS.labels("http", "answered")._value.get()
    with endpoint.serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, http(url + "/reward")))
    assert (judgement.state, judgement.value, judgement.lease_owner) == (JudgementState.DONE, 0.5, None)
    assert judgement.details["explanation"] == "kind" and judgement.details["requests"] == 1
    assert judgement.settled_at is not None
    [reward], [sample] = await harness.all(Reward), await harness.all(Sample)
    assert (reward.turn_id, reward.source, reward.reward_source, reward.value) == (turn.id, "http", "http", 0.5)
    assert (sample.reward, sample.state) == (0.5, SampleState.OPEN)
    assert endpoint.paths == ["/reward"]
    assert JUDGE_REQUESTS.labels("http", "answered")._value.get() == before + 1
    assert endpoint.requests == [
        {
            "turn": {
                "id": turn.id,
                "conversation_id": "c-1",
                "messages": [{"role": "user", "content": "hi"}],
                "reply": {"role": "assistant", "content": "hello"},
                "finish_reason": "stop",
                "model": "shop@v0",
                "metadata": {"plan": "gold"},
            }
        }
    ]


async def test_a_service_gets_the_whole_prompt_of_a_turn_that_shares_its_history(harness: Harness) -> None:
    first = await harness.turn()
    second = await harness.turn(**follow_up(first))
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        await run_judging(harness, settings_with_sources(harness, http(url)))
    messages = {request["turn"]["id"]: request["turn"]["messages"] for request in endpoint.requests}
    assert messages == {
        first.id: first.own_messages,
        second.id: [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, FOLLOW_UP],
    }


async def test_a_request_that_the_engine_refused_is_not_judged(harness: Harness) -> None:
    reason = "the engine refused the request: no"
    nothing: dict[str, Any] = {"reply": None, "output_ids": None, "logprobs": None, "exclusion_reason": reason}
    await harness.turn(state=TurnState.REFUSED, finish_reason="refused", **nothing)
    rule = {"type": "rule", "name": "ended", "function": "ended"}  # it would give the reward -1
    assert await run_judging(harness, settings_with_sources(harness, rule)) == []
    assert await harness.all(Reward) == []


async def test_a_source_is_called_once(harness: Harness) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        settings = settings_with_sources(harness, http(url))
        await run_judging(harness, settings)
        assert await judge(harness.db, settings, "me") == 0
        await run_judging(harness, settings)
    assert len(endpoint.requests) == 1 and len(await harness.all(Reward)) == 1


async def test_a_source_may_have_no_opinion(harness: Harness) -> None:
    await harness.turn()
    with ScriptedEndpoint(lambda body: {"reward": None, "reason": "not my language"}).serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, http(url)))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "not my language")
    assert await harness.all(Reward) == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"reward": 1.5}, "its reward 1.5 is not between -1 and 1"),
        ({"reward": "1"}, "its reward '1' is not a number"),
        ({"reward": True}, "its reward 'True' is not a number"),
        (b'{"reward": NaN}', "its answer is not JSON"),
        (b"", "its answer is not JSON"),
        (b"[" * 100_000, "its answer is not JSON"),
        ({"score": 1}, 'its answer is not an object with a "reward"'),
        ([1], 'its answer is not an object with a "reward"'),
        (b" " * (1 << 20) + b"1", "it answered more than 1048576 bytes"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_an_unreadable_response_is_retried_and_then_fails(harness: Harness, answer: Any, reason: str) -> None:
    turn = await harness.turn()
    await harness.vote(turn.id)
    endpoint = ScriptedEndpoint(lambda body: answer)
    with endpoint.serve() as url:
        settings = settings_with_sources(harness, http(url), max_attempts=2)
        [judgement] = await run_judging(harness, settings)
        assert (judgement.state, judgement.reason, judgement.attempt) == (JudgementState.OPEN, reason, 1)
        assert await judge(harness.db, settings, "me") == 0, "it is not due yet"
        await make_judgements_due(harness)
        assert await judge(harness.db, settings, "me") == 1
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.reason, judgement.attempt) == (JudgementState.FAILED, reason, 2)
    assert judgement.details["requests"] == len(endpoint.requests) == 2
    [sample] = await harness.all(Sample)
    assert sample.reward == 1.0, "the human rating counts without it"


@pytest.mark.parametrize("status", [301, 307, 401, 429, 500])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_other_statuses_are_failed_attempts_and_redirects_are_not_followed(harness: Harness, status: int) -> None:
    await harness.turn()
    redirect_target, endpoint = ScriptedEndpoint(), ScriptedEndpoint(status=status)
    with redirect_target.serve() as other, endpoint.serve() as url:
        endpoint.headers = {"location": other}
        [judgement] = await run_judging(harness, settings_with_sources(harness, http(url)))
    assert judgement.state == JudgementState.OPEN and f"it answered {status}" in (judgement.reason or "")
    assert redirect_target.requests == []


async def test_the_delay_between_attempts_grows(harness: Harness) -> None:
    await harness.turn()
    settings = settings_with_sources(harness, http("http://127.0.0.1:9"), max_attempts=5)
    delays = []
    await curate(harness.db, settings)
    for _ in range(3):
        await make_judgements_due(harness)
        await judge(harness.db, settings, "me")
        [judgement] = await harness.all(Judgement)
        delays.append(judgement.due_at - judgement.heartbeat_at)
    assert judgement.reason == "it does not answer (ConnectError)"
    assert all(delay >= minimum for delay, minimum in zip(delays, (4.9, 19.9, 79.9), strict=True)), delays


async def test_a_slow_source_does_not_delay_the_others(harness: Harness) -> None:
    for _ in range(12):
        await harness.turn()
    slow, quick = ScriptedEndpoint(hang=True), ScriptedEndpoint()
    with slow.serve() as slow_url, quick.serve() as url:
        sources = [http(slow_url, name="slow", timeout_seconds=300), http(url, name="quick")]
        settings = settings_with_sources(harness, *sources)
        await curate(harness.db, settings)
        running = asyncio.create_task(judge(harness.db, settings, "me"))
        async with asyncio.timeout(60):
            while len(await harness.all(Reward)) < 12:
                await asyncio.sleep(0.05)
            new_turn = await harness.turn()
            await curate(harness.db, settings)
            while not any(reward.turn_id == new_turn.id for reward in await harness.all(Reward)):
                await asyncio.sleep(0.05)
            while len(slow.requests) < 4:
                await asyncio.sleep(0.05)
        assert not running.done(), "the stage still waits for the slow source"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(slow.requests) == 4, "the limit of concurrent requests applies"


async def test_a_time_out_counts_as_an_attempt(harness: Harness) -> None:
    await harness.turn()
    with ScriptedEndpoint(hang=True).serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, http(url, timeout_seconds=0.2)))
    assert (judgement.state, judgement.attempt) == (JudgementState.OPEN, 1)
    assert judgement.reason == "no answer within 0.2 s"


async def test_the_hourly_budget_is_counted_in_the_database(harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(2)]
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        settings = settings_with_sources(harness, http(url, per_hour=2))
        await run_judging(harness, settings)
        await harness.turn()
        judgements = {row.turn_id: row for row in await run_judging(harness, settings)}
        [third] = [row for id, row in judgements.items() if id not in {turn.id for turn in turns}]
        assert (third.state, third.reason) == (JudgementState.SKIPPED, "the hourly budget of the source is spent")
        async with harness.db.write() as session:
            await session.execute(update(Judgement).values(settled_at=Judgement.settled_at - 3700))
        await harness.turn()
        await run_judging(harness, settings)
    assert len(endpoint.requests) == 3, "an hour later there is a new budget"


async def test_only_a_share_of_the_turns_is_judged(harness: Harness) -> None:
    for _ in range(30):
        await harness.turn()
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        rows = await run_judging(harness, settings_with_sources(harness, http(url, share=0.5)))
    done = [row for row in rows if row.state == JudgementState.DONE]
    assert 0 < len(done) == len(endpoint.requests) < 30


async def test_a_removed_source_is_not_called(harness: Harness) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        await curate(harness.db, settings_with_sources(harness, http(url)))
        assert await judge(harness.db, harness.settings, "me") == 1
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "the policy does not use this source")
    assert endpoint.requests == []


@pytest.mark.parametrize("refusal", ["turn", "project", "deleted"])
async def test_a_turn_without_consent_is_sent_to_no_source(harness: Harness, refusal: str) -> None:
    turn = await harness.turn()
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        settings = settings_with_sources(harness, http(url))
        await curate(harness.db, settings)
        async with harness.db.write() as session:
            if refusal == "turn":
                (await session.get_one(Turn, turn.id)).exclusion_reason = "no consent to train"
            elif refusal == "project":
                (await session.get_one(Project, turn.project_id)).train = False
            else:
                (await session.get_one(Turn, turn.id)).deleted_at = 1.0
        await judge(harness.db, settings, "me")
    [judgement] = await harness.all(Judgement)
    reason = "the turn is deleted" if refusal == "deleted" else "no consent to train"
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, reason)
    assert endpoint.requests == []


async def test_the_response_about_a_turn_deleted_meanwhile_is_not_stored(harness: Harness) -> None:
    turn = await harness.turn()
    loop = asyncio.get_running_loop()

    async def delete() -> None:
        async with harness.db.write() as session:
            (await session.get_one(Turn, turn.id)).deleted_at = 1.0

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        asyncio.run_coroutine_threadsafe(delete(), loop).result(30)
        return {"reward": 1.0, "reason": "she lives in Rome"}

    with ScriptedEndpoint(answer).serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, http(url)))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "the turn is deleted")
    assert await harness.all(Reward) == [] and "Rome" not in str(judgement.details)


@pytest.fixture
def stopping() -> Iterator[threading.Event]:
    """Set it to tell the workers of this process to stop."""
    yield leased_job.is_stopping
    leased_job.is_stopping.clear()


@asynccontextmanager
async def hanging_judge(harness: Harness, **values: Any) -> AsyncIterator[tuple[asyncio.Task[int], Settings]]:
    """Run a judge whose source has its question and does not answer it; the judge, and settings for others."""
    await harness.turn()
    endpoint = ScriptedEndpoint(hang=True)
    with endpoint.serve() as url:
        settings = settings_with_sources(harness, http(url, timeout_seconds=300), **values)
        await curate(harness.db, settings)
        first = asyncio.create_task(judge(harness.db, settings, "first"))
        async with asyncio.timeout(30):
            while not endpoint.requests:
                await asyncio.sleep(0.02)
        endpoint.hang = False
        yield first, settings
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_after_a_worker_hangs_another_one_takes_over_and_there_is_one_reward(harness: Harness) -> None:
    async with hanging_judge(harness) as (_, settings):
        [judgement] = await harness.all(Judgement)
        assert (judgement.state, judgement.lease_owner) == (JudgementState.OPEN, "first")
        assert await judge(harness.db, settings, "second") == 0, "the lease has not expired"
        await make_judgements_due(harness)
        assert await judge(harness.db, settings, "second") == 1
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.attempt, judgement.fence) == (JudgementState.DONE, 2, 2)
    assert len(await harness.all(Reward)) == len(await harness.all(Sample)) == 1


async def test_worker_that_is_told_to_stop_hands_its_jobs_over(
    harness: Harness, stopping: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_job, "STOP_SECONDS", 0.1)
    async with hanging_judge(harness) as (first, settings):
        stopping.set()
        assert await asyncio.wait_for(first, 60) == 0
        [judgement] = await harness.all(Judgement)
        assert (judgement.state, judgement.lease_owner, judgement.attempt) == (JudgementState.OPEN, None, 0)
        stopping.clear()
        assert await judge(harness.db, settings, "second") == 1, "it need not wait for the lease"


async def test_lost_lease_ends_the_request(harness: Harness) -> None:
    async with hanging_judge(harness, lease_seconds=1.0) as (first, _):
        [judgement] = await harness.all(Judgement)
        async with harness.db.write() as session:  # in one transaction, or the first worker might renew in between
            await session.execute(update(Judgement).values(lease_until=None))
            states = (JudgementState.OPEN,)
            assert await leases.claim(session, Judgement, judgement.id, owner="other", seconds=600, states=states)
        assert await asyncio.wait_for(first, 60) == 0, "the source has not answered"
        [judgement] = await harness.all(Judgement)
        assert (judgement.state, judgement.lease_owner) == (JudgementState.OPEN, "other")


async def test_a_response_under_a_lost_lease_is_not_recorded(harness: Harness) -> None:
    await harness.turn()
    loop = asyncio.get_running_loop()

    async def take_over() -> None:
        await make_judgements_due(harness)
        [judgement] = await harness.all(Judgement)
        async with harness.db.write() as session:
            states = (JudgementState.OPEN,)
            assert await leases.claim(session, Judgement, judgement.id, owner="other", seconds=60, states=states) == 2

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        asyncio.run_coroutine_threadsafe(take_over(), loop).result(30)
        return {"reward": 1.0}

    with ScriptedEndpoint(answer).serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, http(url)))
    assert (judgement.state, judgement.lease_owner, judgement.fence) == (JudgementState.OPEN, "other", 2)
    assert await harness.all(Reward) == []


async def test_a_judgement_whose_workers_stop_every_time_fails(harness: Harness) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        settings = settings_with_sources(harness, http(url))
        await curate(harness.db, settings)
        async with harness.db.write() as session:
            await session.execute(update(Judgement).values(attempt=3))
        await judge(harness.db, settings, "me")
    [judgement] = await harness.all(Judgement)
    assert judgement.state == JudgementState.FAILED and "the worker stopped" in judgement.reason
    assert endpoint.requests == []


async def test_two_workers_share_the_judgements_and_lose_no_reward(harness: Harness) -> None:
    for _ in range(10):
        await harness.turn()
    first_source, second_source = ScriptedEndpoint(), ScriptedEndpoint(lambda body: {"reward": 0.0})
    with first_source.serve() as first_url, second_source.serve() as second_url:
        settings = settings_with_sources(harness, http(first_url, name="first"), http(second_url, name="second"))
        await curate(harness.db, settings)
        counts = await asyncio.gather(judge(harness.db, settings, "one"), judge(harness.db, settings, "two"))
    assert sum(counts) == len(await harness.all(Reward)) == 20
    assert len(first_source.requests) == len(second_source.requests) == 10
    assert [sample.reward for sample in await harness.all(Sample)] == [0.5] * 10


async def test_an_endpoint_gets_its_own_key(harness: Harness) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        source = http(url, key="mine")
        [judgement] = await run_judging(harness, settings_with_sources(harness, source))
        assert judgement.state == JudgementState.FAILED and "ATTUNE_SECRETS has no 'mine@127.0.0.1'" in (
            judgement.reason or ""
        )
        settings = settings_with_sources(harness, source, secrets={"mine": SecretStr("sk-1")})
        await harness.turn()
        await run_judging(harness, settings)
        assert endpoint.keys == ["Bearer sk-1"]


async def test_a_policy_that_fails_holds_up_no_other(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    own = await harness.policy()
    turn = await harness.turn()
    async with harness.db.write() as session:
        broken = await create_policy(session, own.project_id, "broken", harness.settings.model)
        for policy in (own, broken):
            values = {"state": "open", "details": {}, "attempt": 0, "fence": 0, "due_at": 0.0}
            session.add(Judgement(id=new_id("jdg"), turn_id=turn.id, policy_id=policy.id, source=policy.name, **values))

    async def fail_for_broken(*arguments: Any) -> list[Judgement]:
        if arguments[-1].policy_id == broken.id:
            raise ValueError("the rewards of this policy cannot be read")
        return []

    monkeypatch.setattr(judge_module, "_claim_compared", fail_for_broken)
    claimed = await claim_judgements(harness.db, harness.settings, "worker", Counter(), ())
    assert [[row.policy_id for row in rows] for rows in claimed] == [[own.id]]
    [left] = [row for row in await harness.all(Judgement) if row.policy_id == broken.id]
    assert (left.attempt, left.lease_owner) == (0, None), "it is not claimed either"


async def test_a_backlog_delays_no_other_project(harness: Harness) -> None:
    turn, policy = await harness.turn(), await harness.policy()
    async with harness.db.write() as session:
        project = Project(id=new_id("proj"), name="other")
        session.add(project)
        await session.flush()
        await create_policy(session, project.id, "other", harness.settings.model)
        other = (await session.scalars(select(Policy).where(Policy.project_id == project.id))).one()
        rows = [
            {"id": new_id("jdg"), "turn_id": turn.id, "policy_id": policy_id, "source": source, "due_at": due_at}
            for policy_id, source, due_at in [
                *((policy.id, f"judge-{number}", 1.0 + number) for number in range(10_000)),
                (other.id, "judge", 1_000_000.0),
            ]
        ]
        await session.execute(insert(Judgement), rows)
    claimed = await claim_judgements(harness.db, harness.settings, "me", Counter(), ())
    assert len(claimed) == MAX_RUNNING
    assert [row.policy_id for rows in claimed for row in rows].count(other.id) == 1
    full = Counter({(policy.id, f"judge-{number}"): 1 for number in range(MAX_RUNNING - 1)})
    async with harness.db.write() as session:
        await session.execute(update(Judgement).values(lease_until=None, lease_owner=None))
    [[row]] = await claim_judgements(harness.db, harness.settings, "me", full, ())
    assert row.policy_id == other.id  # the next place that becomes free


async def test_a_second_policy_wins_a_project_no_places(harness: Harness) -> None:
    """Its running jobs count for its project, whether or not more of them wait."""
    turn, policy = await harness.turn(), await harness.policy()
    async with harness.db.write() as session:
        project = Project(id=new_id("proj"), name="other")
        session.add(project)
        await session.flush()
        await create_policy(session, policy.project_id, "second", harness.settings.model)
        await create_policy(session, project.id, "other", harness.settings.model)
        second, other = [
            (await session.scalars(select(Policy).where(Policy.name == name))).one() for name in ("second", "other")
        ]
        rows = [
            {"id": new_id("jdg"), "turn_id": turn.id, "policy_id": id, "source": f"{name}-{number}", "due_at": 1.0}
            for name, id in (("judge", policy.id), ("other", other.id))
            for number in range(MAX_RUNNING)
        ]
        await session.execute(insert(Judgement), rows)
    running = Counter({(second.id, f"judge-{number}"): 1 for number in range(8)})
    claimed = await claim_judgements(harness.db, harness.settings, "me", running, ())
    assert [row.policy_id for rows in claimed for row in rows] == [other.id] * 8
