"""A download that breaks off leaves nothing open and nothing on disk."""

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from app.datasets.columns import PREFERENCES
from app.datasets.parquet_writer import ParquetResponse, ParquetWriter

ROW = {
    "prompt": [{"role": "user", "content": "x" * 100}],
    "chosen": [{"role": "assistant", "content": "a"}],
    "rejected": [{"role": "assistant", "content": "b"}],
}


async def test_a_client_who_leaves_closes_the_file(tmp_path: Path) -> None:
    sheet = ParquetWriter(tmp_path, PREFERENCES)
    await sheet.add([ROW] * 10)
    response = ParquetResponse(await sheet.finish(), "a.parquet")
    assert (sheet.num_rows, list(tmp_path.iterdir())) == (10, [])

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("gone")

    with pytest.raises(ClientDisconnect):
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    assert sheet._file.closed


async def test_a_sheet_holds_no_more_than_a_row_group_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.datasets.parquet_writer.GROUP_BYTES", 1000)
    sheet = ParquetWriter(tmp_path, PREFERENCES)
    for _ in range(50):
        await sheet.add([ROW])
        assert len(sheet._rows) < 10
    await sheet.finish()
    assert sheet.num_rows == 50
    sheet.close()
