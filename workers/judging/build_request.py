"""Judgements → Cases: what is on record about a turn, read before anything is asked."""

from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import EndpointConfig, JudgeSource, NextTurnSource, RewardsConfig, Source
from alignment.signals.judge_prompts import is_question
from alignment.signals.rules import Facts, asked_about
from app.core.database import now
from app.core.settings import Settings
from app.models import Judgement, Policy, Turn, TurnState, Version
from app.policies import service
from app.projects.consent import NO_CONSENT
from app.training.policy_rewards import rewards_of
from workers.feedback import consent, group_samples
from workers.judging.request import (
    DELETED,
    NOT_CONFIGURED,
    NOT_IN_SHARE,
    OUT_OF_BUDGET,
    OWN_QUESTION,
    Claim,
    JudgeRequest,
    Silent,
)


async def brief(session: AsyncSession, settings: Settings, claims: tuple[Claim, ...]) -> JudgeRequest:
    """Raises Silent where there is nothing to ask."""
    policy = await session.get_one(Policy, claims[0].policy_id)
    config = rewards_of(policy, settings)
    source = config.source(claims[0].source)
    if source is None or source.type == "explicit":
        raise Silent(NOT_CONFIGURED)
    turn = await session.get(Turn, claims[0].turn_id)
    await _may_be_judged(session, turn)
    assert turn is not None
    endpoint = _endpoint(source, config)
    after = await _after(session, turn)
    beside = await _beside(session, turn) if isinstance(source, JudgeSource) and source.compare else []
    version = await session.get_one(Version, turn.version_id)
    spoke = await session.get_one(Policy, turn.policy_id)
    age = await session.scalar(select(now() - Turn.finished_at).where(Turn.id == turn.id)) or 0.0
    return JudgeRequest(
        claims=claims,
        source=source,
        endpoint=endpoint,
        closed=await _closed(session, endpoint, config, claims[0]) if endpoint else None,
        own=policy.rewards is not None,
        facts=_facts(turn, after, settings),
        about=_about(turn, service.label(spoke, version)),
        before=_last_user(turn.messages),
        next_message=_last_user(after),
        replies={one.id: one.reply for one in beside if one.reply is not None},
        waits=any(one.state == TurnState.OPEN for one in beside),
        window_left=max(source.window_seconds - age, await group_samples.patience(session, turn.completion_id)),
    )


async def _may_be_judged(session: AsyncSession, turn: Turn | None) -> None:
    if turn is None or turn.deleted_at is not None:
        raise Silent(DELETED)
    if not await consent.given(session, turn):
        raise Silent(NO_CONSENT)
    if is_question(turn.messages):
        raise Silent(OWN_QUESTION)


def _endpoint(source: Source, config: RewardsConfig) -> EndpointConfig | None:
    if isinstance(source, NextTurnSource):
        judge = config.source(source.judge) if source.judge is not None else None
        return judge if isinstance(judge, JudgeSource) else None
    return source if isinstance(source, EndpointConfig) else None


async def _closed(session: AsyncSession, endpoint: EndpointConfig, config: RewardsConfig, claim: Claim) -> str | None:
    """The budget is what it was asked within the hour, for itself and for next_turn, as far as that is settled."""
    drawn = func.coalesce(Turn.shadow_of_id, Turn.completion_id)  # a shadow deployment is asked about where its chat is
    completion_id = await session.scalar(select(drawn).where(Turn.id == claim.turn_id))
    if not asked_about(completion_id or claim.turn_id, endpoint.name, endpoint.share):
        return NOT_IN_SHARE
    names = [endpoint.name]
    names += [one.name for one in config.sources if isinstance(one, NextTurnSource) and one.judge == endpoint.name]
    asks = func.coalesce(Judgement.details["asks"].as_integer(), 0)
    spent = await session.scalar(
        select(func.coalesce(func.sum(asks), 0)).where(
            Judgement.policy_id == claim.policy_id,
            Judgement.source.in_(names),
            Judgement.settled_at > now() - 3600,
        )
    )
    return OUT_OF_BUDGET if (spent or 0) >= endpoint.per_hour else None


async def _after(session: AsyncSession, turn: Turn) -> list[dict[str, Any]]:
    """What was said straight after the reply, by users and tools: the end of the first prompt that followed it.

    A prompt that is the same as the turn's own is a client's retry, and one that ends in another reply than this one
    says nothing of this one.
    """
    child = (
        await session.scalars(
            select(Turn)
            .where(
                Turn.parent_id == turn.id,
                Turn.deleted_at.is_(None),
                or_(Turn.exclusion_reason.is_(None), Turn.exclusion_reason != NO_CONSENT),
            )
            .order_by(Turn.created_at, Turn.id)
            .limit(1)
        )
    ).one_or_none()
    if child is None or child.messages == turn.messages:
        return []
    replies = [at for at, message in enumerate(child.messages) if message["role"] == "assistant"]
    if replies and _words(child.messages[replies[-1]]) != _words(turn.reply or {}):
        return []
    after = child.messages[replies[-1] + 1 :] if replies else child.messages
    return [message for message in after if message["role"] in ("user", "tool")]


def _words(message: dict[str, Any]) -> str:
    return str(message.get("content") or "").strip()


def _last_user(messages: list[dict[str, Any]]) -> str | None:
    return next((_words(message) for message in reversed(messages) if message["role"] == "user"), None)


async def _beside(session: AsyncSession, turn: Turn) -> list[Turn]:
    """All replies of the completion, its own included; a shadow's own, and that of the chat it stands beside."""
    mine = or_(Turn.completion_id == turn.completion_id, Turn.id == turn.shadow_of_id)
    rows = await session.scalars(
        select(Turn).where(mine, Turn.deleted_at.is_(None)).order_by(Turn.choice_index, Turn.id)
    )
    return list(rows)


def _facts(turn: Turn, after: list[dict[str, Any]], settings: Settings) -> Facts:
    return Facts(
        messages=tuple(turn.messages),
        reply=turn.reply,
        finish_reason=turn.finish_reason,
        state=turn.state,
        num_output_tokens=turn.num_output_tokens,
        next_messages=tuple(after),
        details=turn.request_metadata or {},
        length_range=settings.length_range,
    )


def _about(turn: Turn, label: str) -> dict[str, Any]:
    return {
        "id": turn.id,
        "conversation_id": turn.conversation_id,
        "messages": turn.messages,
        "reply": turn.reply,
        "finish_reason": turn.finish_reason,
        "model": label,
        "metadata": turn.request_metadata or {},
    }
