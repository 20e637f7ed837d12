"""A Parquet file that is written to disk and then downloaded. It has no name on disk, so no failure leaves it there."""

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

GROUP_BYTES = 16 * 1024 * 1024
GROUP_ROWS = 8192
CHUNK_BYTES = 256 * 1024
MEDIA_TYPE = "application/vnd.apache.parquet"


class ParquetWriter:
    """Collects rows into row groups, and writes each group in a thread: memory does not grow with the file."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.num_rows = 0
        self.left_out = 0
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the writer owns it; `close` closes it
        self._schema = schema
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")
        self._rows: list[Mapping[str, object]] = []
        self._bytes = 0

    async def add(self, rows: Sequence[Mapping[str, object] | None]) -> None:
        """Add rows. A row that is None is counted as left out."""
        for row in rows:
            if row is None:
                self.left_out += 1
                continue
            self._rows.append(row)
            self._bytes += len(orjson.dumps(row))
            if self._bytes >= GROUP_BYTES or len(self._rows) >= GROUP_ROWS:
                await self._flush()

    async def finish(self) -> None:
        await self._flush()
        await asyncio.to_thread(self._writer.close)

    def iter_chunks(self) -> Iterator[bytes]:
        self._file.seek(0)
        while chunk := self._file.read(CHUNK_BYTES):
            yield chunk

    @property
    def num_bytes(self) -> int:
        return self._file.seek(0, 2)

    def close(self) -> None:
        self._file.close()

    async def _flush(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            await asyncio.to_thread(self._write_group, rows)
            self.num_rows += len(rows)

    def _write_group(self, rows: Sequence[Mapping[str, object]]) -> None:
        self._writer.write_table(pa.Table.from_pylist(rows, schema=self._schema))


class ParquetResponse(StreamingResponse):
    """The finished file as a download. It is closed, and thereby deleted, also if the client disconnects."""

    def __init__(self, writer: ParquetWriter, name: str) -> None:
        headers = {
            "content-length": str(writer.num_bytes),
            "content-disposition": f'attachment; filename="{name}"',
            "x-rows": str(writer.num_rows),
            "x-rows-left-out": str(writer.left_out),
        }
        super().__init__(writer.iter_chunks(), headers=headers, media_type=MEDIA_TYPE)
        self._file_writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file_writer.close()
