"""Instructor: structured output by the modes TOOLS (a forced tool call) and JSON_SCHEMA."""

from typing import Any

import instructor
from client_program import (
    API_KEY,
    BASE_URL,
    MAX_TOKENS,
    MESSAGES,
    MODEL,
    ORDER_MESSAGES,
    TEMPERATURE,
    Opening,
    continue_chat,
    new_metadata,
    report,
)
from openai import OpenAI
from pydantic import BaseModel, Field

OPTIONS: Any = {"model": MODEL, "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, "max_retries": 0}
openai_client = OpenAI(base_url=BASE_URL, api_key=API_KEY)


class OrderStatus(BaseModel):
    """Look up the state of an order."""

    order_id: str = Field(description="The number of the order.")


OrderStatus.__name__ = "order_status"  # the tool that the demo model knows


def chat() -> dict[str, Any]:
    """Without a response model, Instructor returns the completion of the OpenAI client."""
    client = instructor.from_openai(openai_client)
    reply: Any = client.chat.completions.create(messages=MESSAGES, response_model=None, **OPTIONS)
    return {"id": reply.id, "text": reply.choices[0].message.content}


def stream() -> dict[str, Any]:
    """Partial objects while the reply is streamed. They have no id: metadata names the request."""
    metadata = new_metadata()
    client = instructor.from_openai(openai_client, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            messages=MESSAGES, response_model=Opening, extra_body={"metadata": metadata}, **OPTIONS
        )
    )
    return {"id": None, "metadata": metadata, "value": parts[-1].model_dump(), "pieces": len(parts)}


def tools() -> dict[str, Any]:
    client = instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS)
    value, reply = client.chat.completions.create_with_completion(
        messages=ORDER_MESSAGES, response_model=OrderStatus, **OPTIONS
    )
    return {"id": reply.id, "tool": {"name": "order_status", "arguments": value.model_dump()}}


def structured() -> dict[str, Any]:
    client = instructor.from_openai(openai_client, mode=instructor.Mode.JSON_SCHEMA)
    value, reply = client.chat.completions.create_with_completion(messages=MESSAGES, response_model=Opening, **OPTIONS)
    return {"id": reply.id, "value": value.model_dump()}


def multi_turn() -> dict[str, Any]:
    client, first = instructor.from_openai(openai_client), chat()["text"]
    reply: Any = client.chat.completions.create(messages=continue_chat(first), response_model=None, **OPTIONS)
    return {"id": reply.id, "text": reply.choices[0].message.content, "first_text": first}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
