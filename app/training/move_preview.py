"""What moves of samples would do, from reads alone: a preview must not hold SQLite's writer as long as they take.

The rules are those of `app.training.batch_samples`; a test compares the results for many sequences of moves.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked, database_time
from app.models import BatchTurn, LineMove, Rater, RaterStanding, Reward, Sample, SampleRule, SampleState, Turn
from app.policies.lines import compare_lines
from app.training import batch_samples, refused_rewards
from app.training.automated_samples import read_voted
from app.training.line_moves import find_judged

RECLAIMABLE = (SampleState.OPEN, SampleState.QUARANTINED, SampleState.TRAINED)


class MovedSamples(NamedTuple):
    """How many samples the versions that leave a line give back or drop, and those that join it take back."""

    returned: int = 0
    dropped: int = 0
    reclaimed: int = 0


class _Move(NamedTuple):
    """The batches that are undone and those that are taken back, the oldest first; `judged` people have judged."""

    leaving: frozenset[str]
    joining: Sequence[str]
    judged: Collection[str]


@dataclass
class _Sample:
    state: str
    rule: str | None
    batch_id: str | None
    num_returns: int
    is_lost: bool  # its turn is deleted or excluded, or its only rater is blocked
    is_quarantined: bool
    is_voted: bool


async def count_moved(session: AsyncSession, policy_id: str, old_id: str, new_id: str) -> MovedSamples:
    """Return what a move of the head from one version to another would do, after the moves that are not finished."""
    if old_id == new_id:
        return MovedSamples()
    pending = await session.scalars(select(LineMove).where(LineMove.policy_id == policy_id).order_by(LineMove.id))
    moves = [
        await _read_move(session, move.at_version_id, move.to_version_id, move.created_at, move.rejection is not None)
        for move in list(pending)
    ]
    moves.append(await _read_move(session, old_id, new_id, await database_time(session)))
    turns_of = await _read_turns(session, {id for move in moves for id in (*move.leaving, *move.joining)})
    samples = await _read_samples(session, {turn for turns in turns_of.values() for turn in turns})
    for move in moves:
        _undo(samples, move)
        for batch_id in move.joining:
            _reclaim(samples, batch_id, turns_of.get(batch_id, {}))
    last = moves[-1]
    left = [samples[id].state for id in _turns(turns_of, last.leaving) if id in samples]
    joined = [samples[id].state for id in _turns(turns_of, last.joining) if id in samples]
    num_dropped = left.count(SampleState.DROPPED)
    return MovedSamples(
        len(left) - num_dropped - left.count(SampleState.TRAINED), num_dropped, joined.count(SampleState.TRAINED)
    )


async def _read_move(session: AsyncSession, old_id: str, new_id: str, time: float, is_rejection: bool = False) -> _Move:
    leaving, joining = await compare_lines(session, old_id, new_id)
    judged: set[str] = set() if is_rejection else await find_judged(session, leaving, time)
    return _Move(
        frozenset(version.batch_id for version in leaving if version.batch_id is not None),
        [version.batch_id for version in joining[::-1] if version.batch_id is not None],
        {version.batch_id for version in leaving if version.id in judged and version.batch_id is not None},
    )


async def _read_turns(session: AsyncSession, batch_ids: Collection[str]) -> dict[str, dict[str, bool]]:
    """Return the turns of each batch, and whether its reward was automated."""
    turns_of: dict[str, dict[str, bool]] = {}
    for chunk in chunked(batch_ids):
        columns = (BatchTurn.batch_id, BatchTurn.turn_id, BatchTurn.automated)
        rows = await session.execute(select(*columns).where(BatchTurn.batch_id.in_(chunk)))
        for batch_id, turn_id, automated in rows:
            turns_of.setdefault(batch_id, {})[turn_id] = automated
    return turns_of


def _turns(turns_of: dict[str, dict[str, bool]], batch_ids: Collection[str]) -> set[str]:
    return {turn_id for batch_id in batch_ids for turn_id in turns_of.get(batch_id, {})}


async def _read_samples(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, _Sample]:
    blocked = await _find_blocked(session, turn_ids)
    quarantined = await refused_rewards.find_quarantined(session, turn_ids)
    voted = await read_voted(session, turn_ids)
    samples: dict[str, _Sample] = {}
    for chunk in chunked(turn_ids):
        columns = (Sample.turn_id, Sample.state, Sample.rule, Sample.batch_id, Sample.num_returns)
        query = select(*columns, Turn.deleted_at, Turn.exclusion_reason).join(Turn, Turn.id == Sample.turn_id)
        for row in await session.execute(query.where(Sample.turn_id.in_(chunk))):
            is_unusable = row.deleted_at is not None or row.exclusion_reason is not None
            samples[row.turn_id] = _Sample(
                # A batch that is open is broken up before the samples move.
                SampleState.OPEN if row.state == SampleState.BATCHED else row.state,
                row.rule,
                None if row.state == SampleState.BATCHED else row.batch_id,
                row.num_returns,
                is_unusable or row.turn_id in blocked,
                row.turn_id in quarantined,
                row.turn_id in voted,
            )
    return samples


async def _find_blocked(session: AsyncSession, turn_ids: Collection[str]) -> set[str]:
    """Return the turns with a reward of a blocked rater and without another one that counts."""
    blocked: set[str] = set()
    is_blocked = func.coalesce(Rater.standing, "") == RaterStanding.BLOCKED
    for chunk in chunked(turn_ids):
        rows = await session.execute(
            select(Reward.turn_id, is_blocked, Reward.weight)
            .join(Turn, Turn.id == Reward.turn_id)
            .outerjoin(Rater, (Rater.project_id == Turn.project_id) & (Rater.name == Reward.rater))
            .where(Reward.turn_id.in_(chunk))
        )
        rewards = rows.all()
        counts = {turn_id for turn_id, by_blocked, weight in rewards if not by_blocked and weight > 0}
        blocked |= {turn_id for turn_id, by_blocked, _ in rewards if by_blocked} - counts
    return blocked


def _undo(samples: dict[str, _Sample], move: _Move) -> None:
    for sample in samples.values():
        if sample.state != SampleState.TRAINED or sample.batch_id not in move.leaving:
            continue
        is_dropped = sample.batch_id in move.judged or sample.is_lost or sample.num_returns >= batch_samples.MAX_RETURNS
        sample.rule = SampleRule.ERASED if sample.is_lost and sample.batch_id not in move.judged else None
        sample.batch_id = None
        if is_dropped:
            sample.state, sample.rule = SampleState.DROPPED, sample.rule or SampleRule.ROLLED_BACK
        else:
            sample.state = SampleState.QUARANTINED if sample.is_quarantined else SampleState.OPEN
            sample.num_returns += 1


def _reclaim(samples: dict[str, _Sample], batch_id: str, turns: dict[str, bool]) -> None:
    for turn_id, automated in turns.items():
        sample = samples.get(turn_id)
        if sample is None or sample.state == SampleState.TRAINED or (automated and sample.is_voted):
            continue
        is_free = sample.state in RECLAIMABLE or sample.rule not in (None, *batch_samples.NEVER_RECLAIMED)
        if is_free:
            sample.state, sample.rule, sample.batch_id = SampleState.TRAINED, None, batch_id
