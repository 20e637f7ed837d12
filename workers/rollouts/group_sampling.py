"""Finished turns → rollouts: planned group samples, more replies to the same prompt."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rollouts import GroupSamplingConfig
from alignment.signals.eligibility import group_sampling_disabled_reason, needs_group_samples
from alignment.signals.judge_prompts import is_judge_prompt
from app.core.database import database_time, now
from app.core.settings import Settings
from app.inference.request import Sampling
from app.models import (
    LearningMode,
    Origin,
    Policy,
    Sample,
    SampleState,
    Turn,
    TurnState,
    Version,
    VersionState,
    new_id,
)
from app.training.reward_config import effective_rewards
from app.training.rollouts import repository
from app.training.rollouts.config import effective_rollouts
from workers.rollouts.rollout_queue import create_rollouts

COPIED_COLUMNS = (
    *("project_id", "policy_id", "version_id", "key_id", "end_user", "conversation_id"),
    *("engine", "messages", "request_params", "request_metadata"),
)


async def create_group_samples(
    session: AsyncSession, turns: Sequence[Any], policies: Sequence[Policy], settings: Settings
) -> None:
    """Create the group samples of finished turns. Each turn is considered once; `turns` are rows of turn columns."""
    for policy in policies:
        config, rewards = effective_rollouts(policy, settings).group_sampling, effective_rewards(policy, settings)
        if policy.mode == LearningMode.HALTED or group_sampling_disabled_reason(config, rewards) is not None:
            continue
        since = await database_time(session) - config.window_seconds
        ids = [
            turn.id
            for turn in turns
            if turn.policy_id == policy.id
            and turn.origin == Origin.CHAT
            and turn.choice_index == 0
            and (turn.state, turn.exclusion_reason, turn.deleted_at) == (TurnState.DONE, None, None)
            and turn.finished_at > since
            and needs_group_samples(turn.completion_id, config, rewards.sources)
        ]
        if ids:
            await _create_for_policy(session, policy, ids, config)


async def _create_for_policy(
    session: AsyncSession, policy: Policy, turn_ids: Sequence[str], config: GroupSamplingConfig
) -> None:
    """Create group samples within the hourly budget, on the estimate that they are as long as the chat's reply."""
    budget = config.tokens_per_hour - await repository.count_recent_tokens(session, policy.id, Origin.GROUP_SAMPLE)
    choices = await session.execute(
        select(Turn.completion_id, func.count()).where(Turn.completion_id.in_(turn_ids)).group_by(Turn.completion_id)
    )
    num_choices_by_completion = {completion_id: count for completion_id, count in choices}
    turns = await session.scalars(
        select(Turn)
        .join(Version, Version.id == Turn.version_id)
        .where(Turn.id.in_(turn_ids), Version.state != VersionState.REJECTED)
        .order_by(Turn.finished_at, Turn.id)
    )
    planned: list[dict[str, Any]] = []
    for turn in turns:
        num_choices = num_choices_by_completion[turn.completion_id]
        num_missing = config.extra_replies + 1 - num_choices
        cost = num_missing * len(turn.output_ids or ())
        if num_missing <= 0 or not turn.prompt_ids or is_judge_prompt(turn.messages):
            continue
        if cost > budget:
            break
        budget -= cost
        planned += [plan_group_sample(turn, num_choices + index) for index in range(num_missing)]
    if planned:
        await create_rollouts(session, planned, expires_in=config.window_seconds)
        await _delay_samples(session, {turn["completion_id"] for turn in planned}, config.window_seconds)


async def _delay_samples(session: AsyncSession, completion_ids: Collection[str], seconds: float) -> None:
    """Make existing samples of the chats wait for their group samples. Later samples find their group by themselves."""
    turn_ids = select(Turn.id).where(Turn.completion_id.in_(completion_ids))
    ready_at = now() + seconds
    await session.execute(
        update(Sample)
        .where(Sample.turn_id.in_(turn_ids), Sample.state == SampleState.OPEN, Sample.ready_at < ready_at)
        .values(ready_at=ready_at)
        .execution_options(synchronize_session=False)
    )


def plan_group_sample(turn: Turn, choice_index: int) -> dict[str, Any]:
    """Return the columns of a turn that is another reply to the same prompt. It is no part of the conversation."""
    sampling = Sampling.from_body(turn.sampling)
    if sampling.seed is not None:  # the same seed would give the same reply
        sampling = replace(sampling, seed=sampling.seed + choice_index)
    return {
        **{name: getattr(turn, name) for name in COPIED_COLUMNS},
        "id": new_id("chatcmpl"),
        "completion_id": turn.completion_id,
        "choice_index": choice_index,
        "origin": Origin.GROUP_SAMPLE,
        "sampling": sampling.body(),
    }
