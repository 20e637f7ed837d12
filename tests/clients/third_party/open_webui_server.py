"""A real Open WebUI without a browser: its server, and the requests that its page sends."""

import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.clients.third_party.environments import QUIET, REPOSITORY, prepare

PLUGIN = REPOSITORY / "connectors" / "openwebui" / "attune_openwebui.py"
FUNCTION = "attune_openwebui"
START_SECONDS = 300
HEADERS = {  # docs/connect/openwebui.md
    "X-Attune-Metadata-Message-Id": "{{MESSAGE_ID}}",
    "X-Conversation-Id": "{{CHAT_ID}}",
    "X-Attune-User": "{{USER_ID}}",
    "X-Attune-Task": "{{TASK}}",
}
EVERYBODY_READS = {"principal_type": "user", "principal_id": "*", "permission": "read"}
OFFLINE = {
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "true",
    "ENABLE_OLLAMA_API": "false",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "WEBUI_SECRET_KEY": "of-the-tests",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Reply:
    chat_id: str
    message_id: str
    parent_id: str
    content: str


class OpenWebUI:
    """A signed-up administrator of a running Open WebUI."""

    def __init__(self, url: str) -> None:
        self.url, self.user_id = url, ""
        self.api = httpx2.Client(base_url=url, timeout=120)

    def close(self) -> None:
        self.api.close()

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of the answer. Asserts its success."""
        response = self.api.request(method, path, json=body)
        assert response.status_code < 400, f"{method} {path}: {response.status_code} {response.text[:2000]}"
        return response.json()

    def sign_up(self) -> None:
        """Create the first user, who is an administrator."""
        form = {"name": "Ada", "email": "ada@example.org", "password": "of-the-tests-1"}
        user = self.request("POST", "/api/v1/auths/signup", form)
        self.api.headers["authorization"] = f"Bearer {user['token']}"
        self.user_id = str(user["id"])

    def add_user(self, name: str) -> "OpenWebUI":
        """Create an account without rights of an administrator, and return its page, which is to be closed."""
        form = {"name": name, "email": f"{name}@example.org", "password": "of-the-tests-1", "role": "user"}
        user = self.request("POST", "/api/v1/auths/add", form)
        page = OpenWebUI(self.url)
        page.api.headers["authorization"] = f"Bearer {user['token']}"
        page.user_id = str(user["id"])
        return page

    def connect(self, base_url: str, api_key: str, model: str, system: str | None = None) -> None:
        """Make Attune the only connection, with the header lines and the model's settings of the docs.

        `system`: the system prompt of the model.
        """
        form = {
            "ENABLE_OPENAI_API": True,
            "OPENAI_API_BASE_URLS": [base_url],
            "OPENAI_API_KEYS": [api_key],
            "OPENAI_API_CONFIGS": {"0": {"enable": True, "headers": HEADERS}},
        }
        self.request("POST", "/openai/config/update", form)
        params = {} if system is None else {"system": system}
        settings: dict[str, Any] = {"id": model, "base_model_id": None, "name": model, "params": params}
        settings |= {"meta": {"capabilities": {"builtin_tools": False}}, "access_grants": [EVERYBODY_READS]}
        self.request("POST", "/api/v1/models/create", settings)
        self.request("GET", "/api/models?refresh=true")

    def install_plugin(self, base_url: str, api_key: str, **valves: Any) -> None:
        """Import the function, set it up and enable it, as the docs say."""
        form = {"id": FUNCTION, "name": "Attune", "content": PLUGIN.read_text(), "meta": {"description": "Attune"}}
        self.request("POST", "/api/v1/functions/create", form)
        self.request(
            "POST", f"/api/v1/functions/id/{FUNCTION}/valves/update", {"url": base_url, "api_key": api_key, **valves}
        )
        self.request("POST", f"/api/v1/functions/id/{FUNCTION}/toggle")

    def ask(
        self, text: str, model: str, *, after: Reply | None = None, instead_of: Reply | None = None, tasks: bool = False
    ) -> Reply:
        """Send a message, or let a reply be written once more, and wait for the reply."""
        id, user_id = str(uuid.uuid4()), str(uuid.uuid4())
        history: dict[str, Any] = {}
        parent_id, children = (after.message_id if after else None), [id]
        if (before := after or instead_of) is not None:
            history = self.messages(before.chat_id)
        if instead_of is not None:
            user_id = instead_of.parent_id
            parent_id, children = history[user_id].get("parentId"), [*history[user_id]["childrenIds"], id]
        user_message: dict[str, Any] = {"id": user_id, "parentId": parent_id, "childrenIds": children}
        user_message |= {"role": "user", "content": text, "timestamp": int(time.time()), "models": [model]}
        messages = [*_path(history, parent_id), {"role": "user", "content": text}]
        form: dict[str, Any] = {"model": model, "stream": True, "messages": messages, "id": id}
        form |= {"parent_id": parent_id, "user_message": user_message, "session_id": "of-the-tests"}
        if before is not None:
            form["chat_id"] = before.chat_id
        form["background_tasks"] = {"title_generation": tasks, "tags_generation": tasks, "follow_up_generation": tasks}
        answer = self.request("POST", "/api/chat/completions", form)
        return self._wait(str(answer.get("chat_id") or form["chat_id"]), id, user_id)

    def _wait(self, chat_id: str, id: str, parent_id: str) -> Reply:
        for _ in range(600):
            message = self.messages(chat_id).get(id) or {}
            if message.get("done"):
                assert not message.get("error"), message
                return Reply(chat_id, id, parent_id, message["content"])
            time.sleep(0.2)
        raise AssertionError(f"no reply in the chat {chat_id}")

    def messages(self, chat_id: str) -> dict[str, Any]:
        chat = self.request("GET", f"/api/v1/chats/{chat_id}")
        messages: dict[str, Any] = chat["chat"]["history"]["messages"]
        return messages

    def form(self, reply: Reply, rating: int, model: str, **data: Any) -> dict[str, Any]:
        """Return what the page sends for a thumb on a reply."""
        chat = self.request("GET", f"/api/v1/chats/{reply.chat_id}")
        meta = {"arena": False, "model_id": model, "message_id": reply.message_id, "chat_id": reply.chat_id}
        return {
            "type": "rating",
            "data": {"rating": rating, "model_id": model, **data},
            "meta": {**meta, "message_index": 1, "base_models": {model: None}},
            "snapshot": {"chat": chat},
        }

    def vote(self, reply: Reply, rating: int, model: str, **data: Any) -> str:
        """Press a thumb and return the id of the feedback."""
        return str(self.request("POST", "/api/v1/evaluations/feedback", self.form(reply, rating, model, **data))["id"])

    def change_vote(self, id: str, reply: Reply, rating: int, model: str, **data: Any) -> None:
        self.request("POST", f"/api/v1/evaluations/feedback/{id}", self.form(reply, rating, model, **data))

    def delete_vote(self, id: str) -> None:
        self.request("DELETE", f"/api/v1/evaluations/feedback/{id}")


def _path(history: dict[str, Any], last: str | None) -> list[dict[str, Any]]:
    """Return the messages from the first one to `last`."""
    messages: list[dict[str, Any]] = []
    while last:
        message = history[last]
        messages.insert(0, {"role": message["role"], "content": message["content"]})
        last = message.get("parentId")
    return messages


@contextmanager
def run_open_webui(home: Path) -> Iterator[OpenWebUI]:
    """Run Open WebUI with a new database in `home` until the block ends."""
    folder = prepare("open_webui")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(folder / "bin" / "python"), "-c", "from open_webui import app; app()", "serve"]
    environment = {**QUIET, **OFFLINE, "HOME": str(home), "PATH": os.environ["PATH"], "DATA_DIR": str(home)}
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], env=environment, cwd=home, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, home / "log")
        yield OpenWebUI(url)
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(START_SECONDS * 2):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"Open WebUI did not start: {log.read_text()[-4000:]}")
