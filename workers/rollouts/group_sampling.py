"""Turns → Rollouts: group samples of a reply that has ended, as rows, before anything is asked."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rollouts import GroupSamplingConfig, idle, wanted
from alignment.signals.judge_prompts import is_question
from app.core.database import database_time, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.inference.request import Sampling
from app.models import (
    LearningMode,
    Origin,
    Policy,
    Rollout,
    RolloutState,
    Sample,
    SampleState,
    Turn,
    TurnState,
    Version,
    VersionState,
    new_id,
)
from app.training.policy_rewards import rewards_of
from app.training.rollouts import repository
from app.training.rollouts.config import rollouts_of

COPIED = (
    *("project_id", "policy_id", "version_id", "key_id", "end_user", "conversation_id"),
    *("engine", "messages", "request_params", "request_metadata"),
)


async def cast(session: AsyncSession, ended: Sequence[Any], policies: Sequence[Policy], settings: Settings) -> None:
    """For those of the turns that are to have group samples. `ended` turns are looked at once: there is no second cast."""
    for policy in policies:
        group_samples, rewards = rollouts_of(policy, settings).group_sampling, rewards_of(policy, settings)
        if policy.mode == LearningMode.HALTED or idle(group_samples, rewards) is not None:
            continue
        since = await database_time(session) - group_samples.window_seconds
        ids = [
            row.id
            for row in ended
            if row.policy_id == policy.id
            and row.origin == Origin.CHAT
            and row.choice_index == 0
            and (row.state, row.exclusion_reason, row.deleted_at) == (TurnState.DONE, None, None)
            and row.finished_at > since
            and wanted(row.completion_id, group_samples, rewards.sources)
        ]
        if ids:
            await _cast(session, policy, ids, group_samples)


async def _cast(session: AsyncSession, policy: Policy, ids: Sequence[str], group_samples: GroupSamplingConfig) -> None:
    """As long as they fit into the hour's budget, if they come to be as long as the replies they stand beside."""
    left = group_samples.tokens_per_hour - await repository.spent(session, policy.id, Origin.GROUP_SAMPLE)
    choices = await session.execute(
        select(Turn.completion_id, func.count()).where(Turn.completion_id.in_(ids)).group_by(Turn.completion_id)
    )
    num_choices = {completion_id: count for completion_id, count in choices}
    rows = await session.scalars(
        select(Turn)
        .join(Version, Version.id == Turn.version_id)
        .where(Turn.id.in_(ids), Version.state != VersionState.REJECTED)
        .order_by(Turn.finished_at, Turn.id)
    )
    cast: list[dict[str, Any]] = []
    for turn in rows:
        given = num_choices[turn.completion_id]
        missing = group_samples.extra_replies + 1 - given
        cost = missing * len(turn.output_ids or ())
        if missing <= 0 or not turn.prompt_ids or is_question(turn.messages):
            continue
        if cost > left:
            break
        left -= cost
        cast += [shadow(turn, given + place) for place in range(missing)]
    if cast:
        await write(session, cast, expires_in=group_samples.window_seconds)
        await _hold(session, {turn["completion_id"] for turn in cast}, group_samples.window_seconds)


async def _hold(session: AsyncSession, completion_ids: Collection[str], seconds: float) -> None:
    """Samples of replies that somebody has judged already; those to come find their group samples by themselves."""
    spoken = select(Turn.id).where(Turn.completion_id.in_(completion_ids))
    until = now() + seconds
    await session.execute(
        update(Sample)
        .where(Sample.turn_id.in_(spoken), Sample.state == SampleState.OPEN, Sample.ready_at < until)
        .values(ready_at=until)
        .execution_options(synchronize_session=False)
    )


def shadow(turn: Turn, choice_index: int) -> dict[str, Any]:
    """The turn that is to be another reply to the same prompt. It follows nothing, and nothing follows it."""
    sampling = Sampling.of(turn.sampling)
    if sampling.seed is not None:  # it would say the same again
        sampling = replace(sampling, seed=sampling.seed + choice_index)
    return {
        **{name: getattr(turn, name) for name in COPIED},
        "id": new_id("chatcmpl"),
        "completion_id": turn.completion_id,
        "choice_index": choice_index,
        "origin": Origin.GROUP_SAMPLE,
        "sampling": sampling.body(),
    }


async def write(session: AsyncSession, turns: list[dict[str, Any]], *, expires_in: float, **plan: Any) -> None:
    """Turns that are to be, and their rollouts. `plan`: whose they are, if they are a plan's."""
    common = {"state": TurnState.OPEN, "stream": False}
    await session.execute(insert(Turn), [common | turn for turn in turns])
    rows = [
        {
            "id": turn["id"],
            "policy_id": turn["policy_id"],
            "origin": turn["origin"],
            "choice_index": turn["choice_index"],
            "state": RolloutState.OPEN,
            **plan,
        }
        for turn in turns
    ]
    await session.execute(insert(Rollout).values(due_at=now(), expires_at=now() + expires_in), rows)
    enqueue_after_commit(session, "rollout")
