"""JudgeRequest: one question to one reward source, with all that is needed to ask it, read from the database."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import EndpointConfig, JudgeSource, NextTurnSource, RewardsConfig, Source
from alignment.signals.combine_rewards import is_in_share
from alignment.signals.judge_prompts import is_judge_prompt
from alignment.signals.rules import RuleInput
from app.chat.histories import Messages, read_messages
from app.core.database import database_time, now
from app.core.settings import Settings
from app.models import Judgement, Policy, Turn, TurnState, Version
from app.policies import references
from app.projects.service import NO_CONSENT, has_training_consent
from app.training.policy_config import effective_rewards, has_own_sources
from workers.feedback import sample_groups
from workers.queue.leased_job import JobFailed, JobSkipped

MAX_POLLS = 6  # within the window of a source
# Why a judgement is skipped.
OUT_OF_BUDGET = "the hourly budget of the source is spent"
NOT_IN_SHARE = "the turn is not in the share that the source is asked about"
NOT_CONFIGURED = "the policy does not use this source"
DELETED = "the turn is deleted"
JUDGE_PROMPT = "the turn is a judge's own prompt"
NO_OPINION = "the source has no opinion"
NO_REPLY = "there is no reply to judge"
NO_NEXT_MESSAGE = "no user message follows the reply"


@dataclass(frozen=True)
class JudgeRequest:
    """One question to one source. `judgements` holds one, or those of all replies that are compared."""

    judgements: tuple[Judgement, ...]
    source: Source
    endpoint: EndpointConfig | None  # the endpoint to call over HTTP; of next_turn its judge
    endpoint_refusal: str | None  # why the endpoint must not be called
    is_policy_owned: bool  # the rewards are configured by the policy, not by the deployment
    facts: RuleInput
    turn_body: Mapping[str, object]  # the turn as an HTTP service gets it
    replies: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # the replies to compare, by turn
    has_open_reply: bool = False  # a reply to compare with is still being generated
    seconds_left: float = 0.0  # of the window in which waiting is worthwhile

    @property
    def poll_seconds(self) -> float:
        """Return the delay until the source is asked again, while the turn or reply that it needs is missing."""
        return min(self.seconds_left, max(self.source.window_seconds / MAX_POLLS, 1.0))


@dataclass(frozen=True)
class Answer:
    """A source's reward, in [-1, 1]."""

    value: float
    explanation: str = ""


@dataclass
class Usage:
    """What a question costs, whatever its result."""

    requests: int = 0
    tokens: int = 0


def parse_reward(value: object) -> float:
    """Return the value as a reward. Raises JobFailed unless it is a number in [-1, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JobFailed(f"{str(value)[:100]!r} is not a number")
    if not -1 <= value <= 1:
        raise JobFailed(f"{value!r} is not between -1 and 1")
    return float(value)


async def build_request(session: AsyncSession, settings: Settings, judgements: tuple[Judgement, ...]) -> JudgeRequest:
    """Read the turn and its context. Raises JobSkipped where there is nothing to ask."""
    first = judgements[0]
    policy = await session.get_one(Policy, first.policy_id)
    config = effective_rewards(policy, settings)
    source = config.source(first.source)
    if source is None or source.type == "explicit":
        raise JobSkipped(NOT_CONFIGURED)
    turn = await check_turn(session, await session.get(Turn, first.turn_id))
    target = config.source(source.judge or "") if isinstance(source, NextTurnSource) else source
    endpoint = target if isinstance(target, EndpointConfig) else None
    choices = await _read_choices(session, turn) if isinstance(source, JudgeSource) and source.compare else []
    messages = (await read_messages(session, [turn.id])).get(turn.id, [])
    version = await session.get_one(Version, turn.version_id)
    turn_policy = await session.get_one(Policy, turn.policy_id)
    age = 0.0 if turn.finished_at is None else await database_time(session) - turn.finished_at
    seconds_until_complete = await sample_groups.seconds_until_complete(session, turn.completion_id)
    return JudgeRequest(
        judgements=judgements,
        source=source,
        endpoint=endpoint,
        endpoint_refusal=await _find_refusal(session, endpoint, config, turn, policy.id) if endpoint else None,
        is_policy_owned=has_own_sources(policy),
        facts=_build_facts(turn, messages, await _read_next_messages(session, turn, messages), settings),
        turn_body=_build_turn_body(turn, messages, references.version_name(turn_policy, version)),
        replies={choice.id: choice.reply for choice in choices if choice.reply is not None},
        has_open_reply=any(choice.state == TurnState.OPEN for choice in choices),
        seconds_left=max(source.window_seconds - age, seconds_until_complete),
    )


async def check_turn(session: AsyncSession, turn: Turn | None) -> Turn:
    """Return the turn. Raises JobSkipped if no source may be asked about it."""
    if turn is None or turn.deleted_at is not None:
        raise JobSkipped(DELETED)
    if not await has_training_consent(session, turn):
        raise JobSkipped(NO_CONSENT)
    if is_judge_prompt((await read_messages(session, [turn.id])).get(turn.id, [])):
        raise JobSkipped(JUDGE_PROMPT)
    return turn


async def _find_refusal(
    session: AsyncSession, endpoint: EndpointConfig, config: RewardsConfig, turn: Turn, policy_id: str
) -> str | None:
    """Return why the endpoint must not be called for this turn, None if it may be called.

    The hourly budget counts the requests of finished judgements, those made for next_turn included.
    """
    # A shadow reply is judged where its chat is.
    if not is_in_share(turn.shadow_of_id or turn.completion_id or turn.id, endpoint.name, endpoint.share):
        return NOT_IN_SHARE
    names = [endpoint.name]
    names += [one.name for one in config.sources if isinstance(one, NextTurnSource) and one.judge == endpoint.name]
    num_requests = func.coalesce(Judgement.details["requests"].as_integer(), 0)
    spent = await session.scalar(
        select(func.sum(num_requests)).where(
            Judgement.policy_id == policy_id, Judgement.source.in_(names), Judgement.settled_at > now() - 3600
        )
    )
    return OUT_OF_BUDGET if (spent or 0) >= endpoint.per_hour else None


async def _read_next_messages(session: AsyncSession, turn: Turn, messages: Messages) -> Messages:
    """Return the messages of users and tools straight after the reply: the end of the first prompt that continues it.

    `messages` are the turn's own prompt. A prompt equal to them is a client's retry. A prompt that ends in another
    reply is no evidence about this one. Both give an empty list.
    """
    has_consent = or_(Turn.exclusion_reason.is_(None), Turn.exclusion_reason != NO_CONSENT)
    children = select(Turn).where(Turn.parent_id == turn.id, Turn.deleted_at.is_(None), has_consent)
    child = await session.scalar(children.order_by(Turn.created_at, Turn.id).limit(1))
    if child is None:
        return []
    child_messages = (await read_messages(session, [child.id])).get(child.id, [])
    if child_messages == messages:
        return []
    replies = [index for index, message in enumerate(child_messages) if message["role"] == "assistant"]
    if replies and message_text(child_messages[replies[-1]]) != message_text(turn.reply or {}):
        return []
    next_messages = child_messages[replies[-1] + 1 :] if replies else child_messages
    return [message for message in next_messages if message["role"] in ("user", "tool")]


def message_text(message: Mapping[str, object]) -> str:
    """Return the content of a message without surrounding white space."""
    return str(message.get("content") or "").strip()


async def _read_choices(session: AsyncSession, turn: Turn) -> list[Turn]:
    """Return all replies of the completion; for a shadow reply, itself and the chat reply that it shadows."""
    is_choice = or_(Turn.completion_id == turn.completion_id, Turn.id == turn.shadow_of_id)
    query = select(Turn).where(is_choice, Turn.deleted_at.is_(None)).order_by(Turn.choice_index, Turn.id)
    return list(await session.scalars(query))


def _build_facts(turn: Turn, messages: Messages, next_messages: Messages, settings: Settings) -> RuleInput:
    return RuleInput(
        messages=tuple(messages),
        reply=turn.reply,
        finish_reason=turn.finish_reason,
        state=turn.state,
        num_output_tokens=turn.num_output_tokens,
        next_messages=tuple(next_messages),
        metadata=turn.request_metadata or {},
        length_range=settings.observability.length_range,
    )


def _build_turn_body(turn: Turn, messages: Messages, model: str) -> dict[str, object]:
    body = {name: getattr(turn, name) for name in ("id", "conversation_id", "reply", "finish_reason")}
    return body | {"messages": messages, "model": model, "metadata": turn.request_metadata or {}}
