"""An agent behind an OpenAI-compatible URL whose replies a function of the test decides."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.scripted_engine import serve

Reply = Callable[[list[dict[str, Any]]], str | dict[str, Any]]


@contextmanager
def serve_agent(reply: Reply, keys: list[str] | None = None) -> Iterator[str]:
    """Yield the base URL. `keys` receives the API key of each chat."""
    numbers = itertools.count()

    async def chat(request: Request) -> Response:
        if keys is not None:
            keys.append(request.headers["authorization"].removeprefix("Bearer "))
        body = await request.json()
        message = reply(body["messages"])
        if isinstance(message, str):
            message = {"content": message}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": None} | message,
            "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        completion = {"id": f"chatcmpl-{next(numbers)}", "object": "chat.completion", "created": 1, "model": "m"}
        if body.get("stream"):
            return Response(_stream(completion, choice, usage), media_type="text/event-stream")
        return JSONResponse(completion | {"choices": [choice], "usage": usage})

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    with serve(app) as url:
        yield f"{url}/v1"


def _stream(completion: dict[str, Any], choice: dict[str, Any], usage: dict[str, int]) -> str:
    """Return the completion as the events of a stream: one chunk, the usage, and the end."""
    calls = [{"index": at, **call} for at, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    chunk = completion | {"object": "chat.completion.chunk"}
    first = chunk | {"choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]}
    events = [json.dumps(first), json.dumps(chunk | {"choices": [], "usage": usage}), "[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events)


def tool_call(name: str, **arguments: object) -> dict[str, Any]:
    """Return a reply that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": "call-0", "type": "function", "function": function}]}
