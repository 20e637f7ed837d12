"""What the status says that the next batch waits for, where it takes a plan of the batch to know."""

import re
from typing import Any

import pytest
from sqlalchemy import update

from app.core.database import now
from app.core.settings import Settings
from app.models import Sample
from app.training import service, waits
from app.training.sample_columns import fill_columns
from tests.support.deployment import Harness
from tests.support.settings import by_path
from tests.support.waiting_samples import add_samples
from workers.training.assemble import assemble


def with_settings(harness: Harness, **values: Any) -> Settings:
    return harness.settings.replace(by_path({"max_wait_seconds": 0.0, **values}))


async def explain(harness: Harness, settings: Settings) -> str:
    policy = await harness.policy()
    async with harness.db.read() as session:
        counts = await service.count_samples(session, policy, settings)
        return (await waits.explain_wait(session, policy, counts, settings, triggered=False)).sentence


async def add_waiting(harness: Harness, count: int, reward: float, prefix: str, **values: object) -> None:
    """Add ready samples, and prepare all that wait, as the assembly does at once."""
    await add_samples(harness, count, lambda number: reward, prefix, **values)
    async with harness.db.write() as session:
        await fill_columns(session, (await harness.policy()).id, 1000)


async def test_samples_that_are_enough_wait_for_nothing(harness: Harness) -> None:
    await add_waiting(harness, 3, 1.0, "up")
    await add_waiting(harness, 2, -1.0, "down")
    settings = with_settings(harness, min_batch_size=4)
    assert await explain(harness, settings) == "Nothing. 5 samples are about to be put into a batch."


async def test_samples_that_are_about_to_be_prepared_are_no_lack(harness: Harness) -> None:
    """Three samples of one rater and three in one conversation; a batch may have one sample of each."""
    settings = with_settings(harness, min_batch_size=3, max_rater_share=0.125, max_conversation_share=0.125)
    owners = ("a", "ada"), ("b", "ada"), ("c", "ada"), ("a", "bob"), ("a", "eve")
    for number, (conversation, rater) in enumerate(owners):
        owner = {"conversation_id": conversation, "rater": f"HUMAN/{rater}"}
        await add_waiting(harness, 1, (-1.0) ** number, f"t{number}", **owner)
    assert (await explain(harness, settings)).startswith("At least 3 more ready samples of other raters, conversations")
    await add_samples(harness, 1, lambda number: -1.0, "new")
    assert await explain(harness, settings) == "Nothing. New samples are about to be prepared."


async def test_no_batch_is_planned_where_more_samples_wait_than_are_counted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_waiting(harness, 5, 1.0, "up")
    await add_waiting(harness, 5, -1.0, "down")
    settings = with_settings(harness, min_batch_size=4)
    assert (await explain(harness, settings)).startswith("Nothing. ")
    monkeypatch.setattr(service, "MAX_COUNTED", 8)
    monkeypatch.delattr(waits, "plan_batch")
    assert await explain(harness, settings) == waits.TOO_MANY.sentence


async def test_samples_of_a_failed_batch_say_how_long_they_wait(harness: Harness) -> None:
    """A batch with them has four samples, one of each conversation, and fewer when they have waited. Others are two."""
    for number, conversation in enumerate("cd"):
        failed = {"num_failures": 1, "conversation_id": conversation}
        await add_waiting(harness, 1, (-1.0) ** number, f"f{number}", **failed)
    await add_waiting(harness, 1, 1.0, "new", conversation_id="e")
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(ready_at=now() - 100.0))
    await add_waiting(harness, 1, 1.0, "old", conversation_id="c")
    values = {
        "max_wait_seconds": 300.0,
        "max_rater_share": 1.0,
        "max_conversation_share": 0.25,
        "max_cluster_share": 1.0,
    }
    settings = with_settings(harness, batch_size=8, max_batch_size=8, min_batch_size=3, **values)
    assert await assemble(harness.db, settings) == 0
    sentence = await explain(harness, settings)
    seconds = re.fullmatch(
        r"1 more ready samples, since 3 are within all caps together; in (\d+) s fewer are enough\.", sentence
    )
    assert seconds is not None and 0 < int(seconds[1]) <= 200, sentence
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(ready_at=now() - 300.0))
    assert await assemble(harness.db, settings) == 1
