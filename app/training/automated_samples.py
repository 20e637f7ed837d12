"""Samples with automated rewards, such as a reward model's score, and the feedback that replaces such a reward once.

A batch with a sample whose reward is automated says so (`BatchTurn.automated`). If a person gives feedback on the
reply after the update, curation opens the sample again with that feedback, and `Sample.automated_batch_id` names the
batch that has learned from the automated reward. It is null again where that batch's version leaves the head's line.
"""

from collections.abc import Collection, Mapping

from sqlalchemy import ColumnElement, and_, exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import EXPLICIT
from app.core.database import chunked
from app.models import BatchTurn, Reward, Sample, SampleState
from app.raters.names import is_program


def is_from_person() -> ColumnElement[bool]:
    """Return the condition that a Reward is a person's explicit feedback."""
    return and_(Reward.reward_source == EXPLICIT, Reward.rater.is_not(None), ~is_program(Reward.rater))


def is_in_automated_batch() -> ColumnElement[bool]:
    """Return the condition that a Sample is in a batch with an automated reward."""
    in_batch = exists().where(
        BatchTurn.batch_id == Sample.batch_id, BatchTurn.turn_id == Sample.turn_id, BatchTurn.automated
    )
    return in_batch.correlate(Sample)


async def find_voted(session: AsyncSession, batch_id: str) -> list[str]:
    """Return the turns with automated rewards of a batch on which a person has given feedback meanwhile."""
    has_vote = exists().where(Reward.turn_id == BatchTurn.turn_id, Reward.weight > 0, is_from_person())
    turns = select(BatchTurn.turn_id).where(BatchTurn.batch_id == batch_id, BatchTurn.automated, has_vote)
    return list(await session.scalars(turns.order_by(BatchTurn.turn_id)))


async def find_replaceable(session: AsyncSession, turn_ids: Collection[str]) -> set[str]:
    """Return those of the turns whose samples an update has learned from with an automated reward."""
    replaceable: set[str] = set()
    for chunk in chunked(turn_ids):
        is_trained = (Sample.turn_id.in_(chunk), Sample.state == SampleState.TRAINED, is_in_automated_batch())
        replaceable.update(await session.scalars(select(Sample.turn_id).where(*is_trained)))
    return replaceable


async def read_voted(session: AsyncSession, turn_ids: Collection[str]) -> set[str]:
    """Return those of the turns on which a person's feedback counts."""
    voted: set[str] = set()
    for chunk in chunked(turn_ids):
        has_vote = (Reward.turn_id.in_(chunk), Reward.weight > 0, is_from_person())
        voted.update(await session.scalars(select(Reward.turn_id).where(*has_vote)))
    return voted


async def forget_batches(session: AsyncSession, batch_ids: Collection[str]) -> None:
    """Forget that these batches have learned from automated rewards that votes replace: their versions are undone."""
    of_batches = Sample.automated_batch_id.in_(batch_ids)
    await session.execute(update(Sample).where(of_batches).values(automated_batch_id=None))


def reclaim_automated(sample: Sample, automated: Mapping[str, str], voted: Collection[str]) -> bool:
    """Give the sample back to a batch that is live again, if that has learned from its automated reward.

    Returns whether a person's feedback on the reply keeps the sample where it is.

    Args:
        automated: The batch that has learned from the automated reward, by turn.
        voted: The turns on which a person's feedback counts.
    """
    if (batch_id := automated.get(sample.turn_id)) is None or batch_id == sample.batch_id:
        return False
    if sample.state != SampleState.TRAINED and sample.turn_id not in voted:
        return False
    sample.automated_batch_id = batch_id
    return True
