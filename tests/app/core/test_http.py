"""JSON bodies: limits, NUL characters, and parsing outside of the event loop."""

import threading
from typing import Any

import orjson
import pytest

from alignment.json_values import as_list
from app.chat import schemas
from app.core import http
from app.core.errors import BadRequest, TooLarge
from app.core.settings import Settings
from app.feedback import browser_tokens
from app.main import create_app
from tests.support.deployment import Harness


@pytest.mark.parametrize(
    ("raw", "has_nul"),
    [
        (rb'{"a": "\u0000"}', True),
        (rb'{"a\u0000": 1}', True),
        (rb'{"a": "\\\u0000"}', True),
        (rb'{"a": "\\u0000"}', False),  # a backslash, then "u0000"
        (rb'{"a": "\\\\u0000", "b": "\n\\u0000"}', False),
        (rb'{"a": "\u00000", "b": "\\u0000"}', True),
        (b'{"a": "u0000"}', False),
    ],
)
def test_nul_is_found_in_raw_body(raw: bytes, has_nul: bool) -> None:
    assert ("\\x00" in repr(orjson.loads(raw)).replace("\\\\", "")) == has_nul
    if not has_nul:
        assert http.parse_json_object(raw) == orjson.loads(raw)
        return
    with pytest.raises(BadRequest, match="NUL"):
        http.parse_json_object(raw)


def test_raw_nul_is_invalid_json() -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        http.parse_json_object(b'{"a": "\x00"}')


@pytest.mark.parametrize(("depth", "allowed"), [(http.MAX_DEPTH, True), (http.MAX_DEPTH + 1, False)])
def test_nesting_is_limited(depth: int, allowed: bool) -> None:
    raw = b'{"a":' + b"[" * (depth - 1) + b"1" + b"]" * (depth - 1) + b"}"
    if allowed:
        assert "a" in http.parse_json_object(raw)
        return
    with pytest.raises(BadRequest, match="nested deeper"):
        http.parse_json_object(raw)


@pytest.mark.parametrize("unit", [b"1", b"[]", b"{}", b'"a"', b'{"a":1}', b'"[{,"'])
def test_number_of_values_is_limited_before_parsing(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b'{"a":[' + b",".join([unit] * 1001) + b"]}"
    assert len(as_list(http.parse_json_object(raw, max_values=3000)["a"])) == 1001
    monkeypatch.setattr(orjson, "loads", None)
    with pytest.raises(TooLarge, match="at most 1000 JSON values"):
        http.parse_json_object(raw, max_values=1000)


@pytest.mark.parametrize("text", ['a "quoted, [text]" {with} commas, ' * 100, "\\" * 999, '\\",' * 999, "é,🙂," * 999])
def test_text_is_not_counted_as_values(text: str) -> None:
    body = {"a": text, "b": [text]}
    assert http.parse_json_object(orjson.dumps(body), max_values=10) == body


def test_counting_of_unterminated_text_takes_linear_time() -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        http.parse_json_object(b'{"a": "' + b'\\",' * 1_000_000, max_values=10)


def test_texts_without_separators_are_not_counted_to_their_end() -> None:
    """One text of many commas, and then empty texts one after the other, is no JSON."""
    raw = b'{"a":"' + b"," * 50 + b'"' + b'"' * 5000
    with pytest.raises(TooLarge):
        http.parse_json_object(raw, max_values=10)


async def test_large_body_is_parsed_outside_of_the_event_loop(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    parse = http.parse_body

    def record_thread(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*arguments)

    monkeypatch.setattr(schemas, "parse_body", record_thread)

    async def parsing_threads(text: str, repeat: int) -> set[bool]:
        """Return whether the bodies of both APIs were parsed in the thread of the event loop."""
        messages = [{"role": "user", "content": text}] * repeat
        for path, fields in (("chat/completions", {"messages": messages}), ("responses", {"input": messages})):
            await harness.api.post(f"/v1/{path}", json={"model": "nobody", **fields})
        assert len(threads) == 2
        found = {thread is threading.main_thread() for thread in threads}
        threads.clear()
        return found

    assert await parsing_threads("hi", 1) == {True}
    assert await parsing_threads("x" * http.THREAD_BYTES, 1) == {False}
    assert await parsing_threads("x", http.THREAD_VALUES // 2) == {False}


@pytest.mark.parametrize(
    ("method", "path", "is_required"),
    [
        ("post", "/v1/chat/completions", True),
        ("post", "/v1/feedback", True),  # each of its kinds requires something
        ("post", "/v1/policies/{name}/rollback", False),
    ],
)
def test_document_says_which_body_may_be_left_out(method: str, path: str, is_required: bool) -> None:
    operation = create_app(Settings()).openapi()["paths"][path][method]
    assert operation["requestBody"]["required"] == is_required


async def test_many_errors_are_not_listed_one_by_one(harness: Harness) -> None:
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}], **{f"k{i}": 0 for i in range(5000)}}
    error = (await harness.api.post("/v1/chat/completions", json=body)).json()["error"]
    assert "5000 invalid values" in error["message"]


async def test_body_of_browser_token_is_limited(harness: Harness) -> None:
    turn = await harness.turn()
    request = {"completion_id": turn.id, "kinds": ["binary", "correction"]}
    token = (await harness.api.post("/v1/feedback/tokens", json=request)).json()["token"]
    body = {"completion_id": turn.id, "kind": "correction", "value": "x" * 70_000}
    refused = await harness.api.post("/v1/feedback", json=body, headers={"authorization": f"Bearer {token}"})
    assert refused.status_code == 413
    assert str(browser_tokens.MAX_BODY_BYTES) in refused.json()["error"]["message"]
    assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201  # an API key may send more
    accepted = await harness.api.post(
        "/v1/feedback",
        json={"completion_id": turn.id, "kind": "binary", "value": "up"},
        headers={"authorization": f"Bearer {token}"},
    )
    assert accepted.status_code == 201
