"""People's words → a reward model: opened when enough is said, fitted by the trainer, settled under its fence.

And the watch over the one that serves: whom people contradict is silenced, and fitted anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LearnedSource
from alignment.reward_model.dataset import PreferenceDataset
from app.core import leases
from app.core.database import Database, now
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.feedback.kinds import ORDERS
from app.models import Policy, RewardModel, RewardModelState, RewardModelTurn, record_audit
from app.projects.bootstrap import base_model
from app.training.policy_rewards import rewards_of
from app.training.reward_models import agreement, repository, service
from app.training.reward_models.service import label
from workers.training import preference_data

NOT_CONFIGURED = "the policy listens to no reward model"


@dataclass(frozen=True)
class Claimed:
    """What the trainer needs for one fit, and the fence under which it may write the result."""

    id: str
    fence: int
    attempt: int
    number: int
    policy_id: str
    policy_name: str
    min_agreement: float
    words: PreferenceDataset

    @property
    def name(self) -> str:
        return f"{self.policy_name}/rm-{self.number}"

    def directory(self, settings: Settings) -> Path:
        """Never reused, as a version's is not."""
        owner = f"{self.policy_name}-{self.policy_id[-6:]}"
        return settings.reward_models_dir / owner / f"rm-{self.number}.{self.fence}"


async def claim(db: Database, owner: str, settings: Settings) -> Claimed | None:
    """An open fit that nobody works on, of a policy on this trainer's base model, with what people have said until now
    frozen as its lineage."""
    async with db.write() as session:
        rows = await session.scalars(
            select(RewardModel)
            .join(Policy, Policy.id == RewardModel.policy_id)
            .where(
                RewardModel.state == RewardModelState.OPEN,
                RewardModel.attempt < settings.max_attempts,
                Policy.base_model == base_model(settings.model),
                lease_is_free(RewardModel),
            )
            .order_by(RewardModel.created_at, RewardModel.id)
        )
        for row in list(rows):
            # Before the row, as whoever erases or steers has it: and nothing is erased while it is being read.
            policy = await session.get_one(Policy, row.policy_id, with_for_update={"key_share": True})
            source = rewards_of(policy, settings).learned
            fence = await leases.claim(
                session,
                RewardModel,
                row.id,
                owner=owner,
                seconds=settings.lease_seconds,
                states=(RewardModelState.OPEN,),
            )
            if fence is None:
                continue
            if source is not None:
                await session.refresh(row)
                return await _read(session, policy, row, fence, source)
            await _give_up(session, policy, row.id, fence, RewardModelState.REFUSED, row.number, NOT_CONFIGURED)
    return None


async def _read(session: AsyncSession, policy: Policy, row: RewardModel, fence: int, source: LearnedSource) -> Claimed:
    words = await preference_data.read(session, policy)
    await session.execute(delete(RewardModelTurn).where(RewardModelTurn.reward_model_id == row.id))
    if words.replies:
        heard = [{"reward_model_id": row.id, "turn_id": reply.turn_id} for reply in words.replies]
        await session.execute(insert(RewardModelTurn), heard)
    await session.execute(
        update(RewardModel)
        .where(RewardModel.id == row.id)
        .values(
            data_read_at=now(),
            last_feedback_seq=await repository.last_feedback(session, policy.project_id),
            num_pairs=len(words.pairs),
            num_thumbs=len(words.thumbs),
            num_raters=len(words.raters),
        )
        .execution_options(synchronize_session=False)
    )
    return Claimed(row.id, fence, row.attempt, row.number, policy.id, policy.name, source.min_agreement, words)


async def commit(
    db: Database, claimed: Claimed, *, path: str, manifest_sha256: str, metrics: Mapping[str, Any]
) -> RewardModelState:
    """It serves from now on, unless it was told not to; the one that did is retired. Raises LeaseLost."""
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy_id, with_for_update={"key_share": True})
        row = await session.get_one(RewardModel, claimed.id)
        state = RewardModelState.SERVING if row.serve_when_fitted else RewardModelState.TRAINED
        if row.serve_when_fitted:
            await service.take_over(session, policy)
        values: dict[str, Any] = {"served_at": now()} if row.serve_when_fitted else {}
        await leases.finish(
            session,
            RewardModel,
            claimed.id,
            fence=claimed.fence,
            state=state,
            actor=service.TRAINER,
            reason=None,
            path=path,
            manifest_sha256=manifest_sha256,
            metrics=dict(metrics),
            settled_at=now(),
            **values,
        )
        told: dict[str, Any] = {"agreement": metrics.get("agreement"), "words": len(claimed.words)}
        action = f"reward model {state}"
        record_audit(session, service.TRAINER, action, claimed.name, project_id=policy.project_id, **told)
    return state


async def refuse(db: Database, claimed: Claimed, reason: str, metrics: Mapping[str, Any]) -> None:
    """Not good enough, or too little to learn from: the one that serves goes on. Raises LeaseLost."""
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy_id)
        state = RewardModelState.REFUSED
        await _give_up(session, policy, claimed.id, claimed.fence, state, claimed.number, reason, metrics=dict(metrics))


async def note_failure(db: Database, claimed: Claimed, reason: str) -> None:
    """The row stays as it is, leased; people see why it will be taken again."""
    async with db.write() as session:
        policy = await session.get_one(Policy, claimed.policy_id)
        await session.execute(
            update(RewardModel)
            .where(RewardModel.id == claimed.id, RewardModel.fence == claimed.fence)
            .values(reason=reason)
            .execution_options(synchronize_session=False)
        )
        told = {"attempt": claimed.attempt}
        record_audit(
            session, service.TRAINER, "attempt failed", claimed.name, reason, project_id=policy.project_id, **told
        )


async def reconcile(db: Database, settings: Settings) -> None:
    """Fits that took the trainer down too often are given up; the one that serves is held to what people say; and
    where enough has been said, a fit is opened."""
    await _fail_poisoned(db, settings)
    async with db.read() as session:
        asked = select(Policy).order_by(Policy.id)
        if settings.rewards.learned is None:
            asked = asked.where(Policy.rewards.is_not(None))
        policies = await session.scalars(asked)
        configs = [(policy, rewards_of(policy, settings).learned) for policy in policies]
    for policy, source in configs:
        if source is not None:
            await _watch(db, policy, source)
            await _open(db, policy, source)


async def _fail_poisoned(db: Database, settings: Settings) -> None:
    async with db.write() as session:
        poisoned = await session.scalars(
            leases.select_exhausted(RewardModel, RewardModelState.OPEN, settings.max_attempts)
        )
        for row in list(poisoned):
            policy = await session.get_one(Policy, row.policy_id)
            last = f"; the last one: {row.reason}" if row.reason else ""
            reason = f"{row.attempt} attempts ended without a result{last}"
            row.fence += 1  # a trainer that still works on it must not write
            await session.flush()
            state = RewardModelState.FAILED
            await _give_up(session, policy, row.id, row.fence, state, row.number, reason, actor=service.SWEEP)


async def _watch(db: Database, policy: Policy, source: LearnedSource) -> None:
    async with db.read() as session:
        row = await repository.in_state(session, policy.id, RewardModelState.SERVING)
        if row is None:
            return
        reason = agreement.contrary(await agreement.measured(session, policy, row), source.min_agreement)
    if reason is not None:
        await disable(db, policy.id, row.id, service.SWEEP, reason)


async def disable(db: Database, policy_id: str, id: str, actor: str, reason: str) -> None:
    """If it still serves; and another is fitted."""
    async with db.write() as session:
        policy = await session.get_one(Policy, policy_id, with_for_update={"key_share": True})
        row = await session.get_one(RewardModel, id)
        if row.state != RewardModelState.SERVING:
            return
        await service.disable(session, policy, row, actor=actor, reason=reason)
        if await repository.in_state(session, policy.id, RewardModelState.OPEN) is None:
            await service.open_fit(session, policy, actor=actor, reason=f"{label(policy, row)} is silenced")


async def _open(db: Database, policy: Policy, source: LearnedSource) -> None:
    """When enough is said for a first fit, or enough more for another."""
    async with db.read() as session:
        why = await _due(session, policy, source)
    if why is None:
        return
    async with db.write() as session:
        policy = await session.get_one(Policy, policy.id, with_for_update={"key_share": True})
        if await _due(session, policy, source) is not None:
            await service.open_fit(session, policy, actor=service.SWEEP, reason=why)


async def _due(session: AsyncSession, policy: Policy, source: LearnedSource) -> str | None:
    last = await repository.newest(session, policy.id)
    if last is None:
        heard = await repository.heard_since(session, policy, 0, source.min_words)
        orders = await repository.heard_since(session, policy, 0, source.min_pairs, ORDERS)
        enough = heard >= source.min_words or orders >= source.min_pairs
        return "enough is said for a first fit" if enough else None
    if last.state == RewardModelState.OPEN:
        return None
    silent = await repository.in_state(session, policy.id, RewardModelState.DISABLED)
    serving = await repository.in_state(session, policy.id, RewardModelState.SERVING)
    if serving is None and silent is not None and silent.actor not in service.STATIONS:
        return None  # an operator's word holds until an operator takes it back
    heard = await repository.heard_since(session, policy, last.last_feedback_seq, source.refit_after)
    return f"{heard} new words of people" if heard >= source.refit_after else None


async def _give_up(
    session: AsyncSession,
    policy: Policy,
    id: str,
    fence: int,
    state: RewardModelState,
    number: int,
    reason: str,
    *,
    actor: str = service.TRAINER,
    **values: Any,
) -> None:
    await leases.finish(
        session, RewardModel, id, fence=fence, state=state, actor=actor, reason=reason, settled_at=now(), **values
    )
    record_audit(
        session, actor, f"reward model {state}", f"{policy.name}/rm-{number}", reason, project_id=policy.project_id
    )
