"""Whose fault an error is, and what of it the model sees."""

import errno
import urllib.request

import httpx
import httpx2
import pytest
import requests

from alignment.environments.errors import (
    InfrastructureFailure,
    describe_error,
    describe_with_place,
    is_host_failure,
    printable,
)
from alignment.environments.tools.function_tool import FunctionTool
from tests.support.tool_calls import call_one

URL = "http://127.0.0.1:9/?key=SECRET"  # nothing listens there


def by_urllib() -> str:
    return str(urllib.request.urlopen(URL).read())


def by_requests() -> str:
    return str(requests.get(URL).text)


def by_httpx() -> str:
    return httpx.get(URL, trust_env=False).text


async def by_httpx2() -> str:
    async with httpx2.AsyncClient(trust_env=False) as client:
        return (await client.get(URL)).text


async def by_aiohttp() -> str:
    aiohttp = pytest.importorskip("aiohttp")
    async with aiohttp.ClientSession() as session, session.get(URL) as response:
        return str(await response.text())


@pytest.mark.parametrize("function", [by_urllib, by_requests, by_httpx, by_httpx2, by_aiohttp])
async def test_refused_connection_of_a_client_is_of_the_host(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(InfrastructureFailure) as raised:
        await call_one(FunctionTool(function), {})  # type: ignore[arg-type]
    assert "SECRET" not in str(raised.value)


def raised_while_handling(cause: Exception) -> Exception:
    try:
        try:
            raise cause
        except Exception:
            raise ValueError("no answer")  # noqa: B904
    except ValueError as error:
        return error


def test_connections_are_found_below_other_errors() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    unreachable = OSError(errno.EHOSTUNREACH, "no route")
    for error in (unreachable, raised_while_handling(refused), ExceptionGroup("", [ValueError(), refused])):
        assert is_host_failure(error)
    cycle = ValueError()
    cycle.__cause__ = cycle
    for error in (cycle, FileNotFoundError(errno.ENOENT, "x"), raised_while_handling(KeyError("x")), TimeoutError("x")):
        assert not is_host_failure(error)


def test_description_is_one_short_line_without_keys() -> None:
    message = "404 for url: https://me:SECRET@example.com/a?key=SECRET&b=1 (see /b?token=SECRET)\nSECRET"
    assert describe_error(ValueError(message)) == "ValueError: 404 for url: https://example.com/a?… (see /b?…)"
    assert describe_error(ValueError("x" * 1000)) == f"ValueError: {'x' * 300} …"
    assert describe_error(ValueError("is it x? y=1")) == "ValueError: is it x? y=1"
    assert describe_error(ValueError("\n")) == "ValueError"


def test_description_says_where_the_environment_has_failed() -> None:
    def fail() -> None:
        raise ValueError("\n-----\n  no such move\nmore")

    with pytest.raises(ValueError) as raised:
        fail()
    assert describe_error(raised.value) == "ValueError: no such move"
    line = raised.tb.tb_next.tb_lineno if raised.tb.tb_next else 0
    assert describe_with_place(raised.value) == f"ValueError: no such move (test_errors.py:{line} in fail)"
    assert describe_with_place(ValueError("nowhere")) == "ValueError: nowhere"


def test_control_characters_are_not_printed() -> None:
    assert printable("a\x1b[31m\x9b\r\x07\tb\né\u2028") == "a[31m\tb\né\u2028"
