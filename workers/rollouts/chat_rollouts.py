"""Finished chats → rollouts of the same prompts: group samples by the same version, shadow replies by a new one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rollouts import GroupSamplingConfig
from alignment.release.shadow import SHADOW, ShadowConfig
from alignment.signals.combine_rewards import group_sampling_disabled_reason, is_in_share, needs_group_samples
from alignment.signals.judge_prompts import is_judge_prompt
from app.chat.histories import read_messages
from app.chat.new_turn import NewTurn
from app.core.database import database_time, now
from app.core.settings import Settings
from app.deployments import comparison
from app.inference.request import Sampling
from app.models import (
    Deployment,
    LearningMode,
    Origin,
    Policy,
    PolicyState,
    Sample,
    SampleState,
    Turn,
    TurnState,
    Version,
    VersionState,
    new_id,
)
from app.projects.service import NO_CONSENT
from app.training.policy_config import effective_rewards, effective_rollouts
from app.training.rollouts import count_recent_tokens
from workers.rollouts.rollout_queue import create_rollouts


async def create_group_samples(
    session: AsyncSession, turns: Sequence[Any], policies: Sequence[Policy], settings: Settings
) -> None:
    """Create the group samples of finished turns. Each turn is considered once; `turns` are rows of turn columns."""
    for policy in policies:
        config, rewards = effective_rollouts(policy, settings).group_sampling, effective_rewards(policy, settings)
        is_trained = policy.mode != LearningMode.HALTED and policy.state == PolicyState.ACTIVE
        if not is_trained or group_sampling_disabled_reason(config, rewards) is not None:
            continue
        ids = [
            turn.id
            for turn in await _recent_replies(session, turns, policy, config.window_seconds)
            if turn.exclusion_reason is None and needs_group_samples(turn.completion_id, config, rewards.sources)
        ]
        if not ids:
            continue
        choices = await session.execute(
            select(Turn.completion_id, func.count()).where(Turn.completion_id.in_(ids)).group_by(Turn.completion_id)
        )
        num_choices = {completion_id: count for completion_id, count in choices}
        plan = partial(plan_group_samples, num_choices=num_choices, size=config.extra_replies + 1)
        is_usable = Version.state != VersionState.REJECTED
        created_by = policy.id, Origin.GROUP_SAMPLE, config, settings
        planned = await _create_within_budget(session, ids, is_usable, *created_by, plan)
        if planned:
            await _delay_samples(session, {turn.completion_id for turn in planned}, config.window_seconds)


async def create_shadow_replies(
    session: AsyncSession, turns: Sequence[Any], policies: Sequence[Policy], settings: Settings
) -> None:
    """Create the shadow replies of finished turns in the share. Each turn is considered once."""
    policies_by_id = {policy.id: policy for policy in policies}
    rows = await session.execute(
        select(Version, Deployment.version_id)
        .join(Deployment, Deployment.policy_id == Version.policy_id)
        .where(Version.policy_id.in_(policies_by_id), Version.state == VersionState.SHADOW)
    )
    for version, live_version_id in list(rows):
        policy = policies_by_id[version.policy_id]
        config = comparison.active_shadow_config(policy, settings)
        ids = [
            turn.id
            for turn in await _recent_replies(session, turns, policy, config.window_seconds)
            if turn.exclusion_reason != NO_CONSENT and is_in_share(turn.completion_id, SHADOW, config.share)
        ]
        if ids:
            plan, is_live = partial(plan_shadow_reply, version=version), Turn.version_id == live_version_id
            await _create_within_budget(session, ids, is_live, policy.id, Origin.SHADOW, config, settings, plan)


async def _recent_replies(
    session: AsyncSession, turns: Sequence[Any], policy: Policy, window_seconds: float
) -> list[Any]:
    """Return the policy's chat turns that have finished within the window, one for each completion."""
    since = await database_time(session) - window_seconds
    return [
        turn
        for turn in turns
        if (turn.policy_id, turn.origin, turn.choice_index) == (policy.id, Origin.CHAT, 0)
        and (turn.state, turn.deleted_at) == (TurnState.DONE, None)
        and turn.finished_at > since
    ]


async def _create_within_budget(
    session: AsyncSession,
    turn_ids: Sequence[str],
    condition: ColumnElement[bool],
    policy_id: str,
    origin: Origin,
    config: GroupSamplingConfig | ShadowConfig,
    settings: Settings,
    plan: Callable[[Turn], list[NewTurn]],
) -> list[NewTurn]:
    """Create the rollouts that `plan` returns for each turn, and return their turns.

    The hourly budget is spent on the estimate that they are as long as the chat's reply.
    """
    budget = config.tokens_per_hour - await count_recent_tokens(session, policy_id, origin)
    turns = await session.scalars(
        select(Turn)
        .join(Version, Version.id == Turn.version_id)
        .where(Turn.id.in_(turn_ids), condition)
        .order_by(Turn.finished_at, Turn.id)
    )
    rows = turns.all()
    messages = await read_messages(session, [turn.id for turn in rows])
    planned: list[NewTurn] = []
    for turn in rows:
        if turn.own_prompt_ids is None or is_judge_prompt(messages.get(turn.id, [])):
            continue
        rollouts = plan(turn)
        budget -= len(rollouts) * len(turn.output_ids or ())
        if budget < 0:
            break
        if not settings.database.share_histories:
            prompt = messages[turn.id]
            rollouts = [
                replace(rollout, history_id=None, num_history_messages=0, own_messages=prompt) for rollout in rollouts
            ]
        planned += rollouts
    if planned:
        await create_rollouts(session, planned, expires_in=config.window_seconds)
    return planned


async def _delay_samples(session: AsyncSession, completion_ids: Collection[str], seconds: float) -> None:
    """Make existing samples of the chats wait for their group samples. Later samples find their group by themselves."""
    turn_ids = select(Turn.id).where(Turn.completion_id.in_(completion_ids))
    ready_at = now() + seconds
    await session.execute(
        update(Sample)
        .where(Sample.turn_id.in_(turn_ids), Sample.state == SampleState.OPEN, Sample.ready_at < ready_at)
        .values(ready_at=ready_at)
    )


def plan_group_samples(turn: Turn, num_choices: Mapping[str, int], size: int) -> list[NewTurn]:
    """Return the replies that the turn's group lacks. They are no part of the conversation."""
    sampling = Sampling.from_body(turn.sampling)
    rollouts = []
    for choice_index in range(num_choices[turn.completion_id], size):
        # The same seed would give the same reply.
        seed = None if sampling.seed is None else sampling.seed + choice_index
        reply = _plan_reply(turn, Origin.GROUP_SAMPLE)
        own_sampling = replace(sampling, seed=seed).body()
        rollouts.append(
            replace(reply, completion_id=turn.completion_id, choice_index=choice_index, sampling=own_sampling)
        )
    return rollouts


def plan_shadow_reply(turn: Turn, version: Version) -> list[NewTurn]:
    """Return the version's reply.

    It is a completion of its own: no group sample, and no sample waits for it.
    """
    return [replace(_plan_reply(turn, Origin.SHADOW), version_id=version.id, shadow_of_id=turn.id)]


def _plan_reply(turn: Turn, origin: Origin) -> NewTurn:
    """Return another reply to the turn's prompt, as a completion of its own."""
    id = new_id("chatcmpl")
    return NewTurn(
        id=id,
        completion_id=id,
        choice_index=0,
        project_id=turn.project_id,
        policy_id=turn.policy_id,
        version_id=turn.version_id,
        origin=origin,
        engine=turn.engine,
        own_messages=[],
        history_id=turn.id,
        num_history_messages=turn.num_messages,
        sampling=turn.sampling,
        request_params=turn.request_params,
        request_metadata=turn.request_metadata,
        key_id=turn.key_id,
        end_user=turn.end_user,
        conversation_id=turn.conversation_id,
    )
