"""Queries on stored completions: chat turns that are not deleted. Rollouts are no completions."""

from collections.abc import Mapping, Sequence
from functools import partial

from sqlalchemy import ColumnElement, and_, case, delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat import histories
from app.core.database import now
from app.core.errors import NotFound
from app.core.pagination import apply_keyset
from app.deployments.routes import resolve_model
from app.models import (
    REQUESTED,
    Judgement,
    Origin,
    Policy,
    Rollout,
    RolloutState,
    SampleRule,
    SampleState,
    Turn,
    TurnMetadata,
    TurnState,
    Version,
    lock_turns,
)
from app.policies.locks import lock_policies, lock_policy
from app.policies.references import parse_reference
from app.projects.service import NO_CONSENT, withholds_consent
from app.training import unlearning
from app.training.vote_totals import reopen_votes_on_turns

ERASED_COLUMNS = (
    *("history_id", "reply", "own_prompt_ids", "output_ids", "logprobs"),
    *("prefix_hash", "end_user", "request_sha256", "agent", "state_key", "trace_id", "span_id"),
)
CompletionRows = tuple[list[Turn], Policy, Version]


async def get_completion(
    session: AsyncSession, project_id: str, completion_id: str, param: str = "completion_id"
) -> CompletionRows:
    """Return the choices of a completion in order, its policy and its version. Raises NotFound that names `param`."""
    conditions = (Turn.completion_id == completion_id, Turn.project_id == project_id, Turn.deleted_at.is_(None))
    completions = await _load_completions(session, *conditions)
    if not completions:
        raise NotFound(f"There is no completion '{completion_id}'.", param=param)
    return completions[completion_id]


async def list_completions(
    session: AsyncSession,
    project_id: str,
    model: str | None,
    metadata: Mapping[str, str],
    *,
    after: str | None,
    newest_first: bool,
    limit: int,
) -> list[CompletionRows]:
    """Return up to `limit + 1` completions, ordered by creation time. Raises NotFound.

    Args:
        model: A policy or a version, as a chat names it.
        metadata: Pairs that all must match.
        after: The last completion of the previous page.
    """
    first_choice = (Turn.choice_index == 0, Turn.origin.in_(REQUESTED))
    conditions = [Turn.project_id == project_id, Turn.deleted_at.is_(None), *first_choice]
    if model is not None:
        resolve = partial(resolve_model, project_id=project_id, model=model, archived=True)
        resolved = await (await session.connection()).run_sync(resolve)
        conditions.append(Turn.policy_id == resolved.policy_id)
        if parse_reference(model).names_version:
            conditions.append(Turn.version_id == resolved.version_id)
    for key, value in metadata.items():
        has_pair = and_(TurnMetadata.turn_id == Turn.id, TurnMetadata.key == key, TurnMetadata.value == value)
        conditions.append(exists().where(has_pair, TurnMetadata.project_id == project_id))
    last = None
    if after is not None:
        [last, *_], _, _ = await get_completion(session, project_id, after, param="after")
    query = select(Turn.completion_id).where(*conditions)
    query = apply_keyset(query, (Turn.created_at, Turn.id), last, limit, descending=newest_first)
    ids = list(await session.scalars(query))
    completions = await _load_completions(session, Turn.completion_id.in_(ids))
    return [completions[id] for id in ids]


async def _load_completions(session: AsyncSession, *conditions: ColumnElement[bool]) -> dict[str, CompletionRows]:
    """Return the completions with these turns, by id."""
    rows = await session.execute(
        select(Turn, Policy, Version)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(*conditions, Turn.origin.in_(REQUESTED))
        .order_by(Turn.completion_id, Turn.choice_index)
    )
    completions: dict[str, CompletionRows] = {}
    for turn, policy, version in rows:
        completions.setdefault(turn.completion_id, ([], policy, version))[0].append(turn)
    return completions


async def replace_metadata(
    session: AsyncSession,
    project_id: str,
    completion_id: str,
    metadata: Mapping[str, str],
    pairs: Mapping[str, str] | None = None,
) -> CompletionRows:
    """Replace the metadata of a completion. If it withdraws the consent to train, drop its samples and rollouts.

    `pairs`: what the completion is found by, if that is more than the metadata. Raises NotFound.
    """
    rows = await get_completion(session, project_id, completion_id)
    turns, policy, _ = rows
    if withholds_consent(metadata):
        await lock_policy(session, policy.id)  # before its turns, which change here already
    first = turns[0]
    await session.execute(delete(TurnMetadata).where(TurnMetadata.turn_id == first.id))
    for key, value in (metadata if pairs is None else pairs).items():
        session.add(TurnMetadata(turn_id=first.id, project_id=first.project_id, key=key, value=value))
    for turn in turns:
        turn.request_metadata = dict(metadata)
        if withholds_consent(metadata):
            turn.exclusion_reason = NO_CONSENT  # replaces any other reason, so that reports on consent find it
    if withholds_consent(metadata):
        await _exclude_turns(session, turns, NO_CONSENT)
    return rows


async def erase(session: AsyncSession, turns: Sequence[Turn]) -> None:
    """Erase messages, replies, tokens and metadata. Time, token counts and version of each turn stay.

    Other turns that share messages or tokens with these keep their whole prompts.
    """
    ids = await _exclude_turns(session, turns, "its turn was deleted")
    await histories.detach(session, ids)
    await session.execute(delete(TurnMetadata).where(TurnMetadata.turn_id.in_(ids)))
    await session.execute(  # a judge's reason may quote the reply
        update(Judgement).where(Judgement.turn_id.in_(ids)).values(details={}, reason=None)
    )
    await session.execute(
        update(Turn)
        .where(Turn.id.in_(ids))
        .values(
            state=case((Turn.state == TurnState.OPEN, TurnState.ABORTED), else_=Turn.state),
            own_messages=[],
            num_history_messages=0,
            num_history_tokens=0,
            request_params={},
            request_metadata={},
            **dict.fromkeys(ERASED_COLUMNS),
            exclusion_reason="deleted",
            deleted_at=now(),
        )
    )


async def _exclude_turns(session: AsyncSession, turns: Sequence[Turn], reason: str) -> list[str]:
    """Drop the samples of these turns and of the rollouts to the same prompts. Returns the ids of all of them, locked.

    The policies are locked before the turns, as by an erasure. Curation locks turns before samples as well, so no
    sample is created meanwhile. The given turns are locked first: group sampling holds that lock while it creates
    rollouts, so all of them are visible afterwards.

    Samples are also dropped from frozen batches that are not trained yet. A training run on such a batch, or a
    reward-model run on feedback about these turns, can no longer commit.
    """
    turn_ids = [turn.id for turn in turns]
    policy_ids = select(Turn.policy_id).where(Turn.id.in_(turn_ids)).distinct()
    policies = await lock_policies(session, list(await session.scalars(policy_ids.order_by(Turn.policy_id))))
    await lock_turns(session, turn_ids)
    completion_ids = select(Turn.completion_id).where(Turn.id.in_(turn_ids))
    group_samples = select(Turn.id).where(Turn.completion_id.in_(completion_ids), Turn.origin == Origin.GROUP_SAMPLE)
    shadow_turns = select(Turn.id).where(Turn.shadow_of_id.in_(turn_ids))
    ids = sorted({*turn_ids, *await session.scalars(group_samples), *await session.scalars(shadow_turns)})
    await lock_turns(session, ids)
    await unlearning.break_up_batches(session, policies, ids)
    await unlearning.restart_fits(session, ids)
    states = (SampleState.OPEN, SampleState.QUARANTINED, SampleState.BATCHED)
    await unlearning.drop_samples(session, ids, states, SampleRule.ERASED, reason)
    await reopen_votes_on_turns(session, ids)
    await _stop_rollouts(session, ids, reason)
    return ids


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
    )
    await session.execute(
        update(Turn)
        .where(Turn.id.in_(turn_ids), Turn.origin.in_((Origin.GROUP_SAMPLE, Origin.SHADOW)))
        .values(
            state=case((Turn.state == TurnState.OPEN, TurnState.ABORTED), else_=Turn.state),
            exclusion_reason=reason if reason == NO_CONSENT else func.coalesce(Turn.exclusion_reason, reason),
            finished_at=func.coalesce(Turn.finished_at, now()),
        )
    )
