"""JudgeRequest → answers: run a rule, read the next message, ask a judge or call an HTTP service."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx2

from alignment.config.rewards import HTTPSource, JudgeSource, NextTurnSource, RuleSource, SourceConfig
from alignment.signals import next_turn
from alignment.signals.rules import NeedsNextMessage, load_rule
from app.core.settings import Settings
from workers.judging.http_client import EndpointClient, decode_answer, find_secret, time_limit
from workers.judging.llm_judge import LLMJudge
from workers.judging.request import NO_NEXT_MESSAGE, NO_OPINION, Answer, JudgeRequest, Usage, message_text, parse_reward
from workers.queue.leased_job import AttemptFailed, JobFailed, JobPostponed, JobSkipped
from workers.queue.run_user_code import UserCodeError, run_user_code

RULE_SECONDS = 10.0
Connect = Callable[[], EndpointClient]
Answers = Mapping[str, Answer]  # by turn


async def get_answers(request: JudgeRequest, http: httpx2.AsyncClient, settings: Settings, usage: Usage) -> Answers:
    """Return the answers by turn; a turn that is missing has no reply to compare.

    Raises JobSkipped, JobFailed, JobPostponed, AttemptFailed, NeedsNextMessage; TypeError for a source of a type that
    is not in ANSWER_BY_TYPE.
    """

    def connect() -> EndpointClient:
        if request.endpoint is None or request.endpoint_refusal is not None:
            raise JobSkipped(request.endpoint_refusal or NO_OPINION)
        key = find_secret(request.endpoint, settings, is_policy_owned=request.is_policy_owned)
        return EndpointClient(http, request.endpoint, key, usage, request.is_policy_owned)

    source = request.source
    if type(source) not in ANSWER_BY_TYPE:
        raise TypeError(f"source '{source.name}': there is no way to ask a source of type '{source.type}'")
    answer = await ANSWER_BY_TYPE[type(source)](request, source, connect)
    return {request.judgements[0].turn_id: answer} if isinstance(answer, Answer) else answer


async def run_rule(request: JudgeRequest, source: RuleSource, connect: Connect) -> Answer:
    """Run the rule in a thread, since it may be slow. Any exception of the rule fails its own judgement only."""

    def run() -> float | None:
        return load_rule(source.function, allow_import=not request.is_policy_owned)(request.facts)

    try:
        value = await run_user_code(run, RULE_SECONDS, noun="rule", reraise=(NeedsNextMessage,))
    except UserCodeError as error:
        raise JobFailed(str(error)) from error
    if value is None:
        raise JobSkipped(NO_OPINION)
    return Answer(parse_reward(value))


async def read_next_turn(request: JudgeRequest, source: NextTurnSource, connect: Connect) -> Answer:
    """Read the user's next message by rules, and by the source's judge where no rule applies."""
    next_message = _last_user_message(request.facts.next_messages)
    if next_message is None:
        raise JobSkipped(NO_NEXT_MESSAGE)
    previous_message = _last_user_message(request.facts.messages)
    if (evidence := next_turn.read_next_message(next_message, previous_message)) is not None:
        return Answer(evidence.value, evidence.rule)
    if not isinstance(request.endpoint, JudgeSource):
        raise JobSkipped(NO_OPINION)
    return await LLMJudge(connect(), request.endpoint).grade_by_outcome(request, next_message)


def _last_user_message(messages: Sequence[Mapping[str, object]]) -> str | None:
    return next((message_text(message) for message in reversed(messages) if message["role"] == "user"), None)


async def ask_judge(request: JudgeRequest, source: JudgeSource, connect: Connect) -> Answer | Answers:
    """Have the reply graded, or the replies compared with each other."""
    judge = LLMJudge(connect(), source)
    if source.compare and request.has_open_reply and request.seconds_left > 0:
        raise JobPostponed(request.poll_seconds)  # a reply to compare with is still being generated
    return await judge.compare(request) if len(request.replies) > 1 else await judge.grade(request)


async def call_service(request: JudgeRequest, source: HTTPSource, connect: Connect) -> Answer:
    """Post the turn to an HTTP service and read its reward."""
    client = connect()
    async with time_limit(source.timeout_seconds):
        status, content = await client.post_json(source.url, {"turn": request.turn_body})
    body = decode_answer(status, content)
    if not isinstance(body, dict) or "reward" not in body:
        raise AttemptFailed('its answer is not an object with a "reward"')
    reason = str(body.get("reason") or "")
    if body["reward"] is None:
        raise JobSkipped(reason or NO_OPINION)
    try:
        return Answer(parse_reward(body["reward"]), reason)
    except JobFailed as error:
        why = "is not a number between -1 and 1" if request.is_policy_owned else str(error)
        raise AttemptFailed(f"its reward {why}") from error


ANSWER_BY_TYPE: dict[type[SourceConfig], Callable[[JudgeRequest, Any, Connect], Awaitable[Answer | Answers]]] = {
    RuleSource: run_rule,
    NextTurnSource: read_next_turn,
    JudgeSource: ask_judge,
    HTTPSource: call_service,
}
