"""What retention would remove now: rows and bytes by kind, without removing anything."""

import asyncio
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, LargeBinary, Select, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.artifacts.specs import TRAINER_STATE
from app.core.retention_config import RetentionConfig
from app.core.settings import Settings
from app.models import Audit, DatasetRow, Feedback, Policy, Turn
from app.policies import repository
from app.privacy import expired_rows, retention_files

TURN_COLUMNS = (
    *(Turn.own_messages, Turn.reply, Turn.own_prompt_ids, Turn.output_ids, Turn.logprobs),
    *(Turn.request_params, Turn.request_metadata, Turn.sampling),
)


class Expired(NamedTuple):
    """`bytes` are those of the contents: a database gives their space to new rows, and not to the file system."""

    kind: str
    rows: int
    bytes: int


async def preview(session: AsyncSession, project_id: str, config: RetentionConfig, settings: Settings) -> list[Expired]:
    """Return what is expired now, for each kind that is not kept for ever.

    Feedback on the turns expires after them, so more of it may follow.
    """
    result: list[Expired] = []
    tables: tuple[tuple[str, float | None, Any, tuple[Any, ...]], ...] = (
        ("turns", config.turns, (Turn, Turn.id, expired_rows.select_turns), TURN_COLUMNS),
        ("feedback", config.feedback, (Feedback, Feedback.seq, expired_rows.select_feedback), (Feedback.comment,)),
    )
    for kind, days, (table, key, select_expired), columns in tables:
        if days is not None:
            size = sum_bytes(session, columns)
            in_table = select(func.count(), size).select_from(table).where(key.in_(select_expired(project_id, days)))
            result.append(await _count(session, kind, in_table))
    if config.datasets is not None:
        ids = expired_rows.select_datasets(project_id, config.datasets)
        rows = select(func.count(), sum_bytes(session, (DatasetRow.content,))).where(DatasetRow.dataset_id.in_(ids))
        result.append(await _count(session, "datasets", rows))
    if config.audit is not None:
        numbers = expired_rows.select_audit(project_id, config.audit)
        entries = select(func.count(), sum_bytes(session, (Audit.details, Audit.reason)))
        query = entries.where(Audit.project_id == project_id, Audit.chain_number.in_(numbers))
        result.append(await _count(session, "audit", query))
    for policy in await repository.list_policies(session, project_id):
        result += await _preview_files(session, policy, config, settings)
    return result


async def _count(session: AsyncSession, kind: str, query: Select[int, int]) -> Expired:
    rows, size = (await session.execute(query)).one()
    return Expired(kind, rows, int(size or 0))


def sum_bytes(session: AsyncSession, columns: tuple[Any, ...]) -> ColumnElement[int]:
    """Return the stored bytes of these columns over all rows; PostgreSQL compresses long values."""
    if session.get_bind().dialect.name == "postgresql":
        sizes = [func.coalesce(func.pg_column_size(column), 0) for column in columns]
    else:
        sizes = [func.coalesce(func.length(cast(column, LargeBinary)), 0) for column in columns]
    return func.sum(sum(sizes[1:], sizes[0]))


async def _preview_files(
    session: AsyncSession, policy: Policy, config: RetentionConfig, settings: Settings
) -> list[Expired]:
    result: list[Expired] = []
    pruned: set[str] = set()
    if config.versions is not None:
        versions = await retention_files.select_prunable(session, policy, config.versions, settings)
        pruned = {version.id for version in versions}
        size = await asyncio.to_thread(retention_files.total_bytes, [version.adapter_path for version in versions])
        result.append(Expired(f"versions of {policy.name}", len(versions), size))
    if config.optimizer_states is not None:
        with_state = await retention_files.select_with_state(session, policy, config.optimizer_states, settings)
        folders = [f"{version.adapter_path}/{TRAINER_STATE}" for version in with_state if version.id not in pruned]
        size = await asyncio.to_thread(retention_files.total_bytes, folders)
        result.append(Expired(f"optimizer states of {policy.name}", len(folders), size))
    return result
