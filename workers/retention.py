"""Retention in the background: one short step of each kind for each project, as part of the reconciler's run.

The steps of a large backlog follow each other at the reconciler's interval, so that chats and curation go on between.
"""

import asyncio
import logging
from collections.abc import Awaitable

from sqlalchemy import select

from app.core.database import Database
from app.core.retention_config import RetentionConfig
from app.core.settings import Settings
from app.episodes import content as episode_content
from app.models import Policy, PolicyState, Project
from app.privacy import retention, retention_files

log = logging.getLogger("attune.retention")


async def remove_expired(db: Database, settings: Settings) -> int:
    """Remove one step of everything that has expired; return the number of rows.

    What fails is logged, and everything else is removed.
    """
    async with db.read() as session:
        projects = list(await session.scalars(select(Project).order_by(Project.id)))
        policies = list(await session.scalars(select(Policy).order_by(Policy.id)))
    removed = 0
    for project in projects:
        own_policies = [policy for policy in policies if policy.project_id == project.id]
        removed += await _log_failure(_remove_of_project(db, settings, project, own_policies), project.id, "any data")
    await _log_failure(retention_files.remove_leftovers(db, settings), None, "leftover files")
    if settings.privacy.retention.logs is not None:
        logs = asyncio.to_thread(retention_files.empty_logs, settings, settings.privacy.retention.logs)
        await _log_failure(logs, None, "logs")
    return removed


async def _remove_of_project(db: Database, settings: Settings, project: Project, policies: list[Policy]) -> int:
    config = retention.effective_retention(project, settings)
    removed = 0
    for kind in retention.STEPS:
        if (days := getattr(config, kind)) is not None:
            count = await _log_failure(retention.remove_expired(db, project.id, kind, days), project.id, kind)
            removed += count
            if count:
                await db.let_others_write()
    if config.turns is not None:
        erased = episode_content.erase_expired(db, project.id, config.turns)
        removed += await _log_failure(erased, project.id, "episodes")
    for policy in policies:
        removed += await _log_failure(
            _remove_files(db, settings, policy, config), project.id, f"files of {policy.name}"
        )
    return removed


async def _remove_files(db: Database, settings: Settings, policy: Policy, config: RetentionConfig) -> int:
    if policy.state == PolicyState.DELETED:
        return await retention_files.remove_deleted(db, policy.id, settings, actor=retention.ACTOR)
    pruned: list[str] = []
    if config.versions is not None:
        pruned, _ = await retention_files.prune_versions(
            db, policy.id, config.versions, settings, actor=retention.ACTOR
        )
    if config.optimizer_states is not None:
        await retention_files.remove_trainer_states(db, policy.id, config.optimizer_states, settings)
    return len(pruned)


async def _log_failure(removal: Awaitable[int], project_id: str | None, kind: str) -> int:
    """Return what the removal returns, or 0 if it fails."""
    try:
        return await removal
    except Exception:
        log.exception("retention of project %s: %s could not be removed", project_id, kind)
        return 0
