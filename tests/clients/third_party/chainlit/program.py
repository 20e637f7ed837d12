"""Chainlit's server, and what its page sends: a socket for the chat, and requests for thumbs on the run of a reply."""

import asyncio
import os
import subprocess
import sys
import time
import uuid
from typing import Any

import httpx
import socketio
from attune_client.chainlit import FeedbackLayer
from chainlit import User
from chainlit.types import Feedback, Pagination, ThreadFilter
from ui_program import APP, QUESTIONS, client, read_votes, report

PORT = os.environ["ATTUNE_TEST_PORT"]
URL = f"http://127.0.0.1:{PORT}"
SESSION = str(uuid.uuid4())


async def chat(events: list[tuple[str, Any]]) -> None:
    """Ask the questions and wait for the replies. `events` gets what the server sends to the page."""
    page = socketio.AsyncClient()
    is_done = asyncio.Event()

    async def receive(event: str, data: Any = None) -> None:
        events.append((event, data))
        if event == "task_end":
            is_done.set()

    page.on("*", receive)
    auth = {"sessionId": SESSION, "clientType": "webapp", "userEnv": "{}", "chatProfile": "", "threadId": ""}
    await page.connect(URL, auth=auth, socketio_path="/ws/socket.io", transports=["websocket"])
    await page.emit("connection_successful")
    for question in QUESTIONS:
        await asyncio.sleep(0.5)
        is_done.clear()
        message = {"id": str(uuid.uuid4()), "name": "User", "type": "user_message", "output": question}
        await page.emit("client_message", {"message": message | {"createdAt": "2026-11-26T12:00:00Z"}})
        await asyncio.wait_for(is_done.wait(), 60)
    await page.disconnect()


def press(value: int | None, vote: dict[str, Any]) -> list[list[Any]]:
    """Press a thumb, or, with None, the same once more, as the page does. Return the votes that count then."""
    if value is None:
        response = httpx.request("DELETE", f"{URL}/feedback", json={"feedbackId": vote.pop("id")})
    else:
        vote["value"] = value
        response = httpx.put(f"{URL}/feedback", json={"feedback": vote, "sessionId": SESSION})
    assert response.status_code == 200, response.text
    if value is not None:
        vote["id"] = response.json()["feedbackId"]
    return read_votes(id)


class Inner(FeedbackLayer):
    """A data layer with ids of its own. It records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def upsert_feedback(self, feedback: Feedback) -> str:
        self.calls.append("upsert_feedback")
        return "an id of its own"

    async def delete_feedback(self, feedback_id: str) -> bool:
        self.calls.append(f"delete {feedback_id}")
        return True

    async def create_user(self, user: User) -> None:
        self.calls.append("create_user")


async def use_around_another_layer(run: str) -> list[list[Any]]:
    """Return the votes that are left after a vote through a layer around another one, which is then taken back."""
    inner = Inner()
    layer = FeedbackLayer(inner, client.feedback)
    id_of_vote = await layer.upsert_feedback(Feedback(forId=run, value=1, threadId="thread-7"))
    [[*around, person]] = read_votes(id)
    assert person == f"chainlit:{run}", "no such conversation is open"
    await layer.delete_feedback(id_of_vote)
    assert await layer.create_user(User("ada")) is None
    assert inner.calls == ["upsert_feedback", "delete an id of its own", "create_user"]
    alone = FeedbackLayer()
    assert (await alone.create_user(User("ada"))).identifier == "ada" and await alone.get_user("ada") is None
    assert (await alone.list_threads(Pagination(first=5), ThreadFilter())).to_dict()["data"] == []
    return [around]


server = subprocess.Popen(
    [sys.executable, "-m", "chainlit", "run", str(APP), "--headless", "--port", PORT], stdout=sys.stderr
)
try:
    for _ in range(240):
        try:
            page = httpx.get(f"{URL}/project/settings")
            break
        except httpx.TransportError:
            assert server.poll() is None, "Chainlit did not start"
            time.sleep(0.5)
    assert page.json()["dataPersistence"] and os.environ["ATTUNE_API_KEY"] not in page.text
    events: list[tuple[str, Any]] = []
    asyncio.run(chat(events))
    runs = [step for event, step in events if event == "new_message" and step["name"] == "on_message"]
    run, thread = runs[-1]["id"], runs[-1]["threadId"]  # what the page votes on
    completions = httpx.get(
        f"{os.environ['ATTUNE_URL']}/v1/chat/completions",
        params={"metadata[chainlit_run]": run},
        headers={"authorization": f"Bearer {os.environ['ATTUNE_API_KEY']}"},
    )
    [id] = [completion["id"] for completion in completions.json()["data"]]
    vote: dict[str, Any] = {"forId": run, "threadId": thread}
    up = press(1, vote)
    down = press(0, vote)
    vote["comment"] = "Wrong day."
    comment = press(0, vote)
    taken_back = press(None, vote)
    vote.pop("comment")
    again = press(1, vote)
    press(None, vote)
    around = asyncio.run(use_around_another_layer(run))
finally:
    server.terminate()
    server.wait(30)
steps = {"up": up, "down": down, "comment": comment, "taken_back": taken_back, "again": again, "around": around}
report(id, **steps, end=read_votes(id))
