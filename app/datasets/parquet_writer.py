"""Sheet: a Parquet file on its way out. It has no name on disk, so nothing is left of it, whatever happens."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

GROUP_BYTES = 16 * 1024 * 1024
GROUP_ROWS = 8192
PIECE = 256 * 1024
Gone = Callable[[], Awaitable[bool]]  # has the client left?
MEDIA_TYPE = "application/vnd.apache.parquet"


class ParquetWriter:
    """Rows are kept until they make a row group, then written in a thread: memory does not grow with the file."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.num_rows = 0
        self.left_out = 0
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it outlives this call, and closes itself
        self._schema = schema
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    async def add(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            self._rows.append(row)
            self._bytes += len(orjson.dumps(row))
            if self._bytes >= GROUP_BYTES or len(self._rows) >= GROUP_ROWS:
                await self._write()

    async def finish(self) -> Self:
        await self._write()
        await asyncio.to_thread(self._writer.close)
        return self

    def pieces(self) -> Iterator[bytes]:
        self._file.seek(0)
        while piece := self._file.read(PIECE):
            yield piece

    @property
    def num_bytes(self) -> int:
        return self._file.seek(0, 2)

    def close(self) -> None:
        self._file.close()

    async def _write(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            await asyncio.to_thread(self._group, rows)
            self.num_rows += len(rows)

    def _group(self, rows: list[dict[str, Any]]) -> None:
        self._writer.write_table(pa.Table.from_pylist(rows, schema=self._schema))


class ParquetResponse(StreamingResponse):
    """A finished sheet as a download. The file is closed, and so gone, even if the client leaves."""

    def __init__(self, sheet: ParquetWriter, name: str) -> None:
        headers = {
            "content-length": str(sheet.num_bytes),
            "content-disposition": f'attachment; filename="{name}"',
            "x-rows": str(sheet.num_rows),
            "x-rows-left-out": str(sheet.left_out),
        }
        super().__init__(sheet.pieces(), headers=headers, media_type=MEDIA_TYPE)
        self._sheet = sheet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sheet.close()
