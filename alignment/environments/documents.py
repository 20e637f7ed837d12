"""Search in documents: an index of SQLite (FTS5) over Parquet or JSON lines, or a service.

The index gives the same answer to the same query every time: it is ranked by BM25, and documents of equal rank are in
the order of the files.
"""

import asyncio
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx2
import pyarrow.parquet  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.http_client import ANSWER_SECONDS, open_client, post_json

MAX_QUERY_WORDS = 32
QUERY_SECONDS = 5.0
BATCH_ROWS = 1000
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Document:
    """A text that can be found, with its title."""

    title: str
    text: str


class DocumentSource(Protocol):
    """Finds documents."""

    async def search(self, query: str, limit: int) -> list[Document]:
        """Return at most `limit` documents, the best first. Raises InfrastructureFailure, also where it takes long."""
        ...

    async def close(self) -> None: ...


def read_documents(
    paths: Iterable[Path], *, title_column: str = "title", text_column: str = "text"
) -> Iterator[Document]:
    """Yield the rows of Parquet files and of files of JSON lines. Raises ValueError for a row without a text."""
    for path in paths:
        for number, row in enumerate(_read_rows(path, [title_column, text_column]), 1):
            text = row.get(text_column)
            if not isinstance(text, str):
                raise ValueError(f"{path}, row {number}: {text_column!r} is no text")
            yield Document(str(row.get(title_column) or ""), text)


def _read_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, object]]:
    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            known = [column for column in columns if column in file.schema_arrow.names]
            for batch in file.iter_batches(BATCH_ROWS, columns=known):
                yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield row


def build_index(documents: Iterable[Document], path: Path) -> None:
    """Write an index of the documents. An older one at the path is replaced when the new one is complete."""
    new_path = path.with_name(f"{path.name}.{os.getpid()}.new")
    new_path.unlink(missing_ok=True)
    with closing(sqlite3.connect(new_path)) as database, database:
        database.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        rows = ((document.title, document.text) for document in documents)
        database.executemany("INSERT INTO documents (title, text) VALUES (?, ?)", rows)
        database.execute("INSERT INTO documents (documents) VALUES ('optimize')")
    os.replace(new_path, path)


def clean_query(query: str) -> str | None:
    """Return the query's words as an expression of FTS5, in which nothing but words has a meaning; None if it has none.

    Example: 'who "wrote" (Emma' -> '"who" OR "wrote" OR "Emma"'
    """
    words = dict.fromkeys(WORD.findall(query.replace("\x00", " ")))
    return " OR ".join(f'"{word}"' for word in list(words)[:MAX_QUERY_WORDS]) or None


class DocumentIndex:
    """An index that `build_index` has written. It is only read, also by several processes at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def search(self, query: str, limit: int) -> list[Document]:
        expression = clean_query(query)
        return [] if expression is None else await asyncio.to_thread(self._search, expression, limit)

    async def close(self) -> None:
        return None

    def _search(self, expression: str, limit: int) -> list[Document]:
        select = "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?"
        deadline = time.monotonic() + QUERY_SECONDS
        try:
            with closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                # A thread cannot be stopped; SQLite can.
                database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
                return [Document(title, text) for title, text in database.execute(select, (expression, limit))]
        except sqlite3.Error as error:
            raise InfrastructureFailure(f"the index of documents failed: {error}") from error


class _FoundDocument(BaseModel):
    model_config = ConfigDict(extra="ignore")

    contents: str


class _Hit(BaseModel):
    model_config = ConfigDict(extra="ignore")

    document: _FoundDocument


class _RetrieveAnswer(BaseModel):
    model_config = ConfigDict(extra="ignore")

    result: list[list[_Hit]]


class DocumentService:
    """A service with the wire of Search-R1, which verl's search tool speaks too: `POST {queries, topk, return_scores}`.

    The first line of a document's `contents` is its title.
    """

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self._url = url
        self._seconds = seconds
        self._headers = headers
        self._client: httpx2.AsyncClient | None = None

    async def search(self, query: str, limit: int) -> list[Document]:
        self._client = self._client or open_client(self._headers)
        body: JsonValue = {"queries": [query], "topk": limit, "return_scores": True}
        answer = await post_json(self._client, self._url, body, noun="the search service", seconds=self._seconds)
        try:
            [hits] = _RetrieveAnswer.model_validate_json(answer.text if answer.is_success else "").result
        except (ValidationError, ValueError) as error:
            raise InfrastructureFailure(f"the search service gave no result, but status {answer.status}") from error
        parts = (hit.document.contents.partition("\n") for hit in hits[:limit])
        return [Document(title.strip('"'), text) for title, _, text in parts]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None
