"""Queries on stored completions. A deleted one is not there."""

from collections.abc import Mapping, Sequence

from sqlalchemy import and_, delete, exists, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.consent import NO_CONSENT, withholds
from app.db import now
from app.models import Policy, Sample, SampleState, Turn, TurnPair, TurnState, Version

Stored = tuple[list[Turn], Policy, Version]


async def completion(session: AsyncSession, project_id: str, completion_id: str) -> Stored | None:
    found = await session.execute(
        select(Turn, Policy, Version)
        .join(Policy, Policy.id == Turn.policy_id)
        .join(Version, Version.id == Turn.version_id)
        .where(Turn.completion_id == completion_id, Turn.project_id == project_id, Turn.deleted_at.is_(None))
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
    if model is not None:
        policy_id, version_id = model
        wanted.append(Turn.policy_id == policy_id)
        if version_id is not None:
            wanted.append(Turn.version_id == version_id)
    for key, value in pairs.items():
        mine = and_(TurnPair.turn_id == Turn.id, TurnPair.key == key, TurnPair.value == value)
        wanted.append(exists().where(mine, TurnPair.project_id == project_id))
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
        .where(Turn.completion_id.in_(ids))
        .order_by(Turn.choice_index)
    )
    found: dict[str, Stored] = {}
    for turn, policy, version in rows:
        found.setdefault(turn.completion_id, ([], policy, version))[0].append(turn)
    return [found[id] for id in ids]


async def replace_pairs(session: AsyncSession, turns: Sequence[Turn], pairs: Mapping[str, str]) -> None:
    first = turns[0]
    await session.execute(delete(TurnPair).where(TurnPair.turn_id == first.id))
    for key, value in pairs.items():
        session.add(TurnPair(turn_id=first.id, project_id=first.project_id, key=key, value=value))
    for turn in turns:
        turn.details = dict(pairs)
        if withholds(pairs):
            turn.flaw = turn.flaw or NO_CONSENT
    if withholds(pairs):
        await _drop_samples(session, [turn.id for turn in turns], NO_CONSENT)


async def erase(session: AsyncSession, turns: Sequence[Turn]) -> None:
    """What was said goes; that something was said, when, at what cost and by which version stays."""
    ids = [turn.id for turn in turns]
    await session.execute(delete(TurnPair).where(TurnPair.turn_id.in_(ids)))
    await _drop_samples(session, ids, "its turn was deleted")
    await session.execute(
        update(Turn)
        .where(Turn.id.in_(ids))
        .values(
            state=TurnState.ABORTED if turns[0].state == TurnState.OPEN else Turn.state,
            messages=[],
            asked={},
            details={},
            reply=None,
            prompt_ids=None,
            output_ids=None,
            logprobs=None,
            thread=None,
            end_user=None,
            request_sha256=None,
            flaw="deleted",
            deleted_at=now(),
        )
        .execution_options(synchronize_session=False)
    )


async def _drop_samples(session: AsyncSession, turn_ids: Sequence[str], reason: str) -> None:
    await session.execute(
        update(Sample)
        .where(Sample.turn_id.in_(turn_ids), Sample.state.in_((SampleState.OPEN, SampleState.BATCHED)))
        .values(state=SampleState.DROPPED, reason=reason)
        .execution_options(synchronize_session=False)
    )
