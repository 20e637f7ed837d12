"""What an `anthropic` package makes of the wire: run against a scripted engine, it prints a report as JSON.

The engine says a text, and calls the tool if the request has one.
"""

import json
import os
from typing import Any

import anthropic

KEY = os.environ["ATTUNE_TEST_API_KEY"]
URL = os.environ["ATTUNE_TEST_BASE_URL"].removesuffix("/v1")
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
REQUEST: Any = {"model": "shop", "max_tokens": 12_000, "messages": [{"role": "user", "content": "When are you open?"}]}
TOOL: Any = {"name": "order_status", "description": "Look it up.", "input_schema": {"type": "object"}}


def error_of(function: Any) -> dict[str, Any]:
    """Return what the client raises."""
    try:
        function()
    except anthropic.APIStatusError as error:
        body: Any = error.body
        kind = body["error"]["type"]
        return {"class": type(error).__name__, "type": kind, "text": str(error), "request_id": error.request_id}
    raise AssertionError("no error was raised")


def main() -> dict[str, Any]:
    reply = client.messages.create(**REQUEST, system="Be kind.", metadata={"user_id": "ada"})
    raw = client.messages.with_raw_response.create(**REQUEST)
    with client.messages.stream(**REQUEST, thinking={"type": "adaptive"}) as stream:
        kinds = list(dict.fromkeys(event.type for event in stream))
        streamed = stream.get_final_message()
    with client.messages.stream(**REQUEST, tools=[TOOL]) as stream:
        called = stream.get_final_message()
    [use] = [block for block in called.content if block.type == "tool_use"]
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "none such", "is_error": True}
    loop = [*REQUEST["messages"], {"role": "assistant", "content": called.content}]
    after = client.messages.create(
        **{**REQUEST, "messages": [*loop, {"role": "user", "content": [result]}]}, tools=[TOOL]
    )
    later = [*REQUEST["messages"], {"role": "assistant", "content": streamed.content}, REQUEST["messages"][0]]
    continued = client.messages.create(**{**REQUEST, "messages": later})
    counted = client.messages.count_tokens(model="shop", messages=REQUEST["messages"], tools=[TOOL])
    models = list(client.models.list())
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    other = anthropic.Anthropic(base_url=URL, api_key="sk-wrong", max_retries=0)
    bearer = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
    return {
        "reply": reply.model_dump(mode="json"),
        "request_id": reply._request_id,
        "headers": {name: raw.headers[name] for name in ("x-completion-id", "x-policy-version", "request-id")},
        "event_types": kinds,
        "streamed": streamed.model_dump(mode="json"),
        "called": called.model_dump(mode="json"),
        "after": after.id,
        "continued": continued.id,
        "counted": counted.input_tokens,
        "models": [model.id for model in models],
        "by_bearer": bearer.messages.create(**REQUEST).role,
        "errors": {
            "unknown model": error_of(lambda: client.messages.create(**{**REQUEST, "model": "nobody"})),
            "image": error_of(
                lambda: client.messages.create(**{**REQUEST, "messages": [{"role": "user", "content": [image]}]})
            ),
            "key": error_of(lambda: other.messages.create(**REQUEST)),
            "batches": error_of(lambda: client.messages.batches.list()),
        },
    }


print(json.dumps(main()))
