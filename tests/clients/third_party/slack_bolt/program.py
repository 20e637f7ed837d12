"""Slack's requests, signed and as Bolt's own objects, to the bot of the docs, and a stand-in of Slack's Web API."""

import json
import os
import queue
import runpy
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode

import slack_bolt.app.app
from slack_bolt import BoltRequest
from slack_sdk import WebClient
from slack_sdk.signature import SignatureVerifier
from ui_program import APP, QUESTIONS, read_votes, report

SECRET = "of-the-tests"
messages: queue.Queue[dict[str, Any]] = queue.Queue()


class WebApi(BaseHTTPRequestHandler):
    """Answers every method of the Web API, and keeps the messages that the bot posts."""

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["content-length"] or 0)).decode()
        is_json = "json" in (self.headers["content-type"] or "")
        body = json.loads(text) if is_json else dict(parse_qsl(text))
        if self.path.endswith("chat.postMessage"):
            messages.put(body)
        answer = {"ok": True, "team_id": "T1", "user_id": "U-bot", "bot_id": "B1", "ts": "2.0"}
        payload = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), WebApi)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/"
slack_bolt.app.app.create_web_client = lambda token=None, logger=None: WebClient(token, base_url=url, logger=logger)
os.environ |= {"SLACK_BOT_TOKEN": "xoxb-1", "SLACK_SIGNING_SECRET": SECRET}
bot = runpy.run_path(str(APP))["app"]


def send(body: str, content_type: str) -> None:
    """Send a request as Slack signs it."""
    now = str(int(time.time()))
    signature = SignatureVerifier(SECRET).generate_signature(timestamp=now, body=body)
    headers = {"content-type": content_type, "x-slack-request-timestamp": now, "x-slack-signature": signature}
    response = bot.dispatch(BoltRequest(body=body, headers=headers))
    assert response.status == 200, response.body


def ask(text: str) -> dict[str, Any]:
    """Mention the bot and return the message that it posts."""
    event = {"type": "app_mention", "team": "T1", "user": "U1", "text": text, "ts": "1.0", "channel": "C1"}
    body = {"type": "event_callback", "team_id": "T1", "api_app_id": "A1", "event": event}
    send(json.dumps(body), "application/json")
    return messages.get(timeout=60)


def press(button: str, user: str, expected: int) -> list[list[Any]]:
    """Press a button of the message. Return the votes, as soon as `expected` have been given in all."""
    action = {"type": "feedback_buttons", "action_id": "attune_vote", "block_id": "b", "action_ts": "3.0"}
    person = {"id": user, "team_id": "T1"}
    payload = {"type": "block_actions", "api_app_id": "A1", "team": {"id": "T1"}, "user": person}
    payload |= {"actions": [action | {"value": buttons[button]["value"]}], "channel": {"id": "C1"}}
    before = read_votes(id)
    send(urlencode({"payload": json.dumps(payload)}), "application/x-www-form-urlencoded")
    for _ in range(300):
        if (votes := read_votes(id)) != before:
            break
        time.sleep(0.1)
    assert len(votes) == expected, votes
    return votes


replies = [ask(question) for question in QUESTIONS]
blocks = replies[-1]["blocks"]
blocks = json.loads(blocks) if isinstance(blocks, str) else blocks
[buttons] = blocks[-1]["elements"]
id = buttons["positive_button"]["value"].partition(":")[2]
up = press("positive_button", "U1", 1)
down = press("negative_button", "U1", 1)
other = press("positive_button", "U2", 2)
report(id, up=up, down=down, other=other)
