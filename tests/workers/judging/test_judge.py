"""Judgements → Rewards: asked once, settled once, and nobody waits for the slow."""

import asyncio
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import update

from app.core import leases
from app.models import Judgement, JudgementState, Project, Reward, Sample, SampleState, Turn
from tests.support.deployment import Harness
from tests.support.judgements import Oracle, due, judged, listening
from workers.feedback.curate import curate
from workers.judging.judge import judge


def http(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "http", "url": url, **fields}


async def test_a_services_word_becomes_a_reward_and_a_sample(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c-1", request_metadata={"plan": "gold"})
    oracle = Oracle(lambda body: {"reward": 0.5, "reason": "kind"})
    with oracle.at() as url:
        [judgement] = await judged(harness, listening(harness, http(url + "/reward")))
    assert (judgement.state, judgement.value, judgement.lease_owner) == (JudgementState.DONE, 0.5, None)
    assert judgement.details["explanation"] == "kind" and judgement.details["asks"] == 1
    assert judgement.settled_at is not None
    [reward], [sample] = await harness.all(Reward), await harness.all(Sample)
    assert (reward.turn_id, reward.source, reward.origin, reward.value) == (turn.id, "http", "http", 0.5)
    assert (sample.reward, sample.state) == (0.5, SampleState.OPEN)
    assert oracle.paths == ["/reward"]
    assert oracle.heard == [
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


async def test_nothing_is_asked_twice(harness: Harness) -> None:
    await harness.turn()
    oracle = Oracle()
    with oracle.at() as url:
        settings = listening(harness, http(url))
        await judged(harness, settings)
        assert await judge(harness.db, settings, "me") == 0
        await judged(harness, settings)
    assert len(oracle.heard) == 1 and len(await harness.all(Reward)) == 1


async def test_a_source_may_have_nothing_to_say(harness: Harness) -> None:
    await harness.turn()
    with Oracle(lambda body: {"reward": None, "reason": "not my language"}).at() as url:
        [judgement] = await judged(harness, listening(harness, http(url)))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "not my language")
    assert await harness.all(Reward) == []


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"reward": 1.5}, "its reward 1.5 does not lie between -1 and 1"),
        ({"reward": "1"}, "its reward '1' is no number"),
        ({"reward": True}, "its reward 'True' is no number"),
        (b'{"reward": NaN}', "its answer is not JSON"),
        (b"", "its answer is not JSON"),
        (b"[" * 100_000, "its answer is not JSON"),
        ({"score": 1}, 'its answer is no object with a "reward"'),
        ([1], 'its answer is no object with a "reward"'),
        (b" " * (1 << 20) + b"1", "it answered more than 1048576 bytes"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_cannot_be_read_is_asked_again_and_then_given_up(harness: Harness, told: Any, reason: str) -> None:
    turn = await harness.turn()
    await harness.thumb(turn.id)
    oracle = Oracle(lambda body: told)
    with oracle.at() as url:
        settings = listening(harness, http(url), max_attempts=2)
        [judgement] = await judged(harness, settings)
        assert (judgement.state, judgement.reason, judgement.attempt) == (JudgementState.OPEN, reason, 1)
        assert await judge(harness.db, settings, "me") == 0, "it is not due yet"
        await due(harness)
        assert await judge(harness.db, settings, "me") == 1
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.reason, judgement.attempt) == (JudgementState.FAILED, reason, 2)
    assert judgement.details["asks"] == len(oracle.heard) == 2
    [sample] = await harness.all(Sample)
    assert sample.reward == 1.0, "what people said stands without it"


@pytest.mark.parametrize("status", [301, 307, 401, 429, 500])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_another_status_is_no_answer_and_no_redirect_is_followed(harness: Harness, status: int) -> None:
    await harness.turn()
    elsewhere, oracle = Oracle(), Oracle(status=status)
    with elsewhere.at() as other, oracle.at() as url:
        oracle.headers = {"location": other}
        [judgement] = await judged(harness, listening(harness, http(url)))
    assert judgement.state == JudgementState.OPEN and f"it answered {status}" in judgement.reason
    assert elsewhere.heard == []


async def test_pauses_grow(harness: Harness) -> None:
    await harness.turn()
    settings = listening(harness, http("http://127.0.0.1:9"), max_attempts=5)
    pauses = []
    await curate(harness.db, settings)
    for _ in range(3):
        await due(harness)
        await judge(harness.db, settings, "me")
        [judgement] = await harness.all(Judgement)
        pauses.append(judgement.due_at - judgement.heartbeat_at)
    assert judgement.reason == "it does not answer (ConnectError)"
    assert all(told >= least for told, least in zip(pauses, (4.9, 19.9, 79.9), strict=True)), pauses


async def test_a_slow_source_does_not_hold_up_the_others(harness: Harness) -> None:
    for _ in range(12):
        await harness.turn()
    slow, quick = Oracle(hang=True), Oracle()
    with slow.at() as dead_end, quick.at() as url:
        sources = [http(dead_end, name="slow", timeout_seconds=300), http(url, name="quick")]
        settings = listening(harness, *sources)
        await curate(harness.db, settings)
        running = asyncio.create_task(judge(harness.db, settings, "me"))
        async with asyncio.timeout(60):
            while len(await harness.all(Reward)) < 12:
                await asyncio.sleep(0.05)
            late = await harness.turn()
            await curate(harness.db, settings)
            while not any(reward.turn_id == late.id for reward in await harness.all(Reward)):
                await asyncio.sleep(0.05)
            while len(slow.heard) < 4:
                await asyncio.sleep(0.05)
        assert not running.done(), "it is still waiting for the slow one"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(slow.heard) == 4, "no more than its share at once"


async def test_a_time_out_counts_as_an_attempt(harness: Harness) -> None:
    await harness.turn()
    with Oracle(hang=True).at() as url:
        [judgement] = await judged(harness, listening(harness, http(url, timeout_seconds=0.2)))
    assert (judgement.state, judgement.attempt) == (JudgementState.OPEN, 1)
    assert judgement.reason == "no answer within 0.2 s"


async def test_the_budget_of_an_hour_is_counted_in_the_database(harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(2)]
    oracle = Oracle()
    with oracle.at() as url:
        settings = listening(harness, http(url, per_hour=2))
        await judged(harness, settings)
        await harness.turn()
        found = {row.turn_id: row for row in await judged(harness, settings)}
        [third] = [row for id, row in found.items() if id not in {turn.id for turn in turns}]
        assert (third.state, third.reason) == (JudgementState.SKIPPED, "its budget of the hour is spent")
        async with harness.db.write() as session:
            await session.execute(update(Judgement).values(settled_at=Judgement.settled_at - 3700))
        await harness.turn()
        await judged(harness, settings)
    assert len(oracle.heard) == 3, "an hour later there is a new budget"


async def test_a_share_of_the_turns_is_asked_about(harness: Harness) -> None:
    for _ in range(30):
        await harness.turn()
    oracle = Oracle()
    with oracle.at() as url:
        rows = await judged(harness, listening(harness, http(url, share=0.5)))
    asked = [row for row in rows if row.state == JudgementState.DONE]
    assert 0 < len(asked) == len(oracle.heard) < 30


async def test_a_source_that_was_taken_out_is_not_asked(harness: Harness) -> None:
    await harness.turn()
    oracle = Oracle()
    with oracle.at() as url:
        await curate(harness.db, listening(harness, http(url)))
        assert await judge(harness.db, harness.settings, "me") == 1
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "the policy does not listen to it")
    assert oracle.heard == []


@pytest.mark.parametrize("refusal", ["turn", "project", "deleted"])
async def test_without_consent_nobody_is_told_of_a_turn(harness: Harness, refusal: str) -> None:
    turn = await harness.turn()
    oracle = Oracle()
    with oracle.at() as url:
        settings = listening(harness, http(url))
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
    assert oracle.heard == []


async def test_what_is_said_of_a_turn_that_was_deleted_meanwhile_is_not_kept(harness: Harness) -> None:
    turn = await harness.turn()
    loop = asyncio.get_running_loop()

    async def delete() -> None:
        async with harness.db.write() as session:
            (await session.get_one(Turn, turn.id)).deleted_at = 1.0

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        asyncio.run_coroutine_threadsafe(delete(), loop).result(30)
        return {"reward": 1.0, "reason": "she lives in Rome"}

    with Oracle(answer).at() as url:
        [judgement] = await judged(harness, listening(harness, http(url)))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "the turn is deleted")
    assert await harness.all(Reward) == [] and "Rome" not in str(judgement.details)


async def test_a_judge_that_died_before_it_could_settle_is_followed_by_another_and_there_is_one_reward(
    harness: Harness,
) -> None:
    await harness.turn()
    oracle = Oracle(hang=True)
    with oracle.at() as url:
        settings = listening(harness, http(url, timeout_seconds=300))
        await curate(harness.db, settings)
        dying = asyncio.create_task(judge(harness.db, settings, "first"))
        async with asyncio.timeout(30):
            while not oracle.heard:
                await asyncio.sleep(0.02)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        oracle.hang = False
        [judgement] = await harness.all(Judgement)
        assert (judgement.state, judgement.lease_owner) == (JudgementState.OPEN, "first")
        assert await judge(harness.db, settings, "second") == 0, "its lease still runs"
        await due(harness)
        assert await judge(harness.db, settings, "second") == 1
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.attempt, judgement.fence) == (JudgementState.DONE, 2, 2)
    assert len(oracle.heard) == 2 and len(await harness.all(Reward)) == len(await harness.all(Sample)) == 1


async def test_an_answer_that_comes_after_another_took_over_is_refused(harness: Harness) -> None:
    await harness.turn()
    loop = asyncio.get_running_loop()

    async def take_over() -> None:
        await due(harness)
        [judgement] = await harness.all(Judgement)
        async with harness.db.write() as session:
            states = (JudgementState.OPEN,)
            assert await leases.claim(session, Judgement, judgement.id, owner="other", seconds=60, states=states) == 2

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        asyncio.run_coroutine_threadsafe(take_over(), loop).result(30)
        return {"reward": 1.0}

    with Oracle(answer).at() as url:
        [judgement] = await judged(harness, listening(harness, http(url)))
    assert (judgement.state, judgement.lease_owner, judgement.fence) == (JudgementState.OPEN, "other", 2)
    assert await harness.all(Reward) == []


async def test_what_takes_its_asker_down_every_time_is_given_up(harness: Harness) -> None:
    await harness.turn()
    oracle = Oracle()
    with oracle.at() as url:
        settings = listening(harness, http(url))
        await curate(harness.db, settings)
        async with harness.db.write() as session:
            await session.execute(update(Judgement).values(attempt=3))
        await judge(harness.db, settings, "me")
    [judgement] = await harness.all(Judgement)
    assert judgement.state == JudgementState.FAILED and "did not live" in judgement.reason
    assert oracle.heard == []


async def test_two_judges_share_the_work_and_no_word_is_lost_between_them(harness: Harness) -> None:
    for _ in range(10):
        await harness.turn()
    kind, strict = Oracle(), Oracle(lambda body: {"reward": 0.0})
    with kind.at() as first, strict.at() as second:
        settings = listening(harness, http(first, name="kind"), http(second, name="strict"))
        await curate(harness.db, settings)
        counts = await asyncio.gather(judge(harness.db, settings, "one"), judge(harness.db, settings, "two"))
    assert sum(counts) == len(await harness.all(Reward)) == 20
    assert len(kind.heard) == len(strict.heard) == 10
    assert [sample.reward for sample in await harness.all(Sample)] == [0.5] * 10


async def test_a_key_is_sent_to_where_it_belongs(harness: Harness) -> None:
    await harness.turn()
    oracle = Oracle()
    with oracle.at() as url:
        source = http(url, key="mine")
        [judgement] = await judged(harness, listening(harness, source))
        assert judgement.state == JudgementState.FAILED and "ATTUNE_SECRETS has no 'mine@127.0.0.1'" in judgement.reason
        settings = listening(harness, source, secrets={"mine": SecretStr("sk-1")})
        await harness.turn()
        await judged(harness, settings)
        assert oracle.keys == ["Bearer sk-1"]
