"""Turns → Rollouts: beside replies that have ended, those of a version in shadow, as rows, before it is asked."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.shadow import SHADOW, ShadowConfig
from alignment.signals.judge_prompts import is_question
from alignment.signals.rules import asked_about
from app.core.database import database_time
from app.core.settings import Settings
from app.deployments import shadow
from app.models import Deployment, Origin, Policy, Turn, TurnState, Version, VersionState, new_id
from app.projects.consent import NO_CONSENT
from app.training.rollouts import repository
from workers.rollouts.group_sampling import COPIED, write


async def cast(session: AsyncSession, ended: Sequence[Any], policies: Sequence[Policy], settings: Settings) -> None:
    """For those of the turns that are in the share. `ended` turns are looked at once: there is no second cast."""
    named = {policy.id: policy for policy in policies}
    rows = await session.execute(
        select(Version, Deployment.version_id)
        .join(Deployment, Deployment.policy_id == Version.policy_id)
        .where(Version.policy_id.in_(named), Version.state == VersionState.SHADOW)
    )
    for version, serving_id in list(rows):
        policy = named[version.policy_id]
        config = shadow.kept(policy, settings)
        since = await database_time(session) - config.window_seconds
        ids = [
            row.id
            for row in ended
            if row.policy_id == policy.id
            and row.origin == Origin.CHAT
            and row.choice_index == 0
            and (row.state, row.deleted_at) == (TurnState.DONE, None)
            and row.exclusion_reason != NO_CONSENT
            and row.finished_at > since
            and asked_about(row.completion_id, SHADOW, config.share)
        ]
        if ids:
            await _cast(session, version, serving_id, ids, config)


async def _cast(
    session: AsyncSession, version: Version, serving_id: str, ids: Sequence[str], config: ShadowConfig
) -> None:
    """As long as they fit into the hour's budget, if they come to be as long as the replies they stand beside."""
    left = config.tokens_per_hour - await repository.spent(session, version.policy_id, Origin.SHADOW)
    rows = await session.scalars(
        select(Turn).where(Turn.id.in_(ids), Turn.version_id == serving_id).order_by(Turn.finished_at, Turn.id)
    )
    cast: list[dict[str, Any]] = []
    for turn in rows:
        if not turn.prompt_ids or is_question(turn.messages):
            continue
        left -= len(turn.output_ids or ())
        if left < 0:
            break
        cast.append(beside(turn, version))
    if cast:
        await write(session, cast, expires_in=config.window_seconds)


def beside(turn: Turn, version: Version) -> dict[str, Any]:
    """The turn that is to be the version's reply to the same prompt. It is a completion of its own: no group sample, and
    nothing that is learned from waits for it."""
    id = new_id("chatcmpl")
    return {
        **{name: getattr(turn, name) for name in COPIED},
        "id": id,
        "completion_id": id,
        "shadow_of_id": turn.id,
        "choice_index": 0,
        "version_id": version.id,
        "origin": Origin.SHADOW,
        "sampling": turn.sampling,
    }
