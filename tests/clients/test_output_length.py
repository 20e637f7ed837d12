"""The default length of a reply is the room behind its prompt; without any, the code says so on both wires."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from app.inference.output_length import MIN_ROOM
from demo.dialogues import ORDER_STATUS
from tests.clients.conftest import Record, Running

CONTEXT = 2048  # of the tests' engine
DEFAULT = 160  # of the tests' deployment


@pytest.fixture(scope="module")
def http(attune: Running) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {attune.key}"}
    with httpx2.Client(base_url=attune.base_url, headers=headers, timeout=60) as client:
        yield client


def chat(http: httpx2.Client, num_words: int, **fields: Any) -> httpx2.Response:
    messages = [{"role": "user", "content": "open " * num_words}]
    return http.post("/chat/completions", json={"model": "shop", "messages": messages, **fields})


def respond(http: httpx2.Client, num_words: int, **fields: Any) -> httpx2.Response:
    return http.post("/responses", json={"model": "shop", "input": "open " * num_words, **fields})


def num_prompt_tokens(http: httpx2.Client, num_words: int, **fields: Any) -> int:
    count: int = chat(http, num_words, max_tokens=1, **fields).json()["usage"]["prompt_tokens"]
    return count


@pytest.fixture(scope="module")
def words_of(http: httpx2.Client) -> Any:
    """Return a function from a number of prompt tokens to the number of words of the message."""
    few, more = num_prompt_tokens(http, 100), num_prompt_tokens(http, 101)
    return lambda tokens: 100 + (tokens - few) // (more - few)


@pytest.mark.parametrize("room", [DEFAULT + 40, DEFAULT, DEFAULT - 40, MIN_ROOM])
def test_default_is_the_room_that_is_left(http: httpx2.Client, words_of: Any, record: Record, room: int) -> None:
    response = chat(http, words_of(CONTEXT - room))
    assert response.status_code == 200, response.text
    body = response.json()
    room = CONTEXT - body["usage"]["prompt_tokens"]
    [turn] = record.turns(body["id"])
    assert turn.sampling["max_tokens"] == min(room, DEFAULT)
    assert body["usage"]["completion_tokens"] <= min(room, DEFAULT)
    assert chat(http, words_of(CONTEXT - room), stream=True).status_code == 200
    assert respond(http, words_of(CONTEXT - room)).json()["status"] in ("completed", "incomplete")
    assert chat(http, words_of(CONTEXT - room), n=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_prompt_without_room_is_refused_by_its_code(http: httpx2.Client, words_of: Any, stream: bool) -> None:
    rooms = (MIN_ROOM - 1, 1, 0, -1, -5, -2 * CONTEXT)
    for num_words in [words_of(CONTEXT - room) for room in rooms]:
        for response, param in (
            (chat(http, num_words, stream=stream), "messages"),
            (respond(http, num_words, stream=stream), "input"),
        ):
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)


def test_tools_are_counted(http: httpx2.Client, words_of: Any) -> None:
    with_tools = num_prompt_tokens(http, 100, tools=[ORDER_STATUS]) - num_prompt_tokens(http, 100)
    assert with_tools > 0
    response = chat(http, words_of(CONTEXT - with_tools - 9), tools=[ORDER_STATUS])
    assert response.status_code == 200, response.text


def test_follow_up_in_exact_tokens_has_the_room_that_is_left(
    http: httpx2.Client, words_of: Any, record: Record
) -> None:
    messages: list[Any] = [{"role": "user", "content": "open " * words_of(CONTEXT - 400)}]
    first = http.post("/chat/completions", json={"model": "shop", "messages": messages}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "open " * 60}]
    response = http.post("/chat/completions", json={"model": "shop", "messages": messages})
    assert response.status_code == 200, response.text
    [turn] = record.turns(response.json()["id"])
    room = CONTEXT - response.json()["usage"]["prompt_tokens"]
    assert turn.sampling["max_tokens"] == min(room, DEFAULT)


@pytest.mark.parametrize("num_tokens", [CONTEXT - 100, 5000])
def test_a_length_that_the_client_names_is_not_shortened(http: httpx2.Client, words_of: Any, num_tokens: int) -> None:
    response = chat(http, words_of(300), max_tokens=num_tokens)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    response = respond(http, words_of(300), max_output_tokens=num_tokens)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
