"""Two workers curate the attempts of one group while another attempt ends and a vote arrives.

Barriers put the report where it could be missed; nothing waits for a time.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.episode_limits import end_at_limit
from app.core.database import Database
from app.models import EndReason, Episode, Feedback, Sample, SampleState, Turn
from tests.support import episodes
from tests.support.attempts import SOURCES, attempt, compare
from tests.support.deployment import Harness
from workers import curate as curate_module
from workers.curate import curate
from workers.feedback import ended_episodes, sample_groups
from workers.feedback.rewards import record_reward, update_turn_samples
from workers.training.assemble import assemble

GROUP = {"id": "ticket-7", "size": 3}
NUM_TURNS = 2  # of each attempt
Report = Callable[[], Awaitable[None]]


@pytest.fixture
async def other_db(harness: Harness) -> AsyncIterator[Database]:
    """That of another worker, with connections of its own."""
    async with Database(harness.settings.database_url) as database:
        yield database


class Meeting:
    """Lets two workers wait at a function until both are there, and the report has been committed meanwhile."""

    def __init__(self) -> None:
        self.arrived, self.reported = asyncio.Barrier(3), asyncio.Barrier(3)
        self.num_calls = 0

    async def wait(self) -> None:
        self.num_calls += 1
        if self.num_calls <= 2:
            await self.arrived.wait()
            await self.reported.wait()

    async def report(self, report: Report) -> None:
        await self.arrived.wait()
        await report()
        await self.reported.wait()

    def hold(self, patch: pytest.MonkeyPatch, module: ModuleType, name: str, *, before: bool) -> None:
        function = getattr(module, name)

        async def held(*args: Any, **options: Any) -> Any:
            if before:
                await self.wait()
            found = await function(*args, **options)
            if not before:
                await self.wait()
            return found

        patch.setattr(module, name, held)


async def check_batches(harness: Harness) -> None:
    """Assert that all turns of the group are in a batch, or none."""
    states = [sample.state for sample in await harness.all(Sample)]
    assert states.count(SampleState.BATCHED) in (0, 3 * NUM_TURNS), states


async def rewards_by_episode(harness: Harness) -> dict[str | None, set[float]]:
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    found: dict[str | None, set[float]] = defaultdict(set)
    for turn in await harness.all(Turn):
        found[turn.episode_id].add(samples[turn.id].reward)
    return found


@pytest.mark.parametrize(
    ("module", "name", "before"),
    [
        pytest.param(curate_module, "read_page", False, id="pages are read"),
        pytest.param(ended_episodes, "find_ended", False, id="ends are read"),
        pytest.param(sample_groups, "lock_groups", True, id="locks are taken"),
    ],
)
@pytest.mark.parametrize("credit", ["outcome", "return"])
async def test_attempt_ends_while_two_workers_curate_its_group(
    harness: Harness,
    other_db: Database,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    before: bool,
    credit: str,
) -> None:
    if harness.db.embedded and name == "lock_groups":
        pytest.skip("SQLite has one writer: two cannot be in their transactions")
    compare(harness)
    own = {"sources": SOURCES, "episode_credit": credit, "episode_discount": 1.0}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=own)).status_code == 200
    first = await attempt(harness, NUM_TURNS, 1.0, group=GROUP)
    second = await attempt(harness, NUM_TURNS, -1.0, group=GROUP)
    third = await attempt(harness, NUM_TURNS, group=GROUP)
    [last_turn] = [turn for turn in await harness.all(Turn) if (turn.episode_id, turn.episode_step) == (first["id"], 2)]
    meeting = Meeting()
    meeting.hold(monkeypatch, module, name, before=before)

    async def report() -> None:
        assert (await harness.vote(last_turn.id, "down", source={"id": "ada"})).status_code == 201
        assert (await episodes.end(harness, third["id"], outcome=0.5)).status_code == 200

    async def assemble_meanwhile() -> None:
        await meeting.report(report)
        await assemble(harness.db, harness.settings)
        await check_batches(harness)

    await asyncio.gather(curate(harness.db, harness.settings), curate(other_db, harness.settings), assemble_meanwhile())
    assert meeting.num_calls >= 2
    await assemble(other_db, harness.settings)
    await check_batches(harness)
    while await curate(harness.db, harness.settings):
        pass
    await assemble(harness.db, harness.settings)
    samples = await harness.all(Sample)
    assert {sample.state for sample in samples} == {SampleState.BATCHED} and len(samples) == 3 * NUM_TURNS
    assert len({sample.batch_id for sample in samples}) == 1
    assert await rewards_by_episode(harness) == {first["id"]: {0.0}, second["id"]: {-1.0}, third["id"]: {0.5}}
    assert all(row.processed for row in [*await harness.all(Feedback), *await harness.all(Episode)])


async def test_report_after_the_ends_were_read_is_processed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit has ended the episode, whose end changes no sample. Then it is reported as abandoned, which does."""
    judge = {"type": "rule", "name": "judge", "function": "ended"}
    assert (await harness.api.put("/v1/policies/shop/rewards", json={"sources": [*SOURCES, judge]})).status_code == 200
    episode = await attempt(harness, 1, group=None)
    await harness.db.run_write(lambda connection: end_at_limit(connection, [episode["id"]], EndReason.MAX_TURNS))
    async with harness.db.write() as session:
        ids = [turn.id for turn in await harness.all(Turn)]
        await record_reward(session, ids[0], "judge", 0.5)
        await update_turn_samples(session, ids, harness.settings)
    find_ended, num_reports = ended_episodes.find_ended, 0

    async def report_then(*args: Any) -> ended_episodes.EndedEpisodes:
        nonlocal num_reports
        found = await find_ended(*args)
        if num_reports == 0:
            num_reports += 1
            assert (await episodes.end(harness, episode["id"], reason="abandoned")).status_code == 200
        return found

    monkeypatch.setattr(ended_episodes, "find_ended", report_then)
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    assert (num_reports, sample.state, sample.rule) == (1, SampleState.DROPPED, "attempt_lost")
    assert [row.processed for row in await harness.all(Episode)] == [True]


async def test_no_report_is_written_between_the_processing_of_an_end_and_its_mark(
    harness: Harness, other_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark would hide it. The rows of the episodes are locked, as a report locks them, until both are committed."""
    if harness.db.embedded:
        pytest.skip("SQLite has one writer")
    compare(harness)
    await attempt(harness, 1, 1.0)
    is_locked = False

    async def try_to_report(session: AsyncSession, *args: Any) -> None:
        nonlocal is_locked
        with pytest.raises(DBAPIError, match="could not obtain lock"):
            async with other_db.write() as other:
                await other.execute(select(Episode.id).with_for_update(nowait=True))
        is_locked = True
        await update_turn_samples(session, *args)

    monkeypatch.setattr(ended_episodes, "update_turn_samples", try_to_report)
    await curate(harness.db, harness.settings)
    assert is_locked and [row.processed for row in await harness.all(Episode)] == [True]
