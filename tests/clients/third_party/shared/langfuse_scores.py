"""Scores by a `langfuse` package, of any generation: it prints a report as JSON, with what the package has logged."""

import json
import logging
import os
import urllib.request
from typing import Any

os.environ.pop("OTEL_SDK_DISABLED", None)  # its traces are sent, too

from langfuse import Langfuse

KEY = os.environ["ATTUNE_TEST_API_KEY"]
URL = os.environ["ATTUNE_TEST_BASE_URL"].removesuffix("/v1")
MESSAGE_ID = "m-1"


class Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")


def chat() -> str:
    """Chat as an application does, with the id of its message, and return the completion's id."""
    body = {"model": "shop", "messages": [{"role": "user", "content": "When are you open?"}]}
    headers = {
        "authorization": f"Bearer {KEY}",
        "content-type": "application/json",
        "x-attune-metadata-message-id": MESSAGE_ID,
    }
    request = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        id: str = json.load(answer)["id"]
    return id


def delete(client: Any, score_id: str) -> None:
    """Delete a score, by the name that this generation has for it."""
    api = client.api
    scores = getattr(api, "score", None) or (api.legacy.score_v1 if hasattr(api, "legacy") else api.scores)
    scores.delete(score_id)


def main() -> dict[str, Any]:
    recorder = Recorder()
    logging.getLogger().addHandler(recorder)
    client = Langfuse(public_key="pk-any", secret_key=KEY, host=URL, timeout=120)
    completion_id = chat()
    trace_id = client.create_trace_id(seed=MESSAGE_ID)
    report: dict[str, Any] = {"completion_id": completion_id, "authenticated": client.auth_check()}
    with client.start_as_current_observation(name="chat", as_type="span"):
        pass
    thumb: dict[str, Any] = {
        "name": "user-feedback",
        "data_type": "BOOLEAN",
        "trace_id": trace_id,
        "metadata": {"user_id": "ada"},
    }
    client.create_score(score_id="s-1", value=1, comment="Just right", **thumb)
    client.flush()
    client.create_score(score_id="s-1", value=0, comment="On second thoughts", **thumb)
    client.create_score(
        score_id="s-2",
        name="tone",
        value="friendly",
        data_type="CATEGORICAL",
        metadata={"completion_id": completion_id},
    )
    client.create_score(score_id="s-3", name="user-feedback", value=1, trace_id="f" * 32)
    of_bob = {"completion_id": completion_id, "user_id": "bob"}
    client.create_score(score_id="s-4", name="user-feedback", value=1, metadata=of_bob)
    client.flush()
    delete(client, "s-4")
    report["logged"] = list(recorder.lines)
    client.create_score(score_id="s-5", name="user-feedback", value=0.5, data_type="BOOLEAN", trace_id=trace_id)
    client.flush()
    client.shutdown()
    report["logged_of_fault"] = recorder.lines[len(report["logged"]) :]
    return report


print(json.dumps(main()))
