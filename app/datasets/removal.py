"""The removal of datasets: one is hidden in the transaction of its act, and its rows are deleted in short ones later.

A dataset whose import has died is hidden in the same way. What a process that ends leaves, the reconciler removes.
"""

import logging
from functools import partial

from sqlalchemy import delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.models import Dataset, DatasetRow

log = logging.getLogger("attune.datasets")
DELETE_STEP = 500  # rows that are deleted in one transaction


def hide(dataset: Dataset) -> None:
    """Let nobody see the dataset any more, and give up its name. Its rows are deleted by `remove_hidden`."""
    dataset.name, dataset.importing_until = dataset.id, 0.0


async def remove_hidden(db: Database) -> int:
    """Delete the datasets that were hidden, or whose import has died, in short transactions; return how many."""
    async with db.read() as session:
        ids = list(
            await session.scalars(select(Dataset.id).where(Dataset.importing_until < now()).order_by(Dataset.id))
        )
    for id in ids:
        while await db.retry_on_deadlock(partial(_delete_rows, dataset_id=id)):
            await db.let_others_write()
    return len(ids)


async def try_remove_hidden(db: Database) -> None:
    """Delete them; what fails is left to the reconciler."""
    try:
        await remove_hidden(db)
    except SQLAlchemyError as error:
        log.warning("the rows of a dataset were not removed yet: %s", error)


async def _delete_rows(session: AsyncSession, dataset_id: str) -> bool:
    """Delete up to DELETE_STEP rows of the dataset, or the dataset once it has none; return whether rows were left."""
    is_dead = (Dataset.id == dataset_id, Dataset.importing_until < now())
    if await session.scalar(select(Dataset.id).where(*is_dead).with_for_update()) is None:
        return False
    numbers = select(DatasetRow.row_number).where(DatasetRow.dataset_id == dataset_id).limit(DELETE_STEP)
    of_step = (DatasetRow.dataset_id == dataset_id, DatasetRow.row_number.in_(numbers))
    if list(await session.scalars(delete(DatasetRow).where(*of_step).returning(DatasetRow.row_number))):
        return True
    await session.execute(delete(Dataset).where(Dataset.id == dataset_id))
    return False
