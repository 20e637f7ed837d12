"""Rolling back many versions, and returning to them, takes as many statements as one version."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event

from app.models import Feedback, Sample, SampleRule, SampleState
from app.policies import lines
from app.training import line_moves
from app.training.batch_samples import UNDONE
from tests.support.deployment import Harness
from tests.support.trained_versions import create_version
from tests.support.updates import PROGRAM, deploy, finish_moves, rate, release, roll_back, train_versions
from tests.support.write_transactions import record_writes
from workers.curate import curate


@contextmanager
def count_statements(harness: Harness) -> Iterator[list[str]]:
    statements: list[str] = []
    engine = harness.db.engine.sync_engine

    def record(conn: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", record)


async def states(harness: Harness) -> set[tuple[str, str | None, str | None]]:
    return {(sample.state, sample.rule, sample.reason) for sample in await harness.all(Sample)}


@pytest.mark.parametrize("act", ["roll back", "return"])
async def test_statements_do_not_grow_with_the_versions(harness: Harness, act: str) -> None:
    counts = []
    for number in (3, 30):
        await train_versions(harness, number)
        last = (await harness.serving()).number
        if act == "return":
            await roll_back(harness, 0)
            await finish_moves(harness)
        with count_statements(harness) as statements:
            await (deploy(harness, last) if act == "return" else roll_back(harness, 0))
        counts.append(len(statements))
        if act == "return":
            await roll_back(harness, 0)
        await finish_moves(harness)
    assert counts[1] <= counts[0]


async def test_versions_that_are_live_again_have_the_samples_and_votes_of_before(harness: Harness) -> None:
    versions = await train_versions(harness, 5)
    learned = {sample.turn_id: sample.batch_id for sample in await harness.all(Sample)}
    assert set(learned.values()) == {version.batch_id for version in versions}
    await roll_back(harness, 0)
    assert await states(harness) == {(SampleState.OPEN, None, UNDONE)}
    assert {row.batch_id for row in await harness.all(Feedback)} == {None}
    await deploy(harness, versions[-1].number)
    assert {sample.turn_id: sample.batch_id for sample in await harness.all(Sample)} == learned
    assert {row.turn_id: row.batch_id for row in await harness.all(Feedback)} == learned


async def test_versions_that_people_have_judged_are_told_from_the_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the versions do not fit into one step."""
    monkeypatch.setattr(line_moves, "MAX_VERSIONS", 2)
    monkeypatch.setattr(line_moves, "MAX_VERSIONS_IN_ACT", 2)
    versions = await train_versions(harness, 5)
    for version in (versions[0], versions[3]):
        await rate(harness, "-", version)
    await roll_back(harness, 0)
    await finish_moves(harness)
    by_number = {version.batch_id: version.number for version in versions}
    learned = {sample.turn_id: sample for sample in await harness.all(Sample)}
    dropped = {sample.reason for sample in learned.values() if sample.rule == SampleRule.ROLLED_BACK}
    sentence = "learned from it; people judged that version, and it was undone"
    assert dropped == {f"shop@v1 {sentence}", f"shop@v4 {sentence}"}
    assert sum(sample.reason == UNDONE for sample in learned.values()) == 6
    assert len(by_number) == 5


async def test_line_is_compared_over_versions_of_other_lines(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of a version may have a much smaller number than it: it is not among those that are read with it."""
    monkeypatch.setattr(lines, "PAGE_SIZE", 2)
    first = await train_versions(harness, 1)
    first += await train_versions(harness, 3)
    await roll_back(harness, 1)
    second = await train_versions(harness, 3)
    async with harness.db.read() as session:
        leaving, joining = await lines.compare_lines(session, second[-1].id, first[-1].id)
    assert [row.number for row in leaving] == [7, 6, 5]
    assert [row.number for row in joining] == [4, 3, 2]


async def test_feedback_about_several_replies_goes_back_to_the_first_version(harness: Harness) -> None:
    conversation = "c-1"
    turns = [await harness.turn(conversation_id=conversation) for _ in range(4)]
    body = {"target": {"conversation_id": conversation}, "kind": "binary", "value": "up", "source": PROGRAM}
    assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    for turn in turns[:1]:
        await harness.vote(turn.id, source=PROGRAM)
    await curate(harness.db, harness.settings)
    versions = [await create_version(harness, *turns[:2]), await create_version(harness, *turns[2:])]
    await release(harness, versions[-1])
    await roll_back(harness, 0)
    assert {row.batch_id for row in await harness.all(Feedback)} == {None}
    await deploy(harness, versions[-1].number)
    assert {row.batch_id for row in await harness.all(Feedback)} == {versions[0].batch_id}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_work_does_not_grow_with_the_square_of_a_conversation(harness: Harness) -> None:
    """Feedback on each turn of a conversation concerns the samples of all others."""
    works = []
    for length in (10, 160):
        turns = [await harness.turn(conversation_id=f"c-{length}") for _ in range(length)]
        for turn in turns:
            assert (await harness.vote(turn.id, source=PROGRAM)).status_code == 201
        await curate(harness.db, harness.settings)
        await release(harness, await create_version(harness, *turns, number=length))
        with record_writes(harness.db) as writes:
            await roll_back(harness, 0)
        works.append(writes.largest)
    assert works[1] < 2 * 16 * works[0]
