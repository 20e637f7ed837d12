"""Queries on stored completions: chat turns that are not deleted. Rollouts are no completions."""

from collections.abc import Mapping, Sequence

from sqlalchemy import and_, case, delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.pagination import apply_keyset
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
from app.projects.consent import NO_CONSENT, withholds_consent
from app.training import unlearning

CompletionRows = tuple[list[Turn], Policy, Version]


async def get_completion(session: AsyncSession, project_id: str, completion_id: str) -> CompletionRows | None:
    """Return the choices of a completion in order, its policy and its version; None if it does not exist."""
    result = await session.execute(
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
    rows = list(result)
    return ([row[0] for row in rows], rows[0][1], rows[0][2]) if rows else None


async def list_completions(
    session: AsyncSession,
    project_id: str,
    *,
    model: tuple[str, str | None] | None,
    metadata: Mapping[str, str],
    after: Turn | None,
    newest_first: bool,
    limit: int,
) -> list[CompletionRows]:
    """Return up to `limit + 1` completions, ordered by creation time.

    Args:
        model: A policy's id and, optionally, a version's id.
        metadata: Pairs that all must match.
        after: The first choice of the last completion of the previous page.
    """
    conditions = [Turn.project_id == project_id, Turn.choice_index == 0, Turn.deleted_at.is_(None)]
    conditions.append(Turn.origin == Origin.CHAT)
    if model is not None:
        policy_id, version_id = model
        conditions.append(Turn.policy_id == policy_id)
        if version_id is not None:
            conditions.append(Turn.version_id == version_id)
    for key, value in metadata.items():
        has_pair = and_(TurnMetadata.turn_id == Turn.id, TurnMetadata.key == key, TurnMetadata.value == value)
        conditions.append(exists().where(has_pair, TurnMetadata.project_id == project_id))
    last = None if after is None else (after.created_at, after.id)
    query = select(Turn.completion_id).where(*conditions)
    query = apply_keyset(query, (Turn.created_at, Turn.id), last, limit, descending=newest_first)
    return await _load_completions(session, list(await session.scalars(query)))


async def _load_completions(session: AsyncSession, ids: Sequence[str]) -> list[CompletionRows]:
    rows = await session.execute(
        select(Turn, Policy, Version)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(Turn.completion_id.in_(ids), Turn.origin == Origin.CHAT)
        .order_by(Turn.choice_index)
    )
    completions: dict[str, CompletionRows] = {}
    for turn, policy, version in rows:
        completions.setdefault(turn.completion_id, ([], policy, version))[0].append(turn)
    return [completions[id] for id in ids]


async def replace_metadata(session: AsyncSession, turns: Sequence[Turn], metadata: Mapping[str, str]) -> None:
    """Replace the metadata of a completion. If it withdraws the consent to train, drop its samples and rollouts."""
    first = turns[0]
    await session.execute(delete(TurnMetadata).where(TurnMetadata.turn_id == first.id))
    for key, value in metadata.items():
        session.add(TurnMetadata(turn_id=first.id, project_id=first.project_id, key=key, value=value))
    for turn in turns:
        turn.request_metadata = dict(metadata)
        if withholds_consent(metadata):
            turn.exclusion_reason = NO_CONSENT  # replaces any other reason, so that reports on consent find it
    if withholds_consent(metadata):
        ids = await _lock_turns_and_rollouts(session, turns)
        await _drop_samples(session, ids, NO_CONSENT)
        await _stop_rollouts(session, ids, NO_CONSENT)


async def erase(session: AsyncSession, turns: Sequence[Turn]) -> None:
    """Erase messages, replies, tokens and metadata. Time, token counts and version of each turn stay."""
    ids = await _lock_turns_and_rollouts(session, turns)
    await session.execute(delete(TurnMetadata).where(TurnMetadata.turn_id.in_(ids)))
    await _drop_samples(session, ids, "its turn was deleted")
    await _stop_rollouts(session, ids, "its turn was deleted")
    await session.execute(  # a judge's reason may quote the reply
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


async def _turn_and_rollout_ids(session: AsyncSession, turns: Sequence[Turn]) -> list[str]:
    """Return the ids of the turns and of the rollouts to the same prompts."""
    ids = [turn.id for turn in turns]
    completion_ids = select(Turn.completion_id).where(Turn.id.in_(ids))
    group_samples = select(Turn.id).where(Turn.completion_id.in_(completion_ids), Turn.origin == Origin.GROUP_SAMPLE)
    shadow_turns = select(Turn.id).where(Turn.shadow_of_id.in_(ids))
    return sorted({*ids, *await session.scalars(group_samples), *await session.scalars(shadow_turns)})


async def _stop_rollouts(session: AsyncSession, turn_ids: Sequence[str], reason: str) -> None:
    """Skip open rollouts, so that a running one cannot be recorded, and exclude the recorded ones from training."""
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


async def _lock_turns_and_rollouts(session: AsyncSession, turns: Sequence[Turn]) -> list[str]:
    """Lock the turns and their rollouts and return all their ids.

    Curation locks turns before samples as well, so no sample is created meanwhile. The given turns are locked first:
    group sampling holds that lock while it creates rollouts, so all of them are visible afterwards.
    """
    await lock_turns(session, [turn.id for turn in turns])
    ids = await _turn_and_rollout_ids(session, turns)
    await lock_turns(session, ids)
    return ids


async def _drop_samples(session: AsyncSession, turn_ids: Sequence[str], reason: str) -> None:
    """Drop the turns' samples, also from frozen batches that are not trained yet.

    A training run on such a batch, or a reward-model run on feedback about these turns, can no longer commit.
    """
    await unlearning.break_up_batches(session, turn_ids)
    await unlearning.restart_fits(session, turn_ids)
    await unlearning.drop_samples(
        session, turn_ids, (SampleState.OPEN, SampleState.QUARANTINED, SampleState.BATCHED), reason
    )
