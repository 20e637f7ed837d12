"""LangChain's ChatOpenAI. With `include_response_headers` the headers keep the id, also of a streamed reply."""

from typing import Any

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
    order_status,
    report,
)
from langchain_core.messages import BaseMessage
from langchain_openai import ChatOpenAI

SAMPLING: Any = {"model": MODEL, "temperature": TEMPERATURE, "max_completion_tokens": MAX_TOKENS}
model = ChatOpenAI(base_url=BASE_URL, api_key=API_KEY, include_response_headers=True, **SAMPLING)


def completion_id(reply: BaseMessage) -> Any:
    return reply.response_metadata["headers"]["x-completion-id"]


def chat() -> dict[str, Any]:
    reply = model.invoke(MESSAGES)
    return {"id": completion_id(reply), "text": reply.text}


def stream() -> dict[str, Any]:
    chunks = list(model.stream(MESSAGES))
    reply = chunks[0]
    for chunk in chunks[1:]:
        reply = reply + chunk
    return {"id": completion_id(reply), "text": reply.text, "pieces": sum(bool(chunk.text) for chunk in chunks)}


def tools() -> dict[str, Any]:
    reply = model.bind_tools([order_status], tool_choice="order_status").invoke(ORDER_MESSAGES)
    [call] = reply.tool_calls
    return {"id": completion_id(reply), "tool": {"name": call["name"], "arguments": call["args"]}}


def structured() -> dict[str, Any]:
    reply = model.with_structured_output(Opening, include_raw=True).invoke(MESSAGES)
    return {"id": completion_id(reply["raw"]), "value": reply["parsed"].model_dump()}


def multi_turn() -> dict[str, Any]:
    first = model.invoke(MESSAGES).text
    reply = model.invoke(continue_chat(first))
    return {"id": completion_id(reply), "text": reply.text, "first_text": first}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
