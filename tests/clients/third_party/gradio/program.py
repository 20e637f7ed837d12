"""Gradio's chatbot: its server, and the requests that its page sends when a thumb is pressed."""

import json
import runpy
from typing import Any

import httpx
from gradio_client import Client
from ui_program import APP, QUESTIONS, client, read_votes, report

SESSION = "of-the-tests"
demo = runpy.run_path(str(APP))["demo"]
_, url, _ = demo.launch(prevent_thread_lock=True, quiet=True)
assert client._connection.api_key not in httpx.get(f"{url}config").text, "the page knows no API key"
page = Client(url, verbose=False)
history: list[dict[str, Any]] = []
for question in QUESTIONS:
    reply = page.predict(question, api_name="/reply")
    history += [{"role": "user", "content": [{"type": "text", "text": question}]}]
    history += [reply | {"content": [{"type": "text", "text": reply["content"]}]}]


def press(option: bool | str, index: int = len(history) - 1) -> None:
    """Send what the page sends for a feedback option; "" if the same one was pressed again."""
    [listener] = [each["id"] for each in demo.config["dependencies"] if each["targets"][0][1] == "like"]
    event = {"index": index, "value": [history[index]["content"]], "liked": option}
    body = {"fn_index": listener, "data": [history], "event_data": event, "session_hash": SESSION}
    httpx.post(f"{url}gradio_api/queue/join", json=body).raise_for_status()
    with httpx.stream("GET", f"{url}gradio_api/queue/data", params={"session_hash": SESSION}, timeout=60) as events:
        for line in events.iter_lines():
            event = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
            if event.get("msg") == "process_completed":
                assert event["success"], event
                return


def votes() -> list[list[Any]]:
    return read_votes(id)


id = history[-1]["metadata"]["id"]
press(True)
up = votes()
press(False)
down = votes()
press("")
taken_back = votes()
press("Other")
label = votes()
press(True)
again = votes()
history.append({"role": "assistant", "content": [{"type": "text", "text": "Of another model."}]})
history.append({"role": "user", "content": [{"type": "text", "text": "And yours?"}]})
history.append({"role": "assistant", "content": [{"type": "text", "text": "Of another model."}]})
press(False, len(history) - 1)
report(id, up=up, down=down, taken_back=taken_back, label=label, again=again, other_model=votes())
