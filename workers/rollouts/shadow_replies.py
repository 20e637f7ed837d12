"""Finished turns → rollouts: planned replies of a version in a shadow deployment to the same prompts."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.shadow import SHADOW, ShadowConfig
from alignment.signals.eligibility import is_in_share
from alignment.signals.judge_prompts import is_judge_prompt
from app.core.database import database_time
from app.core.settings import Settings
from app.deployments import shadow
from app.models import Deployment, Origin, Policy, Turn, TurnState, Version, VersionState, new_id
from app.projects.consent import NO_CONSENT
from app.training.rollouts import repository
from workers.rollouts.group_sampling import COPIED_COLUMNS
from workers.rollouts.rollout_queue import create_rollouts


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
        config = shadow.active_shadow_config(policy, settings)
        since = await database_time(session) - config.window_seconds
        ids = [
            turn.id
            for turn in turns
            if turn.policy_id == policy.id
            and turn.origin == Origin.CHAT
            and turn.choice_index == 0
            and (turn.state, turn.deleted_at) == (TurnState.DONE, None)
            and turn.exclusion_reason != NO_CONSENT
            and turn.finished_at > since
            and is_in_share(turn.completion_id, SHADOW, config.share)
        ]
        if ids:
            await _create_for_version(session, version, live_version_id, ids, config)


async def _create_for_version(
    session: AsyncSession, version: Version, live_version_id: str, turn_ids: Sequence[str], config: ShadowConfig
) -> None:
    """Create shadow replies within the hourly budget, on the estimate that they are as long as the chat's reply."""
    budget = config.tokens_per_hour - await repository.count_recent_tokens(session, version.policy_id, Origin.SHADOW)
    turns = await session.scalars(
        select(Turn)
        .where(Turn.id.in_(turn_ids), Turn.version_id == live_version_id)
        .order_by(Turn.finished_at, Turn.id)
    )
    planned: list[dict[str, Any]] = []
    for turn in turns:
        if not turn.prompt_ids or is_judge_prompt(turn.messages):
            continue
        budget -= len(turn.output_ids or ())
        if budget < 0:
            break
        planned.append(plan_shadow_reply(turn, version))
    if planned:
        await create_rollouts(session, planned, expires_in=config.window_seconds)


def plan_shadow_reply(turn: Turn, version: Version) -> dict[str, Any]:
    """Return the columns of a turn that is the version's reply to the same prompt.

    It is a completion of its own: no group sample, and no sample waits for it.
    """
    id = new_id("chatcmpl")
    return {
        **{name: getattr(turn, name) for name in COPIED_COLUMNS},
        "id": id,
        "completion_id": id,
        "shadow_of_id": turn.id,
        "choice_index": 0,
        "version_id": version.id,
        "origin": Origin.SHADOW,
        "sampling": turn.sampling,
    }
