"""JudgeRequest → answers: call the right kind of source."""

from typing import Any

import httpx2

from alignment.config.rewards import EndpointConfig, HTTPSource, JudgeSource, NextTurnSource, RuleSource
from alignment.signals import next_turn
from alignment.signals.rules import NeedsNextMessage, load_rule
from app.core.settings import Settings
from workers.judging.request import NO_NEXT_MESSAGE, NO_OPINION, Answer, JudgeRequest, Usage, parse_reward
from workers.judging.sources.http_client import decode_json, find_secret, post_json, time_limit
from workers.judging.sources.llm_judge import LLMJudge
from workers.queue.leased_job import AttemptFailed, JobFailed, JobPostponed, JobSkipped
from workers.queue.run_user_code import UserCodeError, run_user_code

RULE_SECONDS = 10.0


async def get_answers(
    request: JudgeRequest, http: httpx2.AsyncClient, settings: Settings, usage: Usage
) -> dict[str, Answer]:
    """Return the answers by turn; a turn that is missing has no reply to compare.

    Raises JobSkipped, JobFailed, JobPostponed, AttemptFailed, NeedsNextMessage.
    """
    source = request.source
    if isinstance(source, RuleSource):
        answer = await run_rule(request, source)
    elif isinstance(source, NextTurnSource):
        answer = await read_next_turn(request, http, settings, usage)
    elif isinstance(source, JudgeSource):
        judge = _build_judge(request, http, settings, usage)
        if source.compare and request.has_open_reply and request.seconds_left > 0:
            raise JobPostponed(request.poll_seconds)  # a reply to compare with is still being generated
        if len(request.replies) > 1:
            return await judge.compare(request)
        answer = await judge.grade(request)
    else:
        assert isinstance(source, HTTPSource)
        answer = await call_service(request, source, http, settings, usage)
    return {request.leases[0].turn_id: answer}


async def run_rule(request: JudgeRequest, source: RuleSource) -> Answer:
    """Run the rule in a thread, since it may be slow. Any exception of the rule fails its own judgement only."""

    def run() -> Any:
        return load_rule(source.function, allow_import=not request.is_policy_owned)(request.facts)

    try:
        value = await run_user_code(run, RULE_SECONDS, noun="rule", reraise=(NeedsNextMessage,))
    except UserCodeError as error:
        raise JobFailed(str(error)) from error
    if value is None:
        raise JobSkipped(NO_OPINION)
    return Answer(parse_reward(value))


async def read_next_turn(request: JudgeRequest, http: httpx2.AsyncClient, settings: Settings, usage: Usage) -> Answer:
    """Read the user's next message by rules, and by the source's judge where no rule applies."""
    if request.next_message is None:
        raise JobSkipped(NO_NEXT_MESSAGE)
    if (evidence := next_turn.read_next_message(request.next_message, request.previous_message)) is not None:
        return Answer(evidence.value, evidence.rule)
    if request.endpoint is None:
        raise JobSkipped(NO_OPINION)
    return await _build_judge(request, http, settings, usage).grade_by_outcome(request)


async def call_service(
    request: JudgeRequest, source: HTTPSource, http: httpx2.AsyncClient, settings: Settings, usage: Usage
) -> Answer:
    """Post the turn to an HTTP service and read its reward."""
    key = _authorize(request, source, settings)
    usage.requests += 1
    async with time_limit(source.timeout_seconds):
        status, content = await post_json(
            http, source.url, {"turn": request.turn_body}, key, is_policy_owned=request.is_policy_owned
        )
    if status != 200:
        raise AttemptFailed(f"it answered {status}")
    body = decode_json(content)
    if not isinstance(body, dict) or "reward" not in body:
        raise AttemptFailed('its answer is not an object with a "reward"')
    reason = str(body.get("reason") or "")
    if body["reward"] is None:
        raise JobSkipped(reason or NO_OPINION)
    try:
        return Answer(parse_reward(body["reward"]), reason)
    except JobFailed as error:
        if request.is_policy_owned:
            raise AttemptFailed("its reward is not a number between -1 and 1") from error
        raise AttemptFailed(f"its reward {error}") from error


def _build_judge(request: JudgeRequest, http: httpx2.AsyncClient, settings: Settings, usage: Usage) -> LLMJudge:
    key = _authorize(request, request.judge, settings)
    return LLMJudge(http, request.judge, key, usage, is_policy_owned=request.is_policy_owned)


def _authorize(request: JudgeRequest, endpoint: EndpointConfig, settings: Settings) -> str | None:
    """Return the key for the endpoint. Raises JobSkipped when it must not be called."""
    if request.endpoint_refusal is not None:
        raise JobSkipped(request.endpoint_refusal)
    return find_secret(endpoint, settings, is_policy_owned=request.is_policy_owned)
