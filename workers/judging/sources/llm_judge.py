"""A language model as a judge, behind any OpenAI-compatible endpoint: grades, grades by outcome, comparisons."""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx2

from alignment.config.rewards import JudgeSource
from alignment.signals import judge_prompts
from workers.judging.request import NO_REPLY, NOTHING_TO_SAY, Answer, JudgeRequest, Meter, Silent, Unanswered
from workers.judging.sources.http_client import chat_url, decoded, patience, post, quoted

PAIRS_AT_ONCE = 4


class Cut(Unanswered):
    """There was no room for the whole answer."""


class Model:
    """One case's judge. `meter` counts what it is asked."""

    def __init__(
        self, http: httpx2.AsyncClient, judge: JudgeSource, key: str | None, meter: Meter, *, own: bool
    ) -> None:
        self._http, self._judge, self._key, self._meter, self._own = http, judge, key, meter, own

    async def grade(self, case: JudgeRequest) -> Answer:
        messages, reply = case.facts.messages, _reply(case)
        asked = judge_prompts.grading(messages, reply, self._judge.rubric, self._judge.max_chars)
        grade, reason = await self._put(asked, judge_prompts.GRADE)
        return Answer(judge_prompts.of_grade(grade), reason)

    async def grade_by_outcome(self, case: JudgeRequest) -> Answer:
        assert case.next_message is not None
        asked = judge_prompts.grading_by_outcome(
            case.facts.messages, _reply(case), case.next_message, self._judge.max_chars
        )
        grade, reason = await self._put(asked, judge_prompts.GRADE)
        if grade == 3:
            raise Silent(NOTHING_TO_SAY)
        return Answer(judge_prompts.of_grade(grade), reason)

    async def compare(self, case: JudgeRequest) -> dict[str, Answer]:
        """Each pair of replies in both orders, as far as it bears on a reply that is asked about."""
        asked_about = {claim.turn_id for claim in case.claims}
        wanted = [pair for pair in judge_prompts.pairs([*case.replies]) if asked_about & {*pair}]
        outcomes: dict[tuple[str, str], int] = {}
        trouble: list[Unanswered] = []
        gate = asyncio.Semaphore(PAIRS_AT_ONCE)

        async def decide(pair: tuple[str, str]) -> None:
            async with gate:
                if trouble:
                    return
                try:
                    outcomes[pair] = await self._outcome(case, *pair)
                except Unanswered as error:
                    trouble.append(error)

        await asyncio.gather(*(decide(pair) for pair in wanted))
        if trouble:
            raise trouble[0]
        told = f"against {len(case.replies) - 1} other replies"
        return {id: Answer(value, told) for id, value in judge_prompts.standing(outcomes).items() if id in asked_about}

    async def _outcome(self, case: JudgeRequest, one: str, other: str) -> int:
        a, b = case.replies[one], case.replies[other]
        limit = self._judge.max_chars
        if judge_prompts.told({**a, "role": "reply"}, limit) == judge_prompts.told({**b, "role": "reply"}, limit):
            return 0
        heard = []
        for first, second in ((a, b), (b, a)):
            asked = judge_prompts.comparing(case.facts.messages, first, second, self._judge.rubric, limit)
            better, _ = await self._put(asked, judge_prompts.BETTER)
            heard.append(better)
        return judge_prompts.outcome(*heard)

    async def _put(self, messages: list[dict[str, str]], form: judge_prompts.Form) -> tuple[Any, str]:
        async with patience(self._judge.timeout_seconds):
            try:
                content = await self._say(messages, form.schema())
            except Cut:  # some find no end to their reasons
                content = await self._say(messages, form.schema(reason=False))
        answer = judge_prompts.answered(content, form)
        if answer is None:
            raise Unanswered(f"its answer has no JSON with '{form.field}'{quoted(content, own=self._own)}")
        return answer

    async def _say(self, messages: list[dict[str, str]], schema: Mapping[str, Any]) -> str:
        """Endpoints differ in what they take: a form that one refuses is followed by a plainer one."""
        told = b""
        for form in _forms(self._judge.max_tokens, schema):
            self._meter.asks += 1
            body = {"model": self._judge.model, "messages": messages, "stream": False, **form}
            status, told = await post(self._http, chat_url(self._judge.url), body, self._key, own=self._own)
            if status not in (400, 422):
                return self._read(status, told)
        raise Unanswered(
            f"it refused every form of the question{quoted(told.decode('utf-8', 'replace'), own=self._own)}"
        )

    def _read(self, status: int, content: bytes) -> str:
        if status != 200:
            raise Unanswered(f"it answered {status}")
        answer = decoded(content)
        try:
            usage = answer.get("usage") or {}
            self._meter.tokens += int(usage.get("total_tokens") or 0)
            choice = answer["choices"][0]
            text = choice["message"]["content"]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Unanswered("its answer is no chat completion") from error
        if not isinstance(text, str):
            raise Unanswered("its answer has no text")
        if choice.get("finish_reason") == "length":
            raise Cut(f"its answer was cut at max_tokens ({self._judge.max_tokens})")
        return text


def _reply(case: JudgeRequest) -> Mapping[str, Any]:
    reply = case.facts.reply
    if reply is None or not (reply.get("content") or reply.get("tool_calls")):
        raise Silent(NO_REPLY)
    return reply


def _forms(max_tokens: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """As it should be; as models that reason take it; and plainly, the JSON then being read out of the text."""
    return (
        {"max_tokens": max_tokens, "temperature": 0.0, "response_format": schema},
        {"max_completion_tokens": max_tokens, "response_format": schema},
        {"max_tokens": max_tokens},
    )
