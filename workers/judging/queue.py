"""Which judgements are due, and the taking of them: a few at a time, and no source more than its share.

What a reward model is asked is not taken here: the trainer has it, see `workers.judging.sources.reward_model`.
"""

from collections import Counter
from collections.abc import Collection

from sqlalchemy import ColumnElement, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED, JudgeSource
from app.core import leases
from app.core.database import Database, now
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Policy, Turn
from app.training.policy_rewards import rewards_of
from workers.judging.request import Claim

AT_ONCE = 16
OF_ONE_SOURCE = 4  # so that one that is slow leaves room for the others
Line = tuple[str, str]  # a policy and the name of one of its sources


async def take(
    db: Database, settings: Settings, owner: str, busy: Counter[Line], resting: Collection[Line]
) -> list[tuple[Claim, ...]]:
    """Claim what is due, as far as there is room; replies that are compared with one another come together."""
    taken: list[tuple[Claim, ...]] = []
    busy = busy.copy()
    async with db.write() as session:
        while (room := AT_ONCE - busy.total()) > 0:
            closed = {line for line, count in busy.items() if count >= OF_ONE_SOURCE} | set(resting)
            found = await _due(session, room, closed)
            for row in found:
                if busy[row.policy_id, row.source] >= OF_ONE_SOURCE:
                    continue
                claims = await _claim(session, settings, owner, row)
                if claims:
                    busy[row.policy_id, row.source] += 1
                    taken.append(claims)
            if len(found) < room:
                break
    return taken


async def _due(session: AsyncSession, most: int, closed: Collection[Line]) -> list[Judgement]:
    elsewhere: list[ColumnElement[bool]] = [Judgement.source != LEARNED]
    if closed:
        elsewhere.append(tuple_(Judgement.policy_id, Judgement.source).not_in(sorted(closed)))
    rows = await session.scalars(
        select(Judgement)
        .where(Judgement.state == JudgementState.OPEN, Judgement.due_at <= now(), lease_is_free(Judgement), *elsewhere)
        .order_by(Judgement.due_at, Judgement.id)
        .limit(most)
        .with_for_update(skip_locked=True)
    )
    return list(rows)


async def _claim(session: AsyncSession, settings: Settings, owner: str, row: Judgement) -> tuple[Claim, ...]:
    claims = [await _take(session, settings, owner, row)]
    if claims[0] is not None and await _compares(session, settings, row):
        claims += [await _take(session, settings, owner, other) for other in await _beside(session, row)]
    return tuple(claim for claim in claims if claim is not None)


async def _take(session: AsyncSession, settings: Settings, owner: str, row: Judgement) -> Claim | None:
    fence = await leases.claim(
        session, Judgement, row.id, owner=owner, seconds=settings.lease_seconds, states=(JudgementState.OPEN,)
    )
    if fence is None:
        return None
    return Claim(row.id, fence, row.attempt + 1, row.turn_id, row.policy_id, row.source, row.details.get("asks", 0))


async def _compares(session: AsyncSession, settings: Settings, row: Judgement) -> bool:
    policy = await session.get_one(Policy, row.policy_id)
    source = rewards_of(policy, settings).source(row.source)
    return isinstance(source, JudgeSource) and source.compare


async def _beside(session: AsyncSession, row: Judgement) -> list[Judgement]:
    """The same question about the other replies of the same completion."""
    completion_id = select(Turn.completion_id).where(Turn.id == row.turn_id).scalar_subquery()
    rows = await session.scalars(
        select(Judgement)
        .join(Turn, Turn.id == Judgement.turn_id)
        .where(
            Turn.completion_id == completion_id,
            Judgement.source == row.source,
            Judgement.id != row.id,
            Judgement.state == JudgementState.OPEN,
            lease_is_free(Judgement),
        )
        .order_by(Judgement.id)
        .with_for_update(of=Judgement, skip_locked=True)
    )
    return list(rows)
