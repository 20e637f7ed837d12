"""Moves of samples between the lines of a policy's versions: they give back what they have learned from, or take it.

A rollback changes the deployment and the head at once, and stores a LineMove. The samples follow in steps of at most
STEP samples, each in a transaction of its own, so that votes and chats wait for no rollback, however many versions it
undoes. A small move ends in the transaction of the rollback itself. While a policy has a move, no batch is assembled.

The moves of a policy are made one after the other, in the order of the acts that stored them: another rollback or a
return meanwhile adds its own. So the samples end as if each act had waited for the moves of those before it.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import database_time
from app.core.jobs import enqueue_after_commit
from app.models import Batch, LineMove, Reward, SampleRule, Turn, Version
from app.policies.lines import LineVersion, compare_lines
from app.policies.locks import LockedPolicy
from app.policies.references import format_reference
from app.training import batch_samples
from app.training.automated_samples import is_from_person

STEP = 250  # samples that one transaction moves
MAX_VERSIONS = 200  # of a step
MAX_VERSIONS_IN_ACT = 8  # of the step in the transaction of the act, which also looks for people's feedback on them


class Step(NamedTuple):
    """The next step of a move: versions of a line that follow each other, as many as fit.

    `joins` says whether they take their samples back; otherwise they give them back. `judged` are those of them on
    whose replies a person had given explicit feedback when the move began. `is_last` says whether no
    other version is left that does the same.
    """

    move_id: int
    at_version_id: str
    versions: Sequence[LineVersion]
    joins: bool
    judged: Collection[str]
    is_last: bool

    @property
    def batch_ids(self) -> list[str]:
        return [version.batch_id for version in self.versions if version.batch_id is not None]


async def is_moving(session: AsyncSession, policy_id: str) -> bool:
    """Return whether samples of the policy are still to be moved."""
    return bool(await session.scalar(select(exists().where(LineMove.policy_id == policy_id))))


async def begin_move(locked: LockedPolicy, old_id: str, new_id: str, *, rejection: str | None = None) -> None:
    """Store the move of the policy's samples from one version to another. If it is the next, make its first steps.

    These are one of the versions that leave the line, and one of those that join it, so that a small move is finished.
    With `rejection`, the samples return for that reason, whoever has judged them.
    """
    session, policy = locked
    is_next = not await is_moving(session, policy.id)
    leaving, _ = await compare_lines(session, old_id, new_id)
    session.add(
        LineMove(
            policy_id=policy.id,
            at_version_id=old_id,
            to_version_id=new_id,
            undone_from=leaving[-1].number if leaving else 1,
            undone_to=leaving[0].number if leaving else 0,
            rejection=rejection,
            created_at=await database_time(session),
        )
    )
    await session.flush()
    if is_next and (step := await plan_step(session, policy.id, in_act=True)):
        await make_step(locked, step)
        if step.is_last and not step.joins and (step := await plan_step(session, policy.id, in_act=True)):
            await make_step(locked, step)
    if await is_moving(session, policy.id):
        enqueue_after_commit(session, "assemble")


async def plan_step(session: AsyncSession, policy_id: str, *, in_act: bool = False) -> Step | None:
    """Return the next step of the policy's samples, or None if no move is left. Needs no lock.

    `in_act`: the transaction of the rollback or return makes it.
    """
    moves = select(LineMove).where(LineMove.policy_id == policy_id).order_by(LineMove.id).limit(1)
    move = await session.scalar(moves.execution_options(populate_existing=True))
    if move is None:
        return None
    leaving, joining = await compare_lines(session, move.at_version_id, move.to_version_id)
    # From the newest version to the oldest, and from the oldest to the newest.
    ordered = leaving or joining[::-1]
    versions = await _take_first(session, ordered[: MAX_VERSIONS_IN_ACT if in_act else MAX_VERSIONS])
    judged: Collection[str] = ()
    if leaving and move.rejection is None:
        judged = await find_judged(session, versions, move.created_at)
    is_last = len(versions) == len(ordered)
    return Step(move.id, move.at_version_id, versions, not leaving, judged, is_last)


async def make_step(locked: LockedPolicy, step: Step) -> None:
    """Make the step, unless another process has made it."""
    session = locked.session
    move = await session.get(LineMove, step.move_id, populate_existing=True)
    if move is None or move.at_version_id != step.at_version_id:
        return
    last = step.versions[-1]
    if step.joins:
        move.after_turn_id = await batch_samples.reclaim_samples(locked, step.batch_ids, move.after_turn_id, STEP)
        if move.after_turn_id is None:
            move.at_version_id = last.id
    elif await _undo(locked, move, step):
        assert last.parent_id is not None, "a version that leaves a line has a parent in the other one"
        move.at_version_id, move.undone_to = last.parent_id, last.number - 1
    if move.at_version_id == move.to_version_id:
        await session.delete(move)
    await session.flush()


async def _take_first(session: AsyncSession, versions: Sequence[LineVersion]) -> list[LineVersion]:
    """Return the first of the versions whose batches have at most STEP samples together, and at least one."""
    ids = [version.batch_id for version in versions if version.batch_id is not None]
    rows = await session.execute(select(Batch.id, Batch.num_samples).where(Batch.id.in_(ids)))
    sizes: dict[str | None, int] = {id: size for id, size in rows}
    taken, total = list(versions[:1]), sizes.get(versions[0].batch_id, 0)
    for version in versions[1:]:
        total += sizes.get(version.batch_id, 0)
        if total > STEP:
            break
        taken.append(version)
    return taken


async def _undo(locked: LockedPolicy, move: LineMove, step: Step) -> bool:
    """Return or drop what these versions have learned from, at most STEP samples. Returns whether that was all."""
    if move.rejection is not None:
        rule = SampleRule.VERSION_REJECTED
        return await batch_samples.return_samples(locked, step.batch_ids, move.rejection, rule, STEP)
    reasons: dict[str, str] = {}
    unjudged: list[str] = []
    for version in step.versions:
        if version.batch_id is not None and version.id in step.judged:
            name = format_reference(locked.policy.name, version.number)
            reasons[version.batch_id] = f"{name} learned from it; people judged that version, and it was undone"
        elif version.batch_id is not None:
            unjudged.append(version.batch_id)
    rule = SampleRule.ROLLED_BACK
    are_dropped = await batch_samples.drop_trained(locked, reasons, rule, STEP)
    are_returned = await batch_samples.return_samples(locked, unjudged, batch_samples.UNDONE, rule, STEP)
    return are_dropped and are_returned


async def find_judged(session: AsyncSession, versions: Sequence[LineVersion], time: float) -> set[str]:
    """Return those of the versions on whose replies a person had given explicit feedback by then."""
    by_then = (Reward.turn_id == Turn.id, Reward.created_at <= time, is_from_person())
    judged = exists().where(Turn.version_id == Version.id, *by_then)
    rows = await session.scalars(select(Version.id).where(Version.id.in_([row.id for row in versions]), judged))
    return set(rows)
