"""Columns of samples that copy what other tables say, so that the assembly reads samples alone.

They are known where `Sample.origin` is set. What changes the rewards behind a sample without computing it again clears
`origin`; code of an older release leaves it null. `fill_columns` reads them for the open samples without it.
"""

from sqlalchemy import ColumnElement, bindparam, exists, false, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import EXPLICIT
from app.core.database import chunked
from app.core.planner import read_by
from app.models import ApiKey, Origin, Project, Reward, Sample, SampleState, Turn


def is_open(sample: type[Sample] = Sample) -> ColumnElement[bool]:
    """Return the condition that a `sample` is open, with the value in the text of the statement.

    Only so does SQLite use the partial indexes of open samples.
    """
    return sample.state == bindparam(None, SampleState.OPEN.value, literal_execute=True)


async def fill_columns(session: AsyncSession, policy_id: str, limit: int) -> int:
    """Fill the columns of at most `limit` open samples of the policy in which they are not known. Return how many."""
    is_unknown = (Sample.policy_id == policy_id, is_open(), Sample.origin.is_(None))
    unknown = select(Sample.turn_id).where(*is_unknown).order_by(Sample.turn_id).limit(limit)
    turn_ids = list(await session.scalars(read_by(unknown, Sample, "ix_samples_to_fill")))
    has_feedback = exists().where(Reward.turn_id == Sample.turn_id, Reward.reward_source == EXPLICIT)
    is_automated = Sample.rater.is_(None) & ~has_feedback.correlate(Sample) & (Turn.origin != Origin.PROMPT_SET)
    values = {"origin": Turn.origin, "key_id": Turn.key_id, "replied_at": Turn.created_at, "is_automated": is_automated}
    changed_at = {"changed_at": Sample.changed_at}  # nothing that the assembly depends on has changed
    for chunk in chunked(turn_ids):
        are_chosen = (Sample.turn_id.in_(chunk), *is_unknown, Turn.id == Sample.turn_id)
        await session.execute(update(Sample).where(*are_chosen).values(values | changed_at))
    return len(turn_ids)


async def consenting_samples(
    session: AsyncSession, project_id: str, sample: type[Sample] = Sample
) -> ColumnElement[bool]:
    """Return the condition that the API key of a `sample`, or else the project, consents to training now.

    It is `sample_conditions.has_consent` for samples whose columns are known, without a look at their turns.
    """
    keys = select(ApiKey.id).where(ApiKey.project_id == project_id)
    if await session.scalar(select(Project.train).where(Project.id == project_id)):
        refuses = sample.key_id.in_(keys.where(ApiKey.train.is_(False)))
        return sample.key_id.is_(None) | ~refuses
    consents = keys.where(ApiKey.train.is_(True))
    if await session.scalar(consents.limit(1)) is None:
        return false()
    return sample.key_id.in_(consents)
