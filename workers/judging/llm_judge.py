"""A language model as a judge, behind any OpenAI-compatible endpoint: grades, grades by outcome, comparisons."""

import asyncio
from collections.abc import Mapping
from itertools import combinations
from typing import TypeVar

from alignment.config.rewards import JudgeSource
from alignment.json_values import as_number, as_object, as_objects
from alignment.signals import judge_prompts
from workers.judging.http_client import EndpointClient, chat_completions_url, decode_answer, time_limit
from workers.judging.request import NO_OPINION, NO_REPLY, Answer, JudgeRequest
from workers.queue.leased_job import AttemptFailed, JobSkipped

MAX_PARALLEL_PAIRS = 4
V = TypeVar("V", bound=str | int)


class AnswerTruncated(AttemptFailed):
    """The answer was cut at the token limit."""


class LLMJudge:
    """The judge of one request."""

    def __init__(self, client: EndpointClient, source: JudgeSource) -> None:
        self._client, self._source = client, source

    async def grade(self, request: JudgeRequest) -> Answer:
        """Grade the reply by the rubric."""
        prompt = judge_prompts.build_grading_prompt(
            request.facts.messages, _get_reply(request), self._source.rubric, self._source.max_chars
        )
        grade, reason = await self._ask(prompt, judge_prompts.GRADE_FORMAT)
        return Answer(judge_prompts.grade_to_reward(grade), reason)

    async def grade_by_outcome(self, request: JudgeRequest, next_message: str) -> Answer:
        """Grade the reply by what the user's next message shows. Raises JobSkipped if it shows nothing."""
        prompt = judge_prompts.build_outcome_prompt(
            request.facts.messages, _get_reply(request), next_message, self._source.max_chars
        )
        grade, reason = await self._ask(prompt, judge_prompts.GRADE_FORMAT)
        if grade == 3:
            raise JobSkipped(NO_OPINION)
        return Answer(judge_prompts.grade_to_reward(grade), reason)

    async def compare(self, request: JudgeRequest) -> dict[str, Answer]:
        """Compare each pair of replies in both orders, if one of the judgements is about one of the two."""
        turn_ids = {judgement.turn_id for judgement in request.judgements}
        pairs = [pair for pair in combinations(request.replies, 2) if turn_ids & {*pair}]
        outcomes: dict[tuple[str, str], int] = {}
        errors: list[AttemptFailed] = []
        semaphore = asyncio.Semaphore(MAX_PARALLEL_PAIRS)

        async def compare_pair(pair: tuple[str, str]) -> None:
            async with semaphore:
                if errors:
                    return
                try:
                    outcomes[pair] = await self._compare_pair(request, *pair)
                except AttemptFailed as error:
                    errors.append(error)

        await asyncio.gather(*(compare_pair(pair) for pair in pairs))
        if errors:
            raise errors[0]
        explanation = f"against {len(request.replies) - 1} other replies"
        scores = judge_prompts.mean_results(outcomes)
        return {id: Answer(value, explanation) for id, value in scores.items() if id in turn_ids}

    async def _compare_pair(self, request: JudgeRequest, first_id: str, second_id: str) -> int:
        """Return 1 if the first reply is better, -1 if the second is, 0 for a tie. Equal replies need no judge."""
        a, b = request.replies[first_id], request.replies[second_id]
        limit = self._source.max_chars
        texts = [judge_prompts.format_message({**reply, "role": "reply"}, limit) for reply in (a, b)]
        if texts[0] == texts[1]:
            return 0
        answers: list[judge_prompts.Better] = []
        for first, second in ((a, b), (b, a)):
            prompt = judge_prompts.build_comparison_prompt(
                request.facts.messages, first, second, self._source.rubric, limit
            )
            answer, _ = await self._ask(prompt, judge_prompts.COMPARISON_FORMAT)
            answers.append(answer)
        return judge_prompts.comparison_result(*answers)

    async def _ask(self, messages: list[dict[str, str]], form: judge_prompts.AnswerFormat[V]) -> tuple[V, str]:
        """Return the value of the form's field and the reason. Raises AttemptFailed."""
        async with time_limit(self._source.timeout_seconds):
            try:
                content = await self._complete(messages, form.schema())
            except AnswerTruncated:  # some models find no end to their reasons
                content = await self._complete(messages, form.schema(reason=False))
        answer = judge_prompts.parse_answer(content, form)
        if answer is None:
            raise AttemptFailed(f"its answer has no JSON with '{form.field}'{self._client.quote(content)}")
        return answer

    async def _complete(self, messages: list[dict[str, str]], schema: Mapping[str, object]) -> str:
        """Return the text of the judge's answer. Where an endpoint refuses one set of parameters, try a simpler one."""
        content, url = b"", chat_completions_url(self._source.url)
        max_tokens = self._source.max_tokens
        for parameters in (
            {"max_tokens": max_tokens, "temperature": 0.0, "response_format": schema},
            {"max_completion_tokens": max_tokens, "response_format": schema},  # for reasoning models
            {"max_tokens": max_tokens},  # JSON is then read from text
        ):
            body = {"model": self._source.model, "messages": messages, "stream": False, **parameters}
            status, content = await self._client.post_json(url, body)
            if status not in (400, 422):
                return self._parse_completion(status, content)
        answer = self._client.quote(content.decode("utf-8", "replace"))
        raise AttemptFailed(f"it refused every form of the request{answer}")

    def _parse_completion(self, status: int, content: bytes) -> str:
        answer = decode_answer(status, content)
        try:
            body = as_object(answer)
            usage = as_object(body.get("usage") or {})
            self._client.usage.tokens += int(as_number(usage.get("total_tokens") or 0))
            choice = as_objects(body["choices"])[0]
            text = as_object(choice["message"])["content"]
        except (KeyError, IndexError, ValueError) as error:
            raise AttemptFailed("its answer is not a chat completion") from error
        if not isinstance(text, str):
            raise AttemptFailed("its answer has no text")
        if choice.get("finish_reason") == "length":
            raise AnswerTruncated(f"its answer was cut at max_tokens ({self._source.max_tokens})")
        return text


def _get_reply(request: JudgeRequest) -> Mapping[str, object]:
    """Raises JobSkipped for a turn without a reply."""
    reply = request.facts.reply
    if reply is None or not (reply.get("content") or reply.get("tool_calls")):
        raise JobSkipped(NO_REPLY)
    return reply
