"""Cases → Answers: each sort of source in its own way."""

from typing import Any

import httpx2

from alignment.config.rewards import EndpointConfig, HTTPSource, JudgeSource, NextTurnSource, RuleSource
from alignment.signals import next_turn
from alignment.signals.rules import NotYet, find
from app.core.settings import Settings
from workers.judging.request import (
    NO_NEXT_MESSAGE,
    NOTHING_TO_SAY,
    Answer,
    Broken,
    JudgeRequest,
    Meter,
    Silent,
    Unanswered,
    number,
)
from workers.judging.sources.http_client import decoded, patience, post, secret
from workers.judging.sources.llm_judge import Model
from workers.queue import run_user_code

RULE_SECONDS = 10.0


async def ask(case: JudgeRequest, http: httpx2.AsyncClient, settings: Settings, meter: Meter) -> dict[str, Answer]:
    """By turn; one that is missing has nothing to be compared with. Raises Silent, Unanswered, Broken, NotYet."""
    source = case.source
    if isinstance(source, RuleSource):
        answer = await run_rule(case, source)
    elif isinstance(source, NextTurnSource):
        answer = await read_next_turn(case, http, settings, meter)
    elif isinstance(source, JudgeSource):
        model = _model(case, http, settings, meter)
        if source.compare and case.waits and case.window_left > 0:
            raise NotYet("a reply to compare with is still being made")
        if len(case.replies) > 1:
            return await model.compare(case)
        answer = await model.grade(case)
    else:
        assert isinstance(source, HTTPSource)
        answer = await call_service(case, source, http, settings, meter)
    return {case.claims[0].turn_id: answer}


async def run_rule(case: JudgeRequest, source: RuleSource) -> Answer:
    """In a thread: it may take its time, and whatever it raises is its own failure."""

    def run() -> Any:
        return find(source.function, dotted=not case.own)(case.facts)

    try:
        value = await run_user_code.run(run, RULE_SECONDS, noun="rule", passes=(NotYet,))
    except run_user_code.Failed as error:
        raise Broken(str(error)) from error
    if value is None:
        raise Silent(NOTHING_TO_SAY)
    return Answer(number(value))


async def read_next_turn(case: JudgeRequest, http: httpx2.AsyncClient, settings: Settings, meter: Meter) -> Answer:
    if case.next_message is None:
        raise Silent(NO_NEXT_MESSAGE)
    if (said := next_turn.read(case.next_message, case.before)) is not None:
        return Answer(said.value, said.rule)
    if case.endpoint is None:
        raise Silent(NOTHING_TO_SAY)
    return await _model(case, http, settings, meter).grade_by_outcome(case)


def _model(case: JudgeRequest, http: httpx2.AsyncClient, settings: Settings, meter: Meter) -> Model:
    return Model(http, case.judge, _admitted(case, case.judge, settings), meter, own=case.own)


async def call_service(
    case: JudgeRequest, source: HTTPSource, http: httpx2.AsyncClient, settings: Settings, meter: Meter
) -> Answer:
    key = _admitted(case, source, settings)
    meter.asks += 1
    async with patience(source.timeout_seconds):
        status, content = await post(http, source.url, {"turn": case.about}, key, own=case.own)
    if status != 200:
        raise Unanswered(f"it answered {status}")
    told = decoded(content)
    if not isinstance(told, dict) or "reward" not in told:
        raise Unanswered('its answer is no object with a "reward"')
    reason = str(told.get("reason") or "")
    if told["reward"] is None:
        raise Silent(reason or NOTHING_TO_SAY)
    try:
        return Answer(number(told["reward"]), reason)
    except Broken as error:
        raise Unanswered("its reward is no number from -1 to 1" if case.own else f"its reward {error}") from error


def _admitted(case: JudgeRequest, endpoint: EndpointConfig, settings: Settings) -> str | None:
    """The key to ask with, if it may be asked at all."""
    if case.closed is not None:
        raise Silent(case.closed)
    return secret(endpoint, settings, own=case.own)
