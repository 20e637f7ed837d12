"""The Parquet writer: an interrupted download leaves no open file, and memory is bounded by a row group."""

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from app.datasets.parquet_writer import ParquetResponse, ParquetWriter
from app.datasets.preference_pairs import PREFERENCES_SCHEMA

ROW = {
    "prompt": [{"role": "user", "content": "x" * 100}],
    "chosen": [{"role": "assistant", "content": "a"}],
    "rejected": [{"role": "assistant", "content": "b"}],
}


async def test_disconnected_client_closes_the_file(tmp_path: Path) -> None:
    writer = ParquetWriter(tmp_path, PREFERENCES_SCHEMA)
    await writer.add([ROW] * 10)
    await writer.finish()
    response = ParquetResponse(writer, "a.parquet")
    assert (writer.num_rows, list(tmp_path.iterdir())) == (10, [])

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("gone")

    with pytest.raises(ClientDisconnect):
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    assert writer._file.closed


async def test_writer_keeps_at_most_one_row_group_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.datasets.parquet_writer.GROUP_BYTES", 1000)
    writer = ParquetWriter(tmp_path, PREFERENCES_SCHEMA)
    for _ in range(50):
        await writer.add([ROW])
        assert len(writer._rows) < 10
    await writer.finish()
    assert writer.num_rows == 50
    writer.close()
