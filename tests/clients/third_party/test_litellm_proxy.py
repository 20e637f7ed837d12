"""The real LiteLLM proxy with the configuration of docs/connect/litellm.md, between the Python client and the API."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from attune_client import Attune, NotFound, ServerError, build
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.main import create_app
from app.models import Feedback, Turn, TurnMetadata
from tests.clients.third_party.environments import QUIET, REPOSITORY, free_port, prepare
from tests.docs.blocks import blocks
from tests.support.deployment import Harness
from tests.support.faulty_api import FaultyApi, error_response
from tests.support.scripted_engine import ScriptedEngine, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PAGE = REPOSITORY / "docs" / "connect" / "litellm.md"
KEY_OF_PROXY = "sk-of-the-proxy"
START_SECONDS = 300


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """Return SQLite's alone: a client cannot see which database the service has."""
    return sqlite_url


@pytest.fixture
def api(harness: Harness, scripted: ScriptedEngine) -> FaultyApi:
    return FaultyApi(create_app(harness.settings))


async def answer_as_hosted_model(request: Request) -> JSONResponse:
    message = {"role": "assistant", "content": "I am the hosted model."}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    reply = {"id": "chatcmpl-of-the-hosted-model", "object": "chat.completion", "created": 1, "model": "gpt-5-mini"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return JSONResponse(reply | {"choices": [choice], "usage": usage})


@pytest.fixture
def proxy(api: FaultyApi, harness: Harness, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a proxy with the configuration of the docs."""
    hosted = Starlette(routes=[Route("/v1/chat/completions", answer_as_hosted_model, methods=["POST"])])
    with serve(api, lifespan="on") as url, serve(hosted) as hosted_url:
        [config] = [block.text for block in blocks("yaml") if block.file == PAGE]
        path = tmp_path / "config.yaml"
        path.write_text(config.replace("http://127.0.0.1:8700", url).replace("assistant", "shop"))
        keys = {"ATTUNE_API_KEY": harness.key, "OPENAI_API_KEY": "sk-hosted", "LITELLM_MASTER_KEY": KEY_OF_PROXY}
        with run_proxy(path, keys | {"OPENAI_BASE_URL": f"{hosted_url}/v1"}) as address:
            yield address


@contextmanager
def run_proxy(config: Path, environment: dict[str, str]) -> Iterator[str]:
    folder = prepare("litellm_proxy")
    port = free_port()
    program = "from litellm import run_server; run_server()"
    command = [str(folder / "bin" / "python"), "-c", program, "--config", str(config), "--host", "127.0.0.1"]
    home = config.parent
    variables = {**QUIET, "HOME": str(home), "PATH": os.environ["PATH"], **environment}
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=variables, cwd=home, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until_alive(f"http://127.0.0.1:{port}/health/liveliness", process, home / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_alive(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(START_SECONDS * 2):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"LiteLLM did not start: {log.read_text()[-4000:]}")


async def test_proxy(proxy: str, api: FaultyApi, harness: Harness, tmp_path: Path) -> None:
    """One test, because the proxy takes a minute to start."""
    await check_chats(proxy, harness)
    await check_feedback(proxy, harness, tmp_path)
    await check_fallback(proxy, api, harness)


async def check_chats(proxy: str, harness: Harness) -> None:
    """Ids, versions, conversations, the end user and metadata pass through."""
    headers = {"x-attune-metadata-message-id": "m-7"}
    client = Attune(proxy, KEY_OF_PROXY, max_retries=0, http_client=httpx.Client(headers=headers))
    reply = client.chat.create("When are you open?", model="shop", user="ada")
    with client.chat.stream("When are you open?", model="shop") as stream:
        assert "".join(stream) == reply.text
    pinned = client.chat.create("When are you open?", model="shop@v0")
    assert reply.raw["model"] == "shop" and reply.version == stream.version == pinned.version == "shop@v0"
    turns = {turn.id: turn for turn in await harness.all(Turn)}
    assert list(turns) == [reply.completion_id, stream.completion_id, pinned.completion_id]
    assert turns[reply.completion_id].end_user == "ada"
    assert turns[reply.completion_id].conversation_id == reply.conversation_id
    assert turns[stream.completion_id].conversation_id == stream.conversation_id
    pairs = [(row.key, row.value) for row in await harness.all(TurnMetadata)]
    assert pairs == [("message-id", "m-7")] * 3


async def check_feedback(proxy: str, harness: Harness, tmp_path: Path) -> None:
    """Feedback counts once by its id, in the queue and in batches too, and changes by its key."""
    client = Attune(proxy, KEY_OF_PROXY, max_retries=0)
    one, two, three = [(await harness.turn()).id for _ in range(3)]
    first = client.feedback.up(one, id="vote-1", source="ada", comment="thanks", name="tone")
    assert client.feedback.up(one, id="vote-1", source="ada", comment="thanks", name="tone")["id"] == first["id"]
    client.feedback.up(two, key="vote-2", source="ada")
    client.feedback.down(two, key="vote-2", source="ada")
    assert [result["status"] for result in client.feedback.batch([build.up(three, id="vote-3")] * 2)] == [201, 200]
    with client.queue(tmp_path / "votes.db", background=False) as queue:
        queue.up(three, key="vote-4", source="bob")
        queue.withdraw_key("vote-4")
        queue.flush()
        assert not queue.refused()
    rows = [row for row in await harness.all(Feedback) if row.kind != "withdrawal"]
    assert [(row.turn_id, row.value, row.source_id) for row in rows] == [
        (one, 1.0, "ada"),
        (two, 1.0, "ada"),
        (two, -1.0, "ada"),
        (three, 1.0, None),
        (three, 1.0, "bob"),
    ]
    assert (rows[0].idempotency_key, rows[0].comment, rows[0].name) == ("vote-1", "thanks", "tone")
    [effective] = [vote for vote in client.feedback.find(two)["data"] if vote["effective"]]
    assert effective["value"] == -1.0
    assert not [vote for vote in client.feedback.find(three)["data"] if vote["effective"] and vote["source"]["id"]]


async def check_fallback(proxy: str, api: FaultyApi, harness: Harness) -> None:
    """The hosted model answers while Attune is away, and has no feedback."""
    num_turns = len(await harness.all(Turn))
    client = Attune(proxy, KEY_OF_PROXY, max_retries=0)
    api.faults = [error_response(503)] * 2
    with pytest.raises(ServerError):
        client.chat.create("When are you open?", model="shop@v0")
    reply = client.chat.create("When are you open?", model="shop")
    assert reply.text == "I am the hosted model." and len(await harness.all(Turn)) == num_turns
    with pytest.raises(NotFound):
        client.feedback.up(reply)
