"""Log lines of the API name the request that caused them."""

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

import httpx2
import pytest

from app.chat.turn_writer import TurnWriter
from app.core.request_log import JsonLogFormatter, LogFormat, RequestLogFormatter, configure_logging, log_fields
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine


async def test_lines_of_a_request_have_the_id_of_its_response(harness: Harness, scripted: ScriptedEngine) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RequestLogFormatter())
    logging.getLogger("attune").addHandler(handler)
    try:
        scripted.drop_after_tokens = 1
        body = {"model": "shop", "input": "Hi", "stream": True}
        response = await asyncio.create_task(harness.api.post("/v1/responses", json=body))  # as a server does
        logging.getLogger("attune.other").warning("no request")
    finally:
        logging.getLogger("attune").removeHandler(handler)
    failure, other = stream.getvalue().splitlines()
    request_id = response.headers["x-request-id"]
    assert "WARNING attune.chat the stream of chatcmpl-" in failure and failure.endswith(f" request_id={request_id}")
    assert other.endswith("attune.other no request")
    assert response.headers["x-completion-id"] == request_id.replace("req-", "chatcmpl-")


SECRET = "my passport is zephyr-quartz"  # words that no random id contains: digits would be in one run of 700


@contextmanager
def logged(log_format: LogFormat) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns the lines of a process with this configuration, and everything of our own."""
    root, own = logging.getLogger(), logging.getLogger("attune")
    handlers, stream = root.handlers[:], io.StringIO()
    levels = {logger: logger.level for logger in (root, own)}
    try:
        configure_logging(log_format, "api")
        [handler] = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(stream)
        own.setLevel(logging.DEBUG)
        yield lambda: stream.getvalue().splitlines()
    finally:
        root.handlers = handlers
        for logger, level in levels.items():
            logger.setLevel(level)


async def test_json_lines_name_the_request_turn_policy_and_version(harness: Harness, scripted: ScriptedEngine) -> None:
    with logged("json") as lines:
        scripted.drop_after_tokens = 1
        body = {"model": "shop", "input": "Hi", "stream": True}
        response = await asyncio.create_task(harness.api.post("/v1/responses", json=body))
        logging.getLogger("attune.other").error("no request", exc_info=ValueError("wrong"))
        failure, other = map(json.loads, lines())
    assert failure["message"].startswith("the stream of chatcmpl-") and failure["level"] == "WARNING"
    assert (failure["role"], failure["logger"]) == ("api", "attune.chat")
    assert failure["request_id"] == response.headers["x-request-id"]
    assert failure["turn"] == response.headers["x-completion-id"]
    assert (failure["policy"], failure["version"]) == ("shop", response.headers["x-policy-version"])
    assert datetime.fromisoformat(failure["time"]).tzinfo is not None
    assert "ValueError: wrong" in other["traceback"] and not {"request_id", "turn"} & set(other)


def test_fields_belong_to_their_block() -> None:
    formatter, record = JsonLogFormatter("trainer"), logging.LogRecord("x", logging.INFO, "", 0, "a %s", ("b",), None)
    with log_fields(batch="bat-1"):
        inside = json.loads(formatter.format(record))
    outside = json.loads(formatter.format(record))
    assert inside == outside | {"batch": "bat-1"} and outside["message"] == "a b" and outside["role"] == "trainer"


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_no_line_of_a_chat_that_succeeds_or_fails_holds_the_prompt_or_the_reply(
    harness: Harness, scripted: ScriptedEngine, live_url: str, log_format: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": SECRET}]
    scripted.reply_text = f"You said {SECRET}."

    async def ask(**fields: object) -> int:
        body = {"model": "shop", "messages": messages, **fields}
        return (await api.post("/v1/chat/completions", json=body)).status_code

    async def fail(*arguments: object) -> None:
        raise RuntimeError("a defect")

    headers = {"authorization": f"Bearer {harness.key}"}
    # On a real server, which logs the errors that leave the application.
    async with httpx2.AsyncClient(base_url=live_url, headers=headers, timeout=60) as api:
        with logged(log_format) as lines:
            statuses = [await ask(), await ask(stream=True), await ask(temperature=-1), await ask(tools=SECRET)]
            scripted.drop_after_tokens = 1
            statuses += [await ask(), await ask(stream=True)]
            body = {"model": "shop", "input": SECRET, "stream": True}
            statuses.append((await api.post("/v1/responses", json=body)).status_code)
            monkeypatch.setattr(TurnWriter, "record_start", fail)
            # The server logs an error that leaves the application; the server of the tests has loggers of its own.
            monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
            logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
            statuses.append(await ask())
            while "a defect" not in (text := "\n".join(lines())):  # it logs after the response
                await asyncio.sleep(0.02)
    assert statuses[:4] == [200, 200, 400, 400] and statuses[4] >= 500 and statuses[-1] == 500
    assert not [word for word in ("passport", "zephyr", "quartz") if word in text]
