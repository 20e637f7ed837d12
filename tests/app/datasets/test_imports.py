"""The import of Parquet files as datasets: checked completely, stored completely or not at all, idempotent."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from io import BytesIO
from threading import Event
from typing import Any

import httpx2
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from sqlalchemy import update

from app.core.errors import Unavailable
from app.core.settings import Settings
from app.datasets import imports, removal
from app.models import Dataset, DatasetRow, Project
from tests.support.deployment import Harness
from tests.support.parquet_files import import_file, to_parquet
from workers.reconcile import reconcile

HELLO = to_parquet({"prompt": ["Hi", "Bye"], "chosen": ["Hello!", "See you!"], "rejected": ["What?", "Go."]})


def message(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


async def read_contents(harness: Harness) -> list[dict[str, object]]:
    return [row.content for row in sorted(await harness.all(DatasetRow), key=lambda row: row.row_number)]


async def test_preferences_are_stored_as_messages(harness: Harness) -> None:
    answer = await import_file(harness, HELLO, name="manners")
    assert answer.status_code == 201, answer.text
    view = answer.json()
    assert (view["object"], view["name"], view["kind"], view["num_rows"]) == ("dataset", "manners", "preferences", 2)
    first = (await read_contents(harness))[0]
    assert first == {
        "messages": [message("Hi")],
        "chosen": [message("Hello!", "assistant")],
        "rejected": [message("What?", "assistant")],
    }


async def test_prompts_keep_their_reference_and_plain_columns(harness: Harness) -> None:
    file = to_parquet(
        {
            "prompt": [[message("Be kind.", "system"), message("Hi")], [message("Bye")]],
            "reference": ["Hello!", None],
            "topic": pa.array(["greeting", "parting"]).dictionary_encode(),
            "weight": [0.5, None],
            "seen": [2**53 + 1, 7],
            "tags, all": [["a"], ["b"]],
        }
    )
    answer = await import_file(harness, file, kind="prompts")
    assert answer.status_code == 201, answer.text
    assert answer.headers["x-columns-left-out"] == "tags%2C%20all"
    assert await read_contents(harness) == [
        {
            "messages": [message("Be kind.", "system"), message("Hi")],
            "reference": "Hello!",
            "details": {"topic": "greeting", "weight": 0.5, "seen": 2**53 + 1},
        },
        {"messages": [message("Bye")], "details": {"topic": "parting", "seen": 7}},
    ]


async def test_prompt_repeated_before_replies_is_removed(harness: Harness) -> None:
    prompt = [message("Hi")]
    file = to_parquet(
        {
            "prompt": ["Hi"],
            "chosen": [[*prompt, message("Hello!", "assistant")]],
            "rejected": [[*prompt, message("What?", "assistant")]],
        }
    )
    assert (await import_file(harness, file)).status_code == 201
    assert (await read_contents(harness))[0]["chosen"] == [message("Hello!", "assistant")]


async def test_same_file_is_the_same_dataset_and_another_is_a_conflict(harness: Harness) -> None:
    first, repeated = await import_file(harness, HELLO), await import_file(harness, HELLO)
    assert (first.status_code, repeated.status_code) == (201, 200)
    assert first.json() == repeated.json()
    other = await import_file(harness, to_parquet({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}))
    kind = await import_file(harness, HELLO, kind="prompts")
    for refused in (other, kind):
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "name_taken")
        assert refused.headers["x-should-retry"] == "false"
    assert len(await harness.all(Dataset)) == 1 and len(await harness.all(DatasetRow)) == 2


async def test_concurrent_imports_of_one_file_make_one_dataset(harness: Harness) -> None:
    answers = await asyncio.gather(*[import_file(harness, HELLO) for _ in range(4)])
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(await harness.all(DatasetRow)) == 2


class PausedRows(BytesIO):
    """Rows that are stored one by one. The second one is read when `is_resumed` is set."""

    def __init__(self, number: int, error: Exception | None = None) -> None:
        super().__init__(b'{"messages": []}\n' * number)
        self.is_paused, self.is_resumed, self.error = Event(), Event(), error

    def readlines(self, hint: int | None = -1) -> list[bytes]:
        if self.tell() > 0:
            self.is_paused.set()
            assert self.is_resumed.wait(30)
            if self.error is not None:
                raise self.error
        return super().readlines(1)


async def start_import(harness: Harness, rows: PausedRows) -> asyncio.Task[Dataset]:
    """Start an import, and return it once its first row is stored."""
    project_id = (await harness.policy()).project_id
    dataset = Dataset(
        id="ds-1", project_id=project_id, name="manners", kind="prompts", sha256="0", num_rows=3, num_bytes=9
    )
    task = asyncio.create_task(imports.store_dataset(harness.db, dataset, rows, None, lambda session: None))
    await asyncio.to_thread(rows.is_paused.wait, 30)
    return task


async def test_chats_and_feedback_are_stored_while_a_dataset_is_imported(harness: Harness) -> None:
    rows = PausedRows(3)
    task = await start_import(harness, rows)
    assert len(await harness.all(DatasetRow)) == 1
    turn = await asyncio.wait_for(harness.turn(), 10)
    assert (await asyncio.wait_for(harness.vote(turn.id), 10)).status_code == 201
    assert (await harness.api.get("/v1/datasets")).json()["data"] == []
    assert (await harness.api.get("/v1/datasets/ds-1")).status_code == 404
    assert await removal.remove_hidden(harness.db) == 0, "it has not died"
    rows.is_resumed.set()
    assert (await task).name == "manners"
    [view] = (await harness.api.get("/v1/datasets")).json()["data"]
    assert (view["id"], view["name"], view["num_rows"], len(await harness.all(DatasetRow))) == ("ds-1", "manners", 3, 3)


async def test_an_import_that_fails_leaves_nothing(harness: Harness) -> None:
    rows = PausedRows(3, OSError("the disk is full"))
    task = await start_import(harness, rows)
    rows.is_resumed.set()
    with pytest.raises(OSError):
        await task
    assert await harness.all(Dataset) == [] and await harness.all(DatasetRow) == []


async def test_an_import_whose_process_died_is_removed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """And if it goes on nevertheless, it is told so, and stores nothing."""
    monkeypatch.setattr(removal, "DELETE_STEP", 1)
    rows = PausedRows(3)
    task = await start_import(harness, rows)
    async with harness.db.write() as session:
        await session.execute(update(Dataset).values(importing_until=1.0))
    await reconcile(harness.db, harness.settings)
    assert await harness.all(Dataset) == [] and await harness.all(DatasetRow) == []
    rows.is_resumed.set()
    with pytest.raises(Unavailable):
        await task
    assert await harness.all(DatasetRow) == []


async def test_invalid_file_is_refused_by_row_and_column_and_nothing_is_stored(harness: Harness) -> None:
    file = to_parquet({"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", None]})
    for content, column, message_part in (
        (file, "rejected", "Row 1, column 'rejected': there is no value"),
        (file[:-20], None, "not a Parquet file"),
        (b"", None, "not a Parquet file"),
    ):
        answer = await import_file(harness, content)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_parquet")
        assert error["param"] == column and message_part in error["message"]
    assert await harness.all(Dataset) == await harness.all(DatasetRow) == []


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Limit files to 100,000 bytes."""
    return settings.replace({"server.max_import_bytes": 100_000})


async def test_too_large_file_is_a_413_with_or_without_content_length(harness: Harness) -> None:
    async def send_without_length() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 10_000

    with_length = await import_file(harness, b"x" * 100_001)
    params = {"name": "a", "kind": "prompts"}
    other = await harness.api.post("/v1/datasets", params=params, content=send_without_length())
    assert [with_length.status_code, other.status_code] == [413, 413]
    assert set(other.json()["error"]) == {"message", "type", "param", "code"}


async def test_rows_that_unpack_beyond_the_limit_are_refused(harness: Harness) -> None:
    compressed = to_parquet({"prompt": ["a" * 1000] * 1000})
    assert len(compressed) < 10_000
    answer = await import_file(harness, compressed, kind="prompts")
    assert answer.status_code == 400 and "once unpacked" in answer.text


async def test_reader_gets_no_secret(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_DATABASE__URL", "postgresql://attune:secret@db/attune")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    start, environments = subprocess.Popen, list[dict[str, str]]()

    def record(command: list[str], **options: Any) -> Any:
        environments.append(options["env"])
        return start(command, **options)

    monkeypatch.setattr("app.datasets.imports.subprocess.Popen", record)
    assert (await import_file(harness, HELLO)).status_code == 201
    [environment] = environments
    assert environment["TZ"] == "UTC" and "PATH" in environment
    assert not [name for name, value in environment.items() if "secret" in value or name.startswith("ATTUNE_")]


async def test_no_temporary_file_is_left(harness: Harness) -> None:
    before = sorted(harness.settings.home.iterdir())
    await import_file(harness, HELLO)
    await import_file(harness, HELLO[:50], name="broken")
    await harness.api.get("/v1/exports/turns")
    remaining = {path.name for path in harness.settings.home.iterdir()} - {path.name for path in before}
    assert remaining <= {"attune.db-wal", "attune.db-shm"}


@pytest.mark.parametrize("query", ["name=&kind=prompts", "name=a b&kind=prompts", "name=a", "name=a&kind=tables", ""])
async def test_name_and_kind_are_required(harness: Harness, query: str) -> None:
    answer = await harness.api.post(f"/v1/datasets?{query}", content=HELLO)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_datasets_are_listed_read_and_deleted(harness: Harness) -> None:
    many = to_parquet({"prompt": [f"p{index}" for index in range(2500)]})
    ids = [(await import_file(harness, many, name=f"d{index}", kind="prompts")).json()["id"] for index in range(3)]
    first = (await harness.api.get("/v1/datasets", params={"limit": 2})).json()
    rest = (await harness.api.get("/v1/datasets", params={"limit": 2, "after": first["last_id"]})).json()
    assert [view["id"] for view in first["data"] + rest["data"]] == ids[::-1]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    one = (await harness.api.get(f"/v1/datasets/{ids[0]}")).json()
    assert (one["id"], one["num_rows"]) == (ids[0], 2500)
    page = (await harness.api.get(f"/v1/datasets/{ids[0]}/rows", params={"limit": 3, "after": 1998})).json()
    assert [row["messages"][0]["content"] for row in page["data"]] == ["p1999", "p2000", "p2001"]
    assert (page["last_number"], page["has_more"]) == (2001, True)
    end = (await harness.api.get(f"/v1/datasets/{ids[0]}/rows", params={"after": 2498})).json()
    assert ([row["number"] for row in end["data"]], end["has_more"]) == ([2499], False)
    deleted = await harness.api.delete(f"/v1/datasets/{ids[0]}")
    assert deleted.json() == {"object": "dataset.deleted", "id": ids[0], "deleted": True}
    assert {row.dataset_id for row in await harness.all(DatasetRow)} == set(ids[1:])
    assert (await harness.api.get(f"/v1/datasets/{ids[0]}")).status_code == 404
    assert (await import_file(harness, many, name="d0", kind="prompts")).status_code == 201


async def test_foreign_dataset_is_not_found(harness: Harness) -> None:
    async with harness.db.write() as session:
        session.add(Project(id="prj-x", name="x"))
        await session.flush()
        session.add(Dataset(id="ds-theirs", project_id="prj-x", name="a", kind="prompts", num_rows=1, sha256="0"))
        await session.flush()
        session.add(DatasetRow(dataset_id="ds-theirs", row_number=0, content={"messages": []}))

    def same(foreign: httpx2.Response, unknown: httpx2.Response) -> bool:
        return foreign.status_code == 404 and foreign.text == unknown.text.replace("ds-nobody", "ds-theirs")

    for path in ("/v1/datasets/{}", "/v1/datasets/{}/rows", "/v1/datasets?after={}"):
        assert same(await harness.api.get(path.format("ds-theirs")), await harness.api.get(path.format("ds-nobody")))
    assert same(await harness.api.delete("/v1/datasets/ds-theirs"), await harness.api.delete("/v1/datasets/ds-nobody"))
    assert len(await harness.all(DatasetRow)) == 1
    assert (await harness.api.get("/v1/datasets")).json()["data"] == []
    assert (await import_file(harness, HELLO, name="a")).status_code == 201
