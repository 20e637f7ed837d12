"""Queries on stored completions. A deleted one is not there, and a rollout is none."""

from collections.abc import Mapping, Sequence

from sqlalchemy import and_, case, delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.models import (
    Judgement,
    Origin,
    Policy,
    Rollout,
    RolloutState,
    SampleState,
    Turn,
    TurnMetadata,
    TurnState,
    Version,
    lock_turns,
)
from app.projects.consent import NO_CONSENT, withholds
from app.training import unlearning
from app.training.reward_models import erasure as reward_models

Stored = tuple[list[Turn], Policy, Version]


async def completion(session: AsyncSession, project_id: str, completion_id: str) -> Stored | None:
    found = await session.execute(
        select(Turn, Policy, Version)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(
            Turn.completion_id == completion_id,
            Turn.project_id == project_id,
            Turn.deleted_at.is_(None),
            Turn.origin == Origin.CHAT,
        )
        .order_by(Turn.choice_index)
    )
    rows = list(found)
    return ([row[0] for row in rows], rows[0][1], rows[0][2]) if rows else None


async def completions(
    session: AsyncSession,
    project_id: str,
    *,
    model: tuple[str, str | None] | None,
    pairs: Mapping[str, str],
    after: Turn | None,
    newest_first: bool,
    limit: int,
) -> list[Stored]:
    """A page. `model` is a policy's id and perhaps a version's; `after` is the first choice of the last one seen."""
    wanted = [Turn.project_id == project_id, Turn.choice_index == 0, Turn.deleted_at.is_(None)]
    wanted.append(Turn.origin == Origin.CHAT)
    if model is not None:
        policy_id, version_id = model
        wanted.append(Turn.policy_id == policy_id)
        if version_id is not None:
            wanted.append(Turn.version_id == version_id)
    for key, value in pairs.items():
        mine = and_(TurnMetadata.turn_id == Turn.id, TurnMetadata.key == key, TurnMetadata.value == value)
        wanted.append(exists().where(mine, TurnMetadata.project_id == project_id))
    if after is not None:
        at, id = after.created_at, after.id
        if newest_first:
            wanted.append(or_(Turn.created_at < at, and_(Turn.created_at == at, Turn.id < id)))
        else:
            wanted.append(or_(Turn.created_at > at, and_(Turn.created_at == at, Turn.id > id)))
    order = (Turn.created_at.desc(), Turn.id.desc()) if newest_first else (Turn.created_at, Turn.id)
    ids = list(await session.scalars(select(Turn.completion_id).where(*wanted).order_by(*order).limit(limit)))
    return await _whole(session, ids)


async def _whole(session: AsyncSession, ids: Sequence[str]) -> list[Stored]:
    rows = await session.execute(
        select(Turn, Policy, Version)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(Turn.completion_id.in_(ids), Turn.origin == Origin.CHAT)
        .order_by(Turn.choice_index)
    )
    found: dict[str, Stored] = {}
    for turn, policy, version in rows:
        found.setdefault(turn.completion_id, ([], policy, version))[0].append(turn)
    return [found[id] for id in ids]


async def replace_pairs(session: AsyncSession, turns: Sequence[Turn], pairs: Mapping[str, str]) -> None:
    first = turns[0]
    await session.execute(delete(TurnMetadata).where(TurnMetadata.turn_id == first.id))
    for key, value in pairs.items():
        session.add(TurnMetadata(turn_id=first.id, project_id=first.project_id, key=key, value=value))
    for turn in turns:
        turn.request_metadata = dict(pairs)
        if withholds(pairs):
            turn.exclusion_reason = NO_CONSENT  # before any other: whoever asks for consent looks for this one
    if withholds(pairs):
        ids = await _locked(session, turns)
        await _drop_samples(session, ids, NO_CONSENT)
        await _stop_rollouts(session, ids, NO_CONSENT)


async def erase(session: AsyncSession, turns: Sequence[Turn]) -> None:
    """What was said goes; that something was said, when, at what cost and by which version stays."""
    ids = await _locked(session, turns)
    await session.execute(delete(TurnMetadata).where(TurnMetadata.turn_id.in_(ids)))
    await _drop_samples(session, ids, "its turn was deleted")
    await _stop_rollouts(session, ids, "its turn was deleted")
    await session.execute(  # a judge's reason may quote it
        update(Judgement)
        .where(Judgement.turn_id.in_(ids))
        .values(details={}, reason=None)
        .execution_options(synchronize_session=False)
    )
    await session.execute(
        update(Turn)
        .where(Turn.id.in_(ids))
        .values(
            state=case((Turn.state == TurnState.OPEN, TurnState.ABORTED), else_=Turn.state),
            messages=[],
            request_params={},
            request_metadata={},
            reply=None,
            prompt_ids=None,
            output_ids=None,
            logprobs=None,
            prefix_hash=None,
            end_user=None,
            request_sha256=None,
            exclusion_reason="deleted",
            deleted_at=now(),
        )
        .execution_options(synchronize_session=False)
    )


async def _with_rollouts(session: AsyncSession, turns: Sequence[Turn]) -> list[str]:
    """Their ids, and those of the rollouts to the same prompts."""
    ids = [turn.id for turn in turns]
    mine = select(Turn.completion_id).where(Turn.id.in_(ids))
    group_samples = select(Turn.id).where(Turn.completion_id.in_(mine), Turn.origin == Origin.GROUP_SAMPLE)
    shadow_deployments = select(Turn.id).where(Turn.shadow_of_id.in_(ids))
    return sorted({*ids, *await session.scalars(group_samples), *await session.scalars(shadow_deployments)})


async def _stop_rollouts(session: AsyncSession, turn_ids: Sequence[str], reason: str) -> None:
    """Whoever is asking for one may not put it on record; what is on record is not learned from."""
    await session.execute(
        update(Rollout)
        .where(Rollout.id.in_(turn_ids), Rollout.state == RolloutState.OPEN)
        .values(
            state=RolloutState.SKIPPED,
            reason=reason,
            settled_at=now(),
            tokens=0,
            fence=Rollout.fence + 1,
            lease_owner=None,
            lease_until=None,
        )
        .execution_options(synchronize_session=False)
    )
    await session.execute(
        update(Turn)
        .where(Turn.id.in_(turn_ids), Turn.origin.in_((Origin.GROUP_SAMPLE, Origin.SHADOW)))
        .values(
            state=case((Turn.state == TurnState.OPEN, TurnState.ABORTED), else_=Turn.state),
            exclusion_reason=reason if reason == NO_CONSENT else func.coalesce(Turn.exclusion_reason, reason),
            finished_at=func.coalesce(Turn.finished_at, now()),
        )
        .execution_options(synchronize_session=False)
    )


async def _locked(session: AsyncSession, turns: Sequence[Turn]) -> list[str]:
    """The turns and their group samples, before their samples, as curating does: none is made of them meanwhile. First those
    that are known: whoever casts group samples of them holds them, and these are seen only when that is done."""
    await lock_turns(session, [turn.id for turn in turns])
    ids = await _with_rollouts(session, turns)
    await lock_turns(session, ids)
    return ids


async def _drop_samples(session: AsyncSession, turn_ids: Sequence[str], reason: str) -> None:
    """Out of every batch that is not trained yet, too: whoever is training one of those may not commit it. Nor may
    whoever fits a reward model to what was said of them."""
    await unlearning.break_up(session, turn_ids)
    await reward_models.interrupt(session, turn_ids)
    await unlearning.drop(session, turn_ids, (SampleState.OPEN, SampleState.QUARANTINED, SampleState.BATCHED), reason)
