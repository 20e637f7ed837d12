"""Plain curl commands and their output."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import Record, Running
from tests.clients.retries import with_retries

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
REQUEST = {"model": "shop", "messages": [{"role": "user", "content": "When are you open on Friday?"}]}


def curl(attune: Running, path: str, body: dict[str, Any] | None = None, *more: str) -> str:
    """Return curl's output with the status on the last line."""
    data_options = ["-d", json.dumps(body)] if body is not None else []
    auth = ["-H", f"Authorization: Bearer {attune.key}", "-H", "Content-Type: application/json"]
    command = ["curl", "-sS", "-N", "--max-time", "60", "-w", "\n%{http_code}", f"{attune.base_url}{path}"]
    done = subprocess.run([*command, *auth, *data_options, *more], capture_output=True, text=True, check=True)
    return done.stdout


def curl_json(attune: Running, path: str, body: dict[str, Any] | None = None, *more: str) -> tuple[int, Any]:
    text, _, status = curl(attune, path, body, *more).rpartition("\n")
    return int(status), json.loads(text)


def test_chat_and_feedback(attune: Running, record: Record) -> None:
    status, reply = curl_json(attune, "/chat/completions", REQUEST)
    assert (status, reply["model"]) == (200, "shop@v0")
    record.turn(reply["id"])
    vote = {"completion_id": reply["id"], "kind": "binary", "value": True}
    key = ("-H", f"Idempotency-Key: curl-{reply['id']}")
    assert curl_json(attune, "/feedback", vote, *key)[0] == 201
    assert curl_json(attune, "/feedback", vote, *key)[0] == 200
    assert len(record.feedback(reply["id"])) == 1


def test_streamed_chat(attune: Running, record: Record) -> None:
    lines = curl(attune, "/chat/completions", {**REQUEST, "stream": True}).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert lines[-1] == "200" and data[-1] == "[DONE]"
    chunks = [json.loads(line) for line in data[:-1]]
    turn = record.turn(chunks[0]["id"])
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert turn.reply == {"role": "assistant", "content": text}


@with_retries
def test_streamed_response(attune: Running, record: Record) -> None:
    lines = curl(attune, "/responses", {"model": "shop", "input": "Hi!", "stream": True}).splitlines()
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")][-1]
    assert (kinds[0], kinds[-1], last["type"]) == ("response.created", "response.completed", "response.completed")
    record.turn(last["response"]["completion_id"])


def test_error_response(attune: Running) -> None:
    status, reply = curl_json(attune, "/chat/completions", {"model": "shop"})
    assert status == 400 and reply["error"].keys() == {"message", "type", "param", "code"}
    assert reply["error"]["param"] == "messages"
