"""With SQLite every vote and chat waits while a transaction writes: long acts write in short transactions.

Work is counted in steps of SQLite's virtual machine. An act of one transaction has all of its work in that one.
"""

from collections.abc import Awaitable, Callable
from io import BytesIO

import pytest

from app.datasets import imports, removal
from app.models import Dataset, DatasetRow, Feedback, LineMove, Sample, SampleState, Turn
from app.privacy import erasure, retention
from app.privacy.subjects import SubjectNames
from tests.support import many_rows
from tests.support.deployment import Harness
from tests.support.write_transactions import record_writes
from workers.curate import curate
from workers.training.assemble import assemble

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
Step = Callable[[Harness], Awaitable[None]]
STEP = 250  # samples
PARTS = 8  # the least number of transactions that each act below is divided into


async def do_nothing(harness: Harness) -> None:
    pass


async def import_dataset(harness: Harness) -> None:
    count = PARTS * imports.CHUNK_ROWS
    project_id = (await harness.policy()).project_id
    dataset = Dataset(id="ds-2", project_id=project_id, name="many", kind="prompts", sha256="0", num_rows=count)
    rows = BytesIO(b'{"messages": []}\n' * count)
    await imports.store_dataset(harness.db, dataset, rows, None, lambda session: None)
    assert len(await harness.all(DatasetRow)) == count


async def insert_dataset(harness: Harness) -> None:
    await many_rows.insert_dataset(harness.db, PARTS * removal.DELETE_STEP)


async def delete_dataset(harness: Harness) -> None:
    assert (await harness.api.delete(f"/v1/datasets/{many_rows.DATASET}")).status_code == 200
    assert await harness.all(DatasetRow) == []


async def insert_ratings(harness: Harness) -> None:
    await many_rows.insert_ratings(harness.db, PARTS, erasure.CHUNK + 1)


async def erase_person(harness: Harness) -> None:
    names = SubjectNames.of((await harness.policy()).project_id, f"HUMAN/{many_rows.PERSON}")
    result = await erasure.erase_subject(harness.db, names, harness.settings, actor="admin")
    assert result is not None and result.feedback == PARTS


async def insert_expired(harness: Harness) -> None:
    await many_rows.insert_turns(harness.db, PARTS * retention.STEP, age=many_rows.OLD_SECONDS)


async def remove_expired(harness: Harness) -> None:
    project_id = (await harness.policy()).project_id
    while await retention.remove_expired(harness.db, project_id, "turns", 30):
        pass
    assert all(turn.deleted_at is not None for turn in await harness.all(Turn))


async def insert_backlog(harness: Harness) -> None:
    await many_rows.insert_backlog(harness.db, PARTS * 50, harness.settings.model)
    await many_rows.release_backlog(harness.db)


async def curate_backlog(harness: Harness) -> None:
    await curate(harness.db, harness.settings)
    assert all(row.processed for row in await harness.all(Feedback))


async def insert_versions(harness: Harness) -> None:
    await many_rows.insert_versions(harness.db, 2 * PARTS, STEP // 2)


async def roll_back(harness: Harness) -> None:
    body = {"version": 0, "reason": "test"}
    assert (await harness.api.post(f"/v1/policies/{many_rows.POLICY}/rollback", json=body)).status_code == 200
    while await harness.all(LineMove):
        await assemble(harness.db, harness.settings)
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.OPEN}


ACTS: dict[str, tuple[Step, Step]] = {
    "import": (do_nothing, import_dataset),
    "deletion of a dataset": (insert_dataset, delete_dataset),
    "erasure": (insert_ratings, erase_person),
    "retention": (insert_expired, remove_expired),
    "curate": (insert_backlog, curate_backlog),
    "rollback": (insert_versions, roll_back),
}


@pytest.mark.parametrize("act", ACTS)
async def test_no_transaction_has_most_of_the_work(harness: Harness, act: str) -> None:
    prepare, run = ACTS[act]
    await prepare(harness)
    api_db = harness.api_database
    with record_writes(harness.db, harness.db.with_long_timeout, api_db, api_db.with_long_timeout) as writes:
        await run(harness)
    assert len(writes) >= PARTS
    assert 4 * writes.largest <= sum(one.steps for one in writes)


async def test_statements_of_an_erasure_do_not_grow_with_the_rated_conversation(harness: Harness) -> None:
    counts = []
    for person, length in (("ada", 3), ("bob", 30)):
        for _ in range(length):
            await harness.turn(conversation_id=person)
        source = {"kind": "HUMAN", "id": person}
        body = {"target": {"conversation_id": person}, "kind": "binary", "value": "up", "source": source}
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
        names = SubjectNames.of((await harness.policy()).project_id, f"HUMAN/{person}")
        with record_writes(harness.db) as writes:
            await erasure.erase_subject(harness.db, names, harness.settings, actor="admin")
        counts.append([len(one.statements) for one in writes])
    assert counts[0] == counts[1]
