"""Create and read episodes."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.episode_limits import NUM_TOKENS, NUM_TURNS
from app.core.database import dialect_insert, now
from app.core.errors import Conflict, NotFound, Unprocessable, require_row
from app.core.pagination import apply_keyset
from app.core.rows import AnyRow, AnySelect
from app.core.settings import Settings
from app.episodes.fingerprints import fingerprint_of
from app.episodes.schemas import EpisodeGroup, EpisodeLimits, EpisodeRequest, EpisodeView
from app.models import ANSWERING, Episode, EpisodeSampling, EpisodeState, Policy, Version, VersionRule, new_id
from app.policies import repository as policies
from app.policies.overrides import effective_settings
from app.policies.references import format_reference
from app.projects.auth import Caller
from app.projects.episode_keys import derive_key
from app.projects.service import digest_key


@dataclass(frozen=True)
class EpisodeFilter:
    """Which episodes are listed. A field that is None restricts nothing."""

    policy: str | None = None
    task: str | None = None
    group: str | None = None
    state: str | None = None


async def create(
    session: AsyncSession,
    settings: Settings,
    caller: Caller,
    caller_key: str,
    request: EpisodeRequest,
    idempotency_key: str | None,
) -> tuple[EpisodeView, str, bool]:
    """Create an episode. Returns its view, its key, and whether an earlier request of the same key created it.

    A repeated request returns its episode, whatever has become of the policy and of the group since. Raises NotFound
    for an unknown policy, Unprocessable for an Idempotency-Key that was used with another body, and Conflict for a
    group of another policy, task or size, or that is full.
    """
    fingerprint = fingerprint_of(request)
    created_before = await _find_created(session, caller, idempotency_key, fingerprint)
    if created_before is not None:
        view = await get(session, caller.project_id, created_before)
        return view, derive_key(caller_key, created_before), True
    policy = await policies.find_policy(session, caller.project_id, request.policy)
    policy = require_row(policy, f"There is no policy '{request.policy}'.", param="policy")
    if policy.state not in ANSWERING:
        message = f"Policy '{policy.name}' is archived and answers no chats."
        raise NotFound(message, code="policy_archived", param="policy")
    id = new_id("ep")
    limits, group = request.limits, request.group
    if group is not None:
        await _require_same_group(session, caller.project_id, policy.id, request.task, group)
    insert = dialect_insert(session, Episode).values(
        id=id,
        project_id=caller.project_id,
        policy_id=policy.id,
        key_id=caller.key_id,
        key_sha256=digest_key(derive_key(caller_key, id)),
        task=request.task,
        group_id=group.id if group is not None else None,
        group_size=group.size if group is not None else None,
        trace_id=request.trace_id,
        request_metadata=request.metadata,
        sampling=request.sampling,
        version_rule=request.version,
        max_staleness=effective_settings(policy, settings).trainer.max_staleness,
        service_tier=None if request.service_tier == "auto" else request.service_tier,
        state=EpisodeState.OPEN,
        idle_seconds=limits.idle_seconds,
        deadline_at=now() + limits.deadline_seconds,
        max_turns=limits.max_turns,
        max_tokens=limits.max_tokens,
        idempotency_key=idempotency_key,
        fingerprint=fingerprint,
        created_at=now(),
    )
    await session.execute(insert.on_conflict_do_nothing())
    # Another request of the same key may have been faster.
    created = await _find_created(session, caller, idempotency_key, fingerprint) or id
    return await get(session, caller.project_id, created), derive_key(caller_key, created), created != id


async def _find_created(
    session: AsyncSession, caller: Caller, idempotency_key: str | None, fingerprint: str
) -> str | None:
    """Return the id of the episode that this Idempotency-Key has created. Raises Unprocessable for another body."""
    if idempotency_key is None:
        return None
    same_key = (Episode.key_id == caller.key_id, Episode.idempotency_key == idempotency_key)
    created = (await session.execute(select(Episode.id, Episode.fingerprint).where(*same_key))).tuples().one_or_none()
    if created is None:
        return None
    episode_id, first_fingerprint = created
    if first_fingerprint != fingerprint:
        message = "This Idempotency-Key was used with another body; use a new one for each episode."
        raise Unprocessable(message, code="idempotency_key_reused", param="Idempotency-Key")
    return episode_id


async def _require_same_group(
    session: AsyncSession, project_id: str, policy_id: str, task: str | None, group: EpisodeGroup
) -> None:
    """Raise Conflict unless the other attempts of the group have the same policy, task and size, and are not too many.

    All of them are read whenever one of them has a new reward.
    """
    columns = (Episode.policy_id, Episode.task, Episode.group_size)
    of_group = select(*columns).where(Episode.project_id == project_id, Episode.group_id == group.id)
    other = (await session.execute(of_group.order_by(Episode.created_at, Episode.id).limit(1))).one_or_none()
    wanted = (policy_id, task, group.size)
    if other is None:
        return
    if tuple(other) == wanted:
        num_attempts = select(func.count()).where(Episode.project_id == project_id, Episode.group_id == group.id)
        if (await session.scalar(num_attempts) or 0) >= 2 * group.size:
            message = f"The group '{group.id}' has {2 * group.size} attempts, twice its size; name another group."
            raise Conflict(message, code="episode_group_full", param="group")
        return
    names = ("policy", "task", "size")
    differs = [name for name, one, two in zip(names, other, wanted, strict=True) if one != two]
    message = (
        f"The group '{group.id}' has attempts of another {' and another '.join(differs)}. A group is of attempts at "
        "the same task; name another group."
    )
    raise Conflict(message, code="episode_group", param="group")


async def get(session: AsyncSession, project_id: str, episode_id: str) -> EpisodeView:
    """Return the view of an episode. Raises NotFound."""
    query = _select_episodes(project_id).where(Episode.id == episode_id)
    row = (await session.execute(query)).one_or_none()
    return _view(require_row(row, f"There is no episode '{episode_id}'.", param="episode_id"))


async def get_many(session: AsyncSession, project_id: str, episode_ids: Collection[str]) -> dict[str, EpisodeView]:
    """Return the views of these episodes of the project by id. Unknown ones are left out."""
    query = _select_episodes(project_id).where(Episode.id.in_(episode_ids)).order_by(Episode.id)
    views = [_view(row) for row in await session.execute(query)]
    return {view.id: view for view in views}


async def list_page(
    session: AsyncSession,
    project_id: str,
    wanted: EpisodeFilter,
    *,
    after: str | None,
    limit: int,
    newest_first: bool,
) -> list[EpisodeView]:
    """Return up to `limit + 1` episodes by creation time. Raises NotFound for an unknown `after` or policy."""
    query = _select_episodes(project_id)
    if wanted.policy is not None:
        policy = await policies.find_policy(session, project_id, wanted.policy)
        policy = require_row(policy, f"There is no policy '{wanted.policy}'.", param="policy")
        query = query.where(Episode.policy_id == policy.id)
    if wanted.task is not None:
        query = query.where(Episode.task == wanted.task)
    if wanted.group is not None:
        query = query.where(Episode.group_id == wanted.group)
    if wanted.state is not None:
        query = query.where(Episode.state == wanted.state)
    last: Any = None
    if after is not None:
        of_last = select(Episode.created_at, Episode.id).where(Episode.id == after, Episode.project_id == project_id)
        row = (await session.execute(of_last)).one_or_none()
        last = tuple(require_row(row, f"There is no episode '{after}'.", param="after"))
    query = apply_keyset(query, (Episode.created_at, Episode.id), last, limit, descending=newest_first)
    return [_view(row) for row in await session.execute(query)]


def _select_episodes(project_id: str) -> AnySelect:
    return (
        select(Episode, Policy.name, Version.number, NUM_TURNS.label("num_turns"), NUM_TOKENS.label("num_tokens"))
        .join(Policy, Policy.id == Episode.policy_id)
        .outerjoin(Version, Version.id == Episode.start_version_id)
        .where(Episode.project_id == project_id)
    )


def _view(row: AnyRow) -> EpisodeView:
    episode, policy, number, num_turns, num_tokens = row
    return EpisodeView(
        **{
            name: getattr(episode, name)
            for name in (
                "id",
                "task",
                "trace_id",
                "state",
                "end_reason",
                "reported_reason",
                "outcome",
                "created_at",
                "deadline_at",
                "ended_at",
            )
        },
        policy=policy,
        group=None if episode.group_id is None else EpisodeGroup(id=episode.group_id, size=episode.group_size),
        metadata=episode.request_metadata,
        start_version=None if number is None else format_reference(policy, number),
        num_turns=num_turns,
        num_tokens=num_tokens,
        sampling=episode.sampling or EpisodeSampling.REQUEST,
        service_tier=episode.service_tier or "auto",
        version=episode.version_rule or VersionRule.FOLLOW,
        limits=EpisodeLimits(
            idle_seconds=episode.idle_seconds,
            deadline_seconds=round(episode.deadline_at - episode.created_at, 3),
            max_turns=episode.max_turns,
            max_tokens=episode.max_tokens,
        ),
    )
