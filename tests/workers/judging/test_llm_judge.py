"""LLM judges: their prompts, how their responses are parsed, and the rewards of comparisons."""

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
from tests.support.engine_fixture import RunningEngine
from tests.support.judgements import (
    ScriptedEndpoint,
    completion_response,
    grade_response,
    make_judgements_due,
    run_judging,
    settings_with_sources,
)
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate
from workers.judging.judge import judge


def judge_source(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "judge", "url": url, "model": "judge-model", **fields}


async def test_a_grade_becomes_a_reward(harness: Harness) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint(lambda body: grade_response(4, "polite"))
    with endpoint.serve() as url:
        settings = settings_with_sources(
            harness, judge_source(url, rubric="Is it short?", key="j"), secrets={"j": SecretStr("sk-1")}
        )
        [judgement] = await run_judging(harness, settings)
    assert (judgement.state, judgement.value) == (JudgementState.DONE, 0.5)
    assert judgement.details["explanation"] == "polite" and judgement.details["tokens"] == 123
    [reward] = await harness.all(Reward)
    assert (reward.source, reward.value) == ("judge", 0.5)
    [request] = endpoint.requests
    assert endpoint.paths == ["/v1/chat/completions"] and endpoint.keys == ["Bearer sk-1"]
    assert (request["model"], request["temperature"], request["stream"], request["max_tokens"]) == (
        "judge-model",
        0.0,
        False,
        256,
    )
    schema = request["response_format"]["json_schema"]
    assert schema["strict"] and schema["schema"]["properties"]["grade"] == {"type": "integer", "enum": [1, 2, 3, 4, 5]}
    prompt = request["messages"][1]["content"]
    assert "Is it short?" in prompt and '{"role": "user", "content": "hi"}' in prompt
    assert '{"role": "reply", "content": "hello"}' in prompt


@pytest.mark.parametrize(("grade", "value"), [(1, -1.0), (2, -0.5), (3, 0.0), (4, 0.5), (5, 1.0)])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_grades_become_rewards_between_minus_one_and_one(harness: Harness, grade: int, value: float) -> None:
    await harness.turn()
    with ScriptedEndpoint(lambda body: grade_response(grade)).serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, judge_source(url)))
    assert judgement.value == value


@pytest.mark.parametrize(
    ("suffix", "path"),
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
async def test_the_url_may_be_with_or_without_v1(harness: Harness, suffix: str, path: str) -> None:
    await harness.turn()
    endpoint = ScriptedEndpoint(lambda body: grade_response(5))
    with endpoint.serve() as url:
        await run_judging(harness, settings_with_sources(harness, judge_source(url + suffix)))
    assert endpoint.paths == [path]


async def test_an_endpoint_that_rejects_response_format_gets_a_request_without_it(harness: Harness) -> None:
    await harness.turn()

    def answer(body: dict[str, Any]) -> Any:
        if "response_format" in body:
            return JSONResponse({"error": "response_format is not supported"}, 400)
        return completion_response('Let me see.\n```json\n{"grade": 2, "reason": "rude"}\n```')

    endpoint = ScriptedEndpoint(answer)
    with endpoint.serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, judge_source(url)))
    assert (judgement.value, judgement.details["explanation"], judgement.details["requests"]) == (-0.5, "rude", 3)
    assert ["max_completion_tokens" in body for body in endpoint.requests] == [False, True, False]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (completion_response("It deserves a five."), "its answer has no JSON with 'grade'"),
        (completion_response('{"grade": 6, "reason": "wow"}'), "its answer has no JSON with 'grade'"),
        (completion_response('{"grade": true}'), "its answer has no JSON with 'grade'"),
        (completion_response('{"reason": "it is so', "length"), "its answer was cut at max_tokens (256)"),
        ({"choices": []}, "its answer is not a chat completion"),
        ({"choices": [{"message": {"content": None}}]}, "its answer has no text"),
        ([], "its answer is not a chat completion"),
        (JSONResponse({"error": "no"}, 422), "it refused every form of the request"),
        (JSONResponse({"error": "no"}, 503), "it answered 503"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_response_without_a_grade_fails_with_a_reason(harness: Harness, answer: Any, reason: str) -> None:
    await harness.turn()
    with ScriptedEndpoint(lambda body: answer).serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, judge_source(url), max_attempts=1))
    assert judgement.state == JudgementState.FAILED and (judgement.reason or "").startswith(reason)
    assert await harness.all(Reward) == []


async def test_a_truncated_reason_is_retried_with_the_grade_only(harness: Harness) -> None:
    await harness.turn()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        has_reason = "reason" in body["response_format"]["json_schema"]["schema"]["properties"]
        return (
            completion_response('{"reason": "well, well, well', "length")
            if has_reason
            else completion_response('{"grade": 4}')
        )

    with ScriptedEndpoint(answer).serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, judge_source(url)))
    assert (judgement.value, judgement.details["requests"]) == (0.5, 2)


async def test_a_turn_without_a_reply_is_not_graded(harness: Harness) -> None:
    await harness.turn(reply=None, state="failed", finish_reason="error")
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        [judgement] = await run_judging(harness, settings_with_sources(harness, judge_source(url)))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "there is no reply to judge")
    assert endpoint.requests == []


def prefer(*order: str) -> Any:
    """Return a judge that prefers the reply that comes first in `order`."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        replies = [orjson.loads(line) for line in re.findall(r'^\{"role": "reply .*$', read_prompt(body), re.M)]
        a, b = (order.index(line["content"]) for line in replies)
        return completion_response(orjson.dumps({"reason": "taste", "better": "A" if a < b else "B"}).decode())

    return answer


def read_prompt(body: dict[str, Any]) -> str:
    text: str = body["messages"][1]["content"]
    return text


async def create_choices(harness: Harness, *replies: str) -> list[Turn]:
    turns: list[Turn] = []
    for index, reply in enumerate(replies):
        choice: dict[str, Any] = {"completion_id": turns[0].id, "choice_index": index} if turns else {}
        turns.append(await harness.turn(reply={"role": "assistant", "content": reply}, **choice))
    return turns


async def test_replies_are_compared_in_both_orders(harness: Harness) -> None:
    turns = await create_choices(harness, "fine", "poor", "best")
    endpoint = ScriptedEndpoint(prefer("best", "fine", "poor"))
    with endpoint.serve() as url:
        judgements = {
            row.turn_id: row
            for row in await run_judging(harness, settings_with_sources(harness, judge_source(url, compare=True)))
        }
    assert [judgements[turn.id].value for turn in turns] == [0.0, -1.0, 1.0]
    assert {reward.turn_id: reward.value for reward in await harness.all(Reward)} == {
        turns[0].id: 0.0,
        turns[1].id: -1.0,
        turns[2].id: 1.0,
    }
    assert len(endpoint.requests) == 6 == sum(row.details["requests"] for row in judgements.values())
    orders = [
        tuple(re.findall(r'"role": "reply [AB]", "content": "(\w+)"', read_prompt(body))) for body in endpoint.requests
    ]
    assert len(set(orders)) == 6 and all((b, a) in orders for a, b in orders)


async def test_a_judge_that_prefers_a_position_gives_a_tie(harness: Harness) -> None:
    await create_choices(harness, "one", "two")
    endpoint = ScriptedEndpoint(lambda body: completion_response('{"reason": "the first", "better": "A"}'))
    with endpoint.serve() as url:
        rows = await run_judging(harness, settings_with_sources(harness, judge_source(url, compare=True)))
    assert [row.value for row in rows] == [0.0, 0.0] and len(endpoint.requests) == 2


async def test_equal_replies_are_a_tie_without_a_request(harness: Harness) -> None:
    await create_choices(harness, "same", "same")
    endpoint = ScriptedEndpoint()
    with endpoint.serve() as url:
        rows = await run_judging(harness, settings_with_sources(harness, judge_source(url, compare=True)))
    assert [row.value for row in rows] == [0.0, 0.0] and endpoint.requests == []


async def test_a_judge_sees_neither_versions_nor_ids_nor_names(harness: Harness) -> None:
    turns = await create_choices(harness, "one", "two")
    endpoint = ScriptedEndpoint(prefer("one", "two"))
    with endpoint.serve() as url:
        await run_judging(
            harness, settings_with_sources(harness, judge_source(url, compare=True), judge_source(url, name="grader"))
        )
    assert len(endpoint.requests) == 4
    for body in endpoint.requests:
        raw = orjson.dumps(body).decode()
        assert not any(text in raw for text in (turns[0].id, turns[1].id, turns[0].version_id, "shop", "@v"))


async def test_a_comparison_waits_for_open_replies(harness: Harness) -> None:
    turns = await create_choices(harness, "one", "two")
    endpoint = ScriptedEndpoint(prefer("one", "two"))
    async with harness.db.write() as session:
        (await session.get_one(Turn, turns[1].id)).state = "open"
    with endpoint.serve() as url:
        settings = settings_with_sources(harness, judge_source(url, compare=True))
        [judgement] = await run_judging(harness, settings)
        assert (judgement.state, judgement.attempt) == (JudgementState.OPEN, 0) and endpoint.requests == []
        async with harness.db.write() as session:
            (await session.get_one(Turn, turns[1].id)).state = "done"
        await curate(harness.db, settings)
        await make_judgements_due(harness)
        await judge(harness.db, settings, "me")
    assert sorted(row.value for row in await harness.all(Judgement)) == [-1.0, 1.0]


async def test_a_failed_comparison_is_retried_from_the_start(harness: Harness) -> None:
    await create_choices(harness, "one", "two")
    endpoint = ScriptedEndpoint(
        lambda body: prefer("one", "two")(body) if len(endpoint.requests) != 2 else {"choices": []}
    )
    with endpoint.serve() as url:
        settings = settings_with_sources(harness, judge_source(url, compare=True))
        assert {row.state for row in await run_judging(harness, settings)} == {JudgementState.OPEN}
        assert await harness.all(Reward) == []
        await make_judgements_due(harness)
        await judge(harness.db, settings, "me")
    assert sorted(row.value for row in await harness.all(Judgement)) == [-1.0, 1.0] and len(endpoint.requests) == 4


async def test_the_api_of_attune_may_be_the_judge(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    """Its prompts become turns, which are not judged, since each judgement would create another turn."""
    await harness.turn()
    scripted.reply_text = '{"reason": "it greets", "grade": 5}'
    source = judge_source(live_url, model="shop", key="attune")
    settings = settings_with_sources(harness, source, secrets={"attune": SecretStr(harness.key)})
    [judgement] = await run_judging(harness, settings)
    assert (judgement.state, judgement.value) == (JudgementState.DONE, 1.0)
    [request] = scripted.requests
    assert request["response_format"]["type"] == "json_schema" and request["messages"][0]["content"] == SYSTEM
    rows = await run_judging(harness, settings)
    assert sorted(row.state for row in rows) == [JudgementState.DONE, JudgementState.SKIPPED]
    assert len(await harness.all(Turn)) == 2 and len(scripted.requests) == 1


async def test_the_rewards_of_a_policy_send_a_key_only_to_the_host_it_is_bound_to(harness: Harness) -> None:
    endpoint = ScriptedEndpoint(lambda body: grade_response(5))
    with endpoint.serve() as url:
        config = RewardsConfig.model_validate({"sources": [judge_source(url, key="j")]})
        async with harness.db.write() as session:
            (await session.get_one(Policy, (await harness.policy()).id)).rewards = config.model_dump(mode="json")
        await harness.turn()
        [judgement] = await run_judging(
            harness, settings_with_sources(harness, secrets={"j": SecretStr("sk-1")}, private_hosts=["127.0.0.1"])
        )
        assert judgement.state == JudgementState.FAILED and endpoint.requests == []
        await harness.turn()
        await run_judging(
            harness,
            settings_with_sources(harness, secrets={"j@127.0.0.1": SecretStr("sk-2")}, private_hosts=["127.0.0.1"]),
        )
    assert endpoint.keys == ["Bearer sk-2"]


@pytest.mark.engine
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_an_engine_follows_the_schema(harness: Harness, engine: RunningEngine) -> None:
    """Use the real SGLang as the endpoint. Only the protocol is tested; the model is too small to judge."""
    await harness.turn()
    source = {
        "type": "judge",
        "url": engine.spec.url,
        "model": "base",
        "key": "engine",
        "rubric": "Is it kind?",
        "max_tokens": 64,
        "timeout_seconds": 120,
    }
    settings = settings_with_sources(
        harness, source, secrets={"engine": SecretStr(engine.spec.api_key)}, lease_seconds=20.0
    )
    [judgement] = await run_judging(harness, settings)
    assert judgement.state == JudgementState.DONE, judgement.reason
    assert judgement.value in (-1.0, -0.5, 0.0, 0.5, 1.0)
    assert judgement.details["requests"] <= 2, (
        "the schema is accepted, with a reason or (if it is truncated) for the grade only"
    )
    assert judgement.details["tokens"] > 0
