"""What a rollback would change: it is carried out in a transaction that is undone, so that the preview is exact.

The samples, which follow in steps, are counted from reads afterwards: nobody waits for the count.
"""

from typing import Literal, NoReturn

from pydantic import BaseModel, Field
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.deployments import service
from app.engines.fleet import is_loaded, list_ready_engines
from app.models import (
    Batch,
    BatchState,
    Deployment,
    Origin,
    Pin,
    Policy,
    Turn,
)
from app.policies import repository
from app.policies.context import PolicyContext
from app.policies.lines import compare_lines
from app.policies.locks import LockedPolicy
from app.policies.references import format_reference, version_name
from app.policies.service import Attribution
from app.training import move_preview

ACTIVE_SECONDS = 86_400.0
MAX_TURNS = 10_000  # newest replies whose conversations are counted


class RollbackPreview(BaseModel):
    """What a rollback would change, as of now."""

    object: Literal["rollback.preview"] = "rollback.preview"
    policy: str
    serving: str
    would_serve: str
    rolled_back: str = Field(description="the version that would be marked rolled_back")
    aborted_canary: str | None
    changes: bool = Field(description="whether the rollback would change anything")
    engines: int = Field(description="ready engines")
    engines_with_version: int = Field(description="of these, those that have loaded the version that would serve")
    conversations: int = Field(
        description="conversations that the version to be left has answered in the last 24 hours, of its newest 10,000 "
        "replies"
    )
    pins: int = Field(description="pins to the version to be left: they stay, and it goes on answering them")
    head: str = Field(description="the version that training continues from")
    head_after: str
    leaving: list[str] = Field(description="versions that the training line would lose")
    joining: list[str] = Field(description="versions that it would gain")
    samples_returned: int = Field(description="samples of the versions that leave, to be learned from again")
    samples_dropped: int = Field(description="those of versions that people have judged: they are not used again")
    samples_reclaimed: int = Field(description="samples of the versions that join, which count as learned from again")
    batches_failed: int = Field(description="open batches that would be broken up; their samples return too")


class _PreviewDone(Exception):
    """Ends the transaction of a preview, which is undone. The head would move from `head_id` to `head_after_id`."""

    def __init__(self, preview: RollbackPreview, policy_id: str, head_id: str, head_after_id: str) -> None:
        super().__init__("a preview is never committed")
        self.preview = preview
        self.policy_id, self.head_id, self.head_after_id = policy_id, head_id, head_after_id


async def preview_rollback(context: PolicyContext, number: int | None, from_version: int | None) -> RollbackPreview:
    """Return what `service.roll_back` would change. Raises NotFound, Conflict, as it would."""
    try:
        async with context.write() as locked:
            await _carry_out(locked, number, from_version, context.attribute(None))
    except _PreviewDone as done:
        async with context.db.read_snapshot() as session:
            return await _add_samples(session, done)
    raise AssertionError


async def _carry_out(locked: LockedPolicy, number: int | None, from_version: int | None, by: Attribution) -> NoReturn:
    """Carry out the rollback and raise _PreviewDone, which must leave the transaction."""
    session, policy = locked
    deployment = await repository.get_deployment(session, policy.id)
    serving = await repository.get_version(session, deployment.version_id)
    canary_id, head_id = deployment.canary_version_id, policy.head_version_id or serving.id
    open_before = await _count_open_batches(session, policy)
    rolled_back, target = await service.roll_back(locked, number, by, from_version=from_version)
    await session.flush()
    after = await session.get_one(Deployment, policy.id)
    aborted = (
        await repository.find_version_name(session, policy, canary_id) if after.canary_version_id is None else None
    )
    head_after_id = policy.head_version_id or target.id
    leaving, joining = await compare_lines(session, head_id, head_after_id)
    engines = await list_ready_engines(session)
    left_id = rolled_back.id
    raise _PreviewDone(
        RollbackPreview(
            policy=policy.name,
            serving=version_name(policy, serving),
            would_serve=version_name(policy, target),
            rolled_back=version_name(policy, rolled_back),
            aborted_canary=aborted,
            changes=target.id != serving.id or aborted is not None,
            engines=len(engines),
            engines_with_version=sum(is_loaded(engine, target) for engine in engines),
            conversations=await _count_conversations(session, left_id),
            pins=await session.scalar(select(func.count()).select_from(Pin).where(Pin.version_id == left_id)) or 0,
            head=version_name(policy, await repository.get_version(session, head_id)),
            head_after=version_name(policy, await repository.get_version(session, head_after_id)),
            leaving=[format_reference(policy.name, version.number) for version in leaving],
            joining=[format_reference(policy.name, version.number) for version in joining],
            samples_returned=0,
            samples_dropped=0,
            samples_reclaimed=0,
            batches_failed=open_before - await _count_open_batches(session, policy),
        ),
        policy.id,
        head_id,
        head_after_id,
    )


async def _add_samples(session: AsyncSession, done: _PreviewDone) -> RollbackPreview:
    """Return the preview with the samples that would move. The transaction of the preview is over."""
    moved = await move_preview.count_moved(session, done.policy_id, done.head_id, done.head_after_id)
    counts = {f"samples_{name}": count for name, count in moved._asdict().items()}
    return done.preview.model_copy(update=counts)


async def _count_open_batches(session: AsyncSession, policy: Policy) -> int:
    is_open = (Batch.policy_id == policy.id, Batch.state == BatchState.OPEN)
    return await session.scalar(select(func.count()).select_from(Batch).where(*is_open)) or 0


async def _count_conversations(session: AsyncSession, version_id: str) -> int:
    newest = (
        select(Turn.conversation_id)
        .where(
            Turn.version_id == version_id,
            Turn.created_at >= now() - ACTIVE_SECONDS,
            Turn.origin == Origin.CHAT,
            Turn.conversation_id.is_not(None),
        )
        .order_by(Turn.created_at.desc())
        .limit(MAX_TURNS)
        .subquery()
    )
    return await session.scalar(select(func.count(newest.c.conversation_id.distinct()))) or 0
