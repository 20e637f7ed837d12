"""A language model as a judge: what it is asked, how its answers are read, and what comparisons come to."""

import re
from typing import Any

import orjson
import pytest
from pydantic import SecretStr
from starlette.responses import JSONResponse

from alignment.config.rewards import RewardsConfig
from alignment.signals.judge_prompts import SYSTEM
from app.models import Judgement, JudgementState, Policy, Reward, Turn
from tests.support.deployment import Harness
from tests.support.judgements import Oracle, completion, due, graded, judged, listening
from tests.support.scripted_engine import ScriptedEngine
from workers.feedback.curate import curate
from workers.judging.judge import judge


def model(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "judge", "url": url, "model": "wise", **fields}


async def test_a_grade_becomes_a_reward(harness: Harness) -> None:
    await harness.turn()
    oracle = Oracle(lambda body: graded(4, "polite"))
    with oracle.at() as url:
        settings = listening(harness, model(url, rubric="Is it short?", key="j"), secrets={"j": SecretStr("sk-1")})
        [judgement] = await judged(harness, settings)
    assert (judgement.state, judgement.value) == (JudgementState.DONE, 0.5)
    assert judgement.details["explanation"] == "polite" and judgement.details["tokens"] == 123
    [reward] = await harness.all(Reward)
    assert (reward.source, reward.value) == ("judge", 0.5)
    [asked] = oracle.heard
    assert oracle.paths == ["/v1/chat/completions"] and oracle.keys == ["Bearer sk-1"]
    assert (asked["model"], asked["temperature"], asked["stream"], asked["max_tokens"]) == ("wise", 0.0, False, 256)
    schema = asked["response_format"]["json_schema"]
    assert schema["strict"] and schema["schema"]["properties"]["grade"] == {"type": "integer", "enum": [1, 2, 3, 4, 5]}
    said = asked["messages"][1]["content"]
    assert "Is it short?" in said and '{"role": "user", "content": "hi"}' in said
    assert '{"role": "reply", "content": "hello"}' in said


@pytest.mark.parametrize(("grade", "value"), [(1, -1.0), (2, -0.5), (3, 0.0), (4, 0.5), (5, 1.0)])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_grades_lie_between_minus_one_and_one(harness: Harness, grade: int, value: float) -> None:
    await harness.turn()
    with Oracle(lambda body: graded(grade)).at() as url:
        [judgement] = await judged(harness, listening(harness, model(url)))
    assert judgement.value == value


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/openai/v2", "/openai/v2/chat/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_url_is_good_with_and_without_v1(harness: Harness, given: str, path: str) -> None:
    await harness.turn()
    oracle = Oracle(lambda body: graded(5))
    with oracle.at() as url:
        await judged(harness, listening(harness, model(url + given)))
    assert oracle.paths == [path]


async def test_an_endpoint_that_knows_no_schema_is_asked_without_one(harness: Harness) -> None:
    await harness.turn()

    def answer(body: dict[str, Any]) -> Any:
        if "response_format" in body:
            return JSONResponse({"error": "response_format is not supported"}, 400)
        return completion('Let me see.\n```json\n{"grade": 2, "reason": "rude"}\n```')

    oracle = Oracle(answer)
    with oracle.at() as url:
        [judgement] = await judged(harness, listening(harness, model(url)))
    assert (judgement.value, judgement.details["explanation"], judgement.details["asks"]) == (-0.5, "rude", 3)
    assert ["max_completion_tokens" in body for body in oracle.heard] == [False, True, False]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (completion("It deserves a five."), "its answer has no JSON with 'grade'"),
        (completion('{"grade": 6, "reason": "wow"}'), "its answer has no JSON with 'grade'"),
        (completion('{"grade": true}'), "its answer has no JSON with 'grade'"),
        (completion('{"reason": "it is so', "length"), "its answer was cut at max_tokens (256)"),
        ({"choices": []}, "its answer is no chat completion"),
        ({"choices": [{"message": {"content": None}}]}, "its answer has no text"),
        ([], "its answer is no chat completion"),
        (JSONResponse({"error": "no"}, 422), "it refused every form of the question"),
        (JSONResponse({"error": "no"}, 503), "it answered 503"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_is_no_grade_is_a_failure_with_its_reason(harness: Harness, told: Any, reason: str) -> None:
    await harness.turn()
    with Oracle(lambda body: told).at() as url:
        [judgement] = await judged(harness, listening(harness, model(url), max_attempts=1))
    assert judgement.state == JudgementState.FAILED and judgement.reason.startswith(reason)
    assert await harness.all(Reward) == []


async def test_a_judge_that_finds_no_end_to_its_reasons_is_asked_for_the_grade_alone(harness: Harness) -> None:
    await harness.turn()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        reasons = "reason" in body["response_format"]["json_schema"]["schema"]["properties"]
        return completion('{"reason": "well, well, well', "length") if reasons else completion('{"grade": 4}')

    with Oracle(answer).at() as url:
        [judgement] = await judged(harness, listening(harness, model(url)))
    assert (judgement.value, judgement.details["asks"]) == (0.5, 2)


async def test_a_turn_without_a_reply_is_not_graded(harness: Harness) -> None:
    await harness.turn(reply=None, state="failed", finish_reason="error")
    oracle = Oracle()
    with oracle.at() as url:
        [judgement] = await judged(harness, listening(harness, model(url)))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "there is no reply to judge")
    assert oracle.heard == []


def better(*order: str) -> Any:
    """A judge with a taste: of two replies the one that comes first here."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        shown = [orjson.loads(line) for line in re.findall(r'^\{"role": "reply .*$', said(body), re.M)]
        a, b = (order.index(line["content"]) for line in shown)
        return completion(orjson.dumps({"reason": "taste", "better": "A" if a < b else "B"}).decode())

    return answer


def said(body: dict[str, Any]) -> str:
    text: str = body["messages"][1]["content"]
    return text


async def choices(harness: Harness, *replies: str) -> list[Turn]:
    turns: list[Turn] = []
    for index, reply in enumerate(replies):
        first = {"completion_id": turns[0].id, "choice_index": index} if turns else {}
        turns.append(await harness.turn(reply={"role": "assistant", "content": reply}, **first))
    return turns


async def test_replies_are_compared_in_both_orders(harness: Harness) -> None:
    turns = await choices(harness, "fine", "poor", "best")
    oracle = Oracle(better("best", "fine", "poor"))
    with oracle.at() as url:
        found = {row.turn_id: row for row in await judged(harness, listening(harness, model(url, compare=True)))}
    assert [found[turn.id].value for turn in turns] == [0.0, -1.0, 1.0]
    assert {reward.turn_id: reward.value for reward in await harness.all(Reward)} == {
        turns[0].id: 0.0,
        turns[1].id: -1.0,
        turns[2].id: 1.0,
    }
    assert len(oracle.heard) == 6 == sum(row.details["asks"] for row in found.values())
    shown = [tuple(re.findall(r'"role": "reply [AB]", "content": "(\w+)"', said(body))) for body in oracle.heard]
    assert len(set(shown)) == 6 and all((b, a) in shown for a, b in shown)


async def test_a_judge_that_prefers_a_place_says_nothing(harness: Harness) -> None:
    await choices(harness, "one", "two")
    oracle = Oracle(lambda body: completion('{"reason": "the first", "better": "A"}'))
    with oracle.at() as url:
        rows = await judged(harness, listening(harness, model(url, compare=True)))
    assert [row.value for row in rows] == [0.0, 0.0] and len(oracle.heard) == 2


async def test_equal_replies_are_a_tie_that_nobody_is_asked_about(harness: Harness) -> None:
    await choices(harness, "same", "same")
    oracle = Oracle()
    with oracle.at() as url:
        rows = await judged(harness, listening(harness, model(url, compare=True)))
    assert [row.value for row in rows] == [0.0, 0.0] and oracle.heard == []


async def test_a_judge_sees_neither_versions_nor_ids_nor_names(harness: Harness) -> None:
    turns = await choices(harness, "one", "two")
    oracle = Oracle(better("one", "two"))
    with oracle.at() as url:
        await judged(harness, listening(harness, model(url, compare=True), model(url, name="grader")))
    assert len(oracle.heard) == 4
    for body in oracle.heard:
        raw = orjson.dumps(body).decode()
        assert not any(word in raw for word in (turns[0].id, turns[1].id, turns[0].version_id, "shop", "@v"))


async def test_where_a_reply_is_still_being_made_the_others_wait(harness: Harness) -> None:
    turns = await choices(harness, "one", "two")
    oracle = Oracle(better("one", "two"))
    async with harness.db.write() as session:
        (await session.get_one(Turn, turns[1].id)).state = "open"
    with oracle.at() as url:
        settings = listening(harness, model(url, compare=True))
        [judgement] = await judged(harness, settings)
        assert (judgement.state, judgement.attempt) == (JudgementState.OPEN, 0) and oracle.heard == []
        async with harness.db.write() as session:
            (await session.get_one(Turn, turns[1].id)).state = "done"
        await curate(harness.db, settings)
        await due(harness)
        await judge(harness.db, settings, "me")
    assert sorted(row.value for row in await harness.all(Judgement)) == [-1.0, 1.0]


async def test_a_comparison_that_fails_half_way_is_made_again_as_a_whole(harness: Harness) -> None:
    await choices(harness, "one", "two")
    oracle = Oracle(lambda body: better("one", "two")(body) if len(oracle.heard) != 2 else {"choices": []})
    with oracle.at() as url:
        settings = listening(harness, model(url, compare=True))
        assert {row.state for row in await judged(harness, settings)} == {JudgementState.OPEN}
        assert await harness.all(Reward) == []
        await due(harness)
        await judge(harness.db, settings, "me")
    assert sorted(row.value for row in await harness.all(Judgement)) == [-1.0, 1.0] and len(oracle.heard) == 4


async def test_attunes_own_api_may_be_the_judge(harness: Harness, served: str, scripted: ScriptedEngine) -> None:
    """Its questions become turns of their own, which nobody is asked about: else they would breed."""
    await harness.turn()
    scripted.say = '{"reason": "it greets", "grade": 5}'
    source = model(served, model="shop", key="attune")
    settings = listening(harness, source, secrets={"attune": SecretStr(harness.key)})
    [judgement] = await judged(harness, settings)
    assert (judgement.state, judgement.value) == (JudgementState.DONE, 1.0)
    [heard] = scripted.heard
    assert heard["response_format"]["type"] == "json_schema" and heard["messages"][0]["content"] == SYSTEM
    rows = await judged(harness, settings)
    assert sorted(row.state for row in rows) == [JudgementState.DONE, JudgementState.SKIPPED]
    assert len(await harness.all(Turn)) == 2 and len(scripted.heard) == 1


async def test_a_policys_own_rewards_send_a_key_only_to_the_host_it_is_bound_to(harness: Harness) -> None:
    oracle = Oracle(lambda body: graded(5))
    with oracle.at() as url:
        config = RewardsConfig.model_validate({"sources": [model(url, key="j")]})
        async with harness.db.write() as session:
            (await session.get_one(Policy, (await harness.policy()).id)).rewards = config.model_dump(mode="json")
        await harness.turn()
        [judgement] = await judged(
            harness, listening(harness, secrets={"j": SecretStr("sk-1")}, private_hosts=["127.0.0.1"])
        )
        assert judgement.state == JudgementState.FAILED and oracle.heard == []
        await harness.turn()
        await judged(
            harness, listening(harness, secrets={"j@127.0.0.1": SecretStr("sk-2")}, private_hosts=["127.0.0.1"])
        )
    assert oracle.keys == ["Bearer sk-2"]
