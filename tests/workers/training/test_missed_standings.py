"""A rater is blocked or quarantined while another transaction holds the samples, which are therefore skipped."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import select

from app.models import Reward, Sample, SampleRule, SampleState
from tests.support.deployment import Harness
from tests.support.settings import by_path
from tests.support.updates import rate
from workers.training.assemble import assemble


@asynccontextmanager
async def held_samples(harness: Harness, turn_ids: list[str]) -> AsyncIterator[None]:
    """Hold these samples as the assembly does while it prepares them. SQLite has one writer: nothing is held there."""
    if harness.db.embedded:
        yield
        return
    async with harness.db.write() as session:
        await session.scalars(select(Sample).where(Sample.turn_id.in_(turn_ids)).with_for_update())
        yield


async def set_standing(harness: Harness, name: str, standing: str) -> None:
    answer = await harness.api.put(f"/v1/raters/{name}", json={"standing": standing, "reason": "a test"})
    assert answer.status_code == 200, answer.text


async def samples_of(harness: Harness, turn_ids: list[str]) -> list[Sample]:
    return sorted(
        (sample for sample in await harness.all(Sample) if sample.turn_id in turn_ids), key=lambda one: one.turn_id
    )


@pytest.mark.parametrize("standing", ["blocked", "quarantined"])
async def test_no_batch_has_a_sample_of_a_rater_who_was_refused_while_it_was_held(
    harness: Harness, standing: str
) -> None:
    others = await rate(harness, "+-+-+-+-", rater="ada")
    refused = await rate(harness, "+-", rater="mallory")
    async with held_samples(harness, refused):
        await set_standing(harness, "HUMAN/mallory", standing)
    settings = harness.settings.replace(by_path({"trainer__max_batch_size": 10}))  # all samples together
    assert await assemble(harness.db, settings) == 1
    assert {sample.state for sample in await samples_of(harness, others)} == {SampleState.BATCHED}
    expected = SampleState.DROPPED if standing == "blocked" else SampleState.QUARANTINED
    found = await samples_of(harness, refused)
    assert [sample.state for sample in found] == [expected] * 2
    if standing == "blocked":
        assert {sample.rule for sample in found} == {SampleRule.RATER_BLOCKED}
        assert [reward.weight for reward in await harness.all(Reward) if reward.turn_id in refused] == [0.0] * 2
