"""The guard of a policy's learning: an explicit state machine, every move of it on record.

    asynchronous ──alarm──▶ synchronous ──a version goes live──▶ asynchronous
         ▲                      │ alarm, `kl_alarms` in a row
         └──── resume ──── halted ◀── halt (an operator; the trainer, when what it starts from is damaged)

An alarm rejects the version that moved too far and takes learning back to the one that serves. In the synchronous
round only samples of the serving version are learned from. Halted, nothing is assembled.
"""

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import LearningMode, Policy, Version, record_audit

KL = "guard/kl"


def too_far(version: Version, settings: Settings) -> str | None:
    """Why this version must not be published; None when it may. Versions without the figure are not held to it."""
    distance = version.metrics.get(KL)
    if distance is None or distance <= settings.kl_guard:
        return None
    return f"KL to the version before it is {distance:.3g} a token (k3; the guard stands at {settings.kl_guard:g})"


async def alarm(session: AsyncSession, policy: Policy, reason: str, settings: Settings) -> None:
    """A version was rejected for its distance. The caller has taken the head back to what serves."""
    policy.kl_alarms += 1
    if policy.mode == LearningMode.HALTED:
        return
    last_straw = policy.kl_alarms >= settings.kl_alarms
    told = f"{reason}; {policy.kl_alarms} alarms in a row" if last_straw else reason
    await _move(
        session, policy, LearningMode.HALTED if last_straw else LearningMode.SYNCHRONOUS, actor="guard", reason=told
    )


async def went_live(session: AsyncSession, policy: Policy, label: str) -> None:
    """A version that kept its distance serves: the synchronous round is over."""
    policy.kl_alarms = 0
    if policy.mode == LearningMode.SYNCHRONOUS:
        await _move(session, policy, LearningMode.ASYNCHRONOUS, actor="guard", reason=f"{label} kept its distance")


async def halt(session: AsyncSession, policy: Policy, *, actor: str, reason: str | None) -> None:
    """An operator's word, or the trainer's where nothing can be learned on. What is under way is finished; nothing new
    is assembled."""
    await _move(session, policy, LearningMode.HALTED, actor=actor, reason=reason)


async def resume(session: AsyncSession, policy: Policy, *, actor: str, reason: str | None) -> None:
    policy.kl_alarms = 0
    await _move(session, policy, LearningMode.ASYNCHRONOUS, actor=actor, reason=reason)
    enqueue_after_commit(session, "assemble")


async def _move(session: AsyncSession, policy: Policy, mode: LearningMode, *, actor: str, reason: str | None) -> None:
    left = policy.mode
    if left == mode:
        return
    policy.mode, policy.mode_reason = mode, reason
    await session.flush()
    await session.execute(update(Policy).where(Policy.id == policy.id).values(mode_since=now()))
    record_audit(
        session,
        actor,
        f"learning {mode}",
        policy.name,
        reason,
        project_id=policy.project_id,
        left=left,
        alarms=policy.kl_alarms,
    )
