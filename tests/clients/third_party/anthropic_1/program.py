"""The `anthropic` package, generation 1: the Messages API."""

from typing import Any

from anthropic_capabilities import REQUEST, client, multi_turn, structured, text_of, tools
from client_program import report


def chat() -> dict[str, Any]:
    reply = client.messages.create(**REQUEST)
    return {"id": reply.id, "text": text_of(reply)}


def stream() -> dict[str, Any]:
    with client.messages.stream(**REQUEST) as events:
        texts = list(events.text_stream)
        reply = events.get_final_message()
    return {"id": reply.id, "text": "".join(texts), "pieces": len(texts)}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
