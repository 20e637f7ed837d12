"""What the programs of this folder share. Each runs with its client's packages alone and prints a report as JSON.

A program calls `report` with one function for each capability of its client: `chat`, `stream`, `tools`, `structured`
and `multi_turn`. A function returns what the client made of the reply:

    id          the completion's id as the client shows it, or None if the client loses it
    text        the text of the reply
    pieces      stream: how many pieces came
    tool        tools: the name and the arguments of the call
    value       structured: the parsed object
    first_text  multi_turn: the text of the first of two replies
    metadata    the pairs that the client sent with the request and that identify it, if the id is lost
    target      another target of feedback that names the reply, for its recipe

`report` then gives feedback on the replies of `chat` and `stream`, and by each `target`, and adds its id as `feedback`.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal
from urllib.request import Request, urlopen
from uuid import uuid4

from pydantic import BaseModel

BASE_URL, API_KEY = os.environ["ATTUNE_TEST_BASE_URL"], os.environ["ATTUNE_TEST_API_KEY"]
MODEL = "shop"
TEMPERATURE, MAX_TOKENS = 0.3, 120
SYSTEM = "You are the support assistant of a small bicycle shop."
QUESTION = "When are you open on Friday?"
NEXT_QUESTION = "And on Saturday?"
ORDER_QUESTION = "Where is my order 4321?"
MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
ORDER_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": ORDER_QUESTION},
]
ORDER_STATUS: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "order_status",
        "description": "Look up the state of an order.",
        "parameters": {
            "type": "object",
            "properties": {"order_id": {"type": "string", "description": "The number of the order."}},
            "required": ["order_id"],
        },
    },
}
TRIES = 4  # a small model does not end every reply in time, see tests/clients/retries.py
Capability = Callable[[], Any]


class Opening(BaseModel):
    """When the shop is open."""

    day: Literal["Friday", "Saturday"]
    open: bool


def order_status(order_id: str) -> str:
    """Look up the state of an order.

    Args:
        order_id: The number of the order.
    """
    return '{"state": "shipped"}'


def new_metadata() -> dict[str, str]:
    """Return metadata for one request, by which feedback can name it."""
    return {"request": uuid4().hex}


def continue_chat(text: str) -> list[dict[str, Any]]:
    """Return the messages of the second request of a conversation, after the reply `text`."""
    return [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": NEXT_QUESTION}]


def report(**capabilities: Capability) -> None:
    """Call the functions and print their results. One that raises is called again, and its last error is printed."""
    output, sys.stdout = sys.stdout, sys.stderr  # what the client itself prints
    results = asyncio.run(_try_all(capabilities))
    print(json.dumps(results), file=output, flush=True)
    os._exit(0)  # some clients leave threads that send telemetry


async def _try_all(capabilities: dict[str, Capability]) -> dict[str, Any]:
    results = {name: await _try(function) for name, function in capabilities.items()}
    for name, result in results.items():
        if "error" not in result and (name in ("chat", "stream") or "target" in result):
            result["feedback"] = await asyncio.to_thread(give_feedback, result)
    return results


def give_feedback(result: dict[str, Any]) -> str:
    """Give feedback by what the client shows of a reply, or by what was sent with the request. Return its id."""
    if "target" in result:
        named = {"target": result["target"]}
    elif result["id"] is None:
        named = {"target": {"metadata": result["metadata"]}}
    else:
        named = {"completion_id": result["id"]}
    body = json.dumps({**named, "kind": "binary", "value": "up", "source": "ada"}).encode()
    headers = {"authorization": f"Bearer {API_KEY}", "content-type": "application/json"}
    with urlopen(Request(f"{BASE_URL}/feedback", body, headers)) as response:
        return str(json.load(response)["id"])


async def _try(function: Capability) -> dict[str, Any]:
    error = ""
    for _ in range(TRIES):
        try:
            if inspect.iscoroutinefunction(function):
                return await function()
            return await asyncio.to_thread(function)
        except Exception:
            error = traceback.format_exc()
    return {"error": error}
