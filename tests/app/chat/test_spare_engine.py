"""A chat is answered by a second engine if the first one fails before the first byte."""

from typing import Any

import pytest
from sqlalchemy import update

from app.models import Engine, Turn, TurnState
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

BODY: dict[str, Any] = {"model": "shop", "messages": [{"role": "user", "content": "hello"}]}


async def chat(harness: Harness, **fields: Any) -> tuple[int, str, list[Turn]]:
    response = await harness.api.post("/v1/chat/completions", json={**BODY, **fields})
    return response.status_code, response.text, await harness.all(Turn)


def fail_first(engines: list[ScriptedEngine], **fields: Any) -> ScriptedEngine:
    """Make the engine fail that the router prefers for BODY; return the other one."""
    preferred, other = engines if engines[0].requests else engines[::-1]
    for name, value in fields.items():
        setattr(preferred, name, value)
    for engine in engines:
        engine.requests.clear()
    return other


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [{"refuse_status": 500}, {"refuse_status": 503}])
@pytest.mark.parametrize("n", [1, 2])
async def test_second_engine_answers(
    harness: Harness,
    scripted: ScriptedEngine,
    second_engine: ScriptedEngine,
    stream: bool,
    failure: dict[str, int],
    n: int,
) -> None:
    assert (await chat(harness))[0] == 200
    other = fail_first([scripted, second_engine], **failure)
    status, text, turns = await chat(harness, stream=stream, n=n)
    assert status == 200 and "error" not in text
    assert len(other.requests) == n
    name = "engine-0" if other is scripted else "engine-1"
    assert [(turn.state, turn.engine) for turn in turns[1:]] == [(TurnState.DONE, name)] * n
    assert all(turn.output_ids for turn in turns)


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_cannot_be_reached_is_no_error(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine, stream: bool
) -> None:
    async with harness.db.write() as session:
        await session.execute(update(Engine).where(Engine.name == "engine-1").values(url="http://127.0.0.1:9"))
    for number in range(6):
        messages = [{"role": "user", "content": f"question {number}"}]
        status, text, turns = await chat(harness, stream=stream, messages=messages)
        assert status == 200 and "error" not in text
    assert {(turn.state, turn.engine) for turn in turns} == {(TurnState.DONE, "engine-0")}


@pytest.mark.parametrize("stream", [False, True])
async def test_when_both_fail_the_turn_fails(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine, stream: bool
) -> None:
    scripted.refuse_status = second_engine.refuse_status = 500
    status, text, [turn] = await chat(harness, stream=stream)
    assert (status, turn.state) == (503, TurnState.FAILED)
    assert "the script says no" not in text + (turn.exclusion_reason or "")


async def test_whole_reply_survives_an_engine_that_dies_while_it_generates(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    assert (await chat(harness))[0] == 200
    other = fail_first([scripted, second_engine], drop_after_tokens=2)
    status, _, turns = await chat(harness, n=2)
    assert status == 200 and len(other.requests) == 2
    assert {turn.state for turn in turns} == {TurnState.DONE}


async def test_stream_that_has_begun_stays_on_its_engine(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    assert (await chat(harness))[0] == 200
    other = fail_first([scripted, second_engine], drop_after_tokens=2)
    status, text, turns = await chat(harness, stream=True)
    assert status == 200 and text.rstrip().endswith("data: [DONE]") and "engine_unavailable" in text
    assert (other.requests, turns[-1].state) == ([], TurnState.FAILED)


async def test_what_an_engine_refuses_is_not_sent_to_another(
    harness: Harness, scripted: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    scripted.refuse_status = second_engine.refuse_status = 400
    status, text, _ = await chat(harness)
    assert status == 400 and "the script says no" in text
