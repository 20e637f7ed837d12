"""Search: the index, queries of any text, and services."""

import json
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse

from alignment.environments.documents import (
    Document,
    DocumentIndex,
    DocumentService,
    build_index,
    clean_query,
    read_documents,
)
from alignment.environments.errors import InfrastructureFailure
from alignment.environments.tools.search_tool import SearchTool
from tests.support.scripted_engine import serve
from tests.support.tool_calls import call_one

DOCUMENTS = [
    Document("Emma", "A novel that Jane Austen wrote in 1815."),
    Document("Dune", "A novel that Frank Herbert wrote in 1965."),
    Document("Rust", "A language. Its compiler checks borrows."),
    Document("", "Frank Herbert also wrote about the sea."),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> DocumentIndex:
    path = tmp_path_factory.mktemp("search") / "index.db"
    build_index(DOCUMENTS, path)
    return DocumentIndex(path)


async def test_best_documents_come_first_and_always_the_same(index: DocumentIndex) -> None:
    found = await index.search("Who wrote novels? Frank Herbert!", 3)
    assert [document.title for document in found] == ["Dune", "", "Emma"]
    assert all([await index.search("wrote", 10) == await index.search("wrote", 10) for _ in range(5)])


async def test_text_for_the_model(index: DocumentIndex) -> None:
    tool = SearchTool(index, limit=2, document_bytes=256)
    record = await call_one(tool, {"query": "herbert sea"})
    assert record.result.text == (
        "[1] Frank Herbert also wrote about the sea.\n\n[2] Dune\nA novel that Frank Herbert wrote in 1965."
    )
    assert record.result.metrics == {"num_documents": 2}
    record = await call_one(tool, {"query": "xyzzy"})
    assert (record.fault, record.result.text) == (None, "No document has any of these words.")


async def test_long_document_leaves_room_for_the_others(tmp_path: Path) -> None:
    build_index([Document("long", "word " * 10_000), Document("short", "one word")], tmp_path / "index.db")
    record = await call_one(SearchTool(DocumentIndex(tmp_path / "index.db")), {"query": "word"})
    assert "[1]" in record.result.text and "[2]" in record.result.text and "bytes cut" in record.result.text


@given(st.text(max_size=200) | st.sampled_from(['"', "a AND", "NEAR(", "title:", "-a", "a*", "^a", "' OR 1", "\x00"]))
@settings(max_examples=200)
def test_no_query_is_an_error(index: DocumentIndex, query: str) -> None:
    expression = clean_query(query)
    if expression is not None:
        index._search(expression, 3)


def test_operators_have_no_meaning() -> None:
    assert clean_query('who "wrote" (Emma AND NOT who') == '"who" OR "wrote" OR "Emma" OR "AND" OR "NOT"'
    assert clean_query('"*()') is None


def test_documents_of_files(tmp_path: Path) -> None:
    table = pyarrow.table({"title": ["a", None], "text": ["one", "two"], "other": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "one.parquet")
    (tmp_path / "two.jsonl").write_text('{"title": "b", "text": "three"}\n{"text": "four"}\n')
    found = list(read_documents([tmp_path / "one.parquet", tmp_path / "two.jsonl"]))
    assert found == [Document("a", "one"), Document("", "two"), Document("b", "three"), Document("", "four")]
    (tmp_path / "bad.jsonl").write_text('{"title": "b"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, row 1: 'text' is no text"):
        list(read_documents([tmp_path / "bad.jsonl"]))
    (tmp_path / "list.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match=r"line 1: not a JSON object"):
        list(read_documents([tmp_path / "list.jsonl"]))


def test_index_is_replaced_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    build_index(DOCUMENTS, path)

    def broken() -> Any:
        yield Document("a", "b")
        raise ValueError("a row is bad")

    with pytest.raises(ValueError, match="a row is bad"):
        build_index(broken(), path)
    assert [document.title for document in DocumentIndex(path)._search('"rust"', 1)] == ["Rust"]
    build_index([Document("new", "rust")], path)
    assert [document.title for document in DocumentIndex(path)._search('"rust"', 1)] == ["new"]


async def test_missing_index_is_a_failure_of_the_host(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFailure, match="unable to open database file"):
        await call_one(SearchTool(DocumentIndex(tmp_path / "none.db")), {"query": "a"})


async def test_wire_of_a_service() -> None:
    bodies: list[Any] = []
    answers: list[tuple[int, Any]] = [
        (200, {"result": [[{"document": {"id": "1", "contents": '"Emma"\nA novel.'}, "score": 0.9}]]}),
        (500, {}),
        (200, {"result": []}),
    ]

    async def service(scope: Any, receive: Any, send: Any) -> None:
        bodies.append(json.loads(await Request(scope, receive).body()))
        status, answer = answers.pop(0)
        await JSONResponse(answer, status)(scope, receive, send)

    with serve(service) as url:
        source = DocumentService(f"{url}/retrieve")
        tool = SearchTool(source)
        assert (await call_one(tool, {"query": "emma"})).result.text == "[1] Emma\nA novel."
        assert bodies == [{"queries": ["emma"], "topk": 3, "return_scores": True}]
        for status in (500, 200):
            with pytest.raises(InfrastructureFailure, match=f"no result, but status {status}"):
                await call_one(tool, {"query": "emma"})
        await source.close()
