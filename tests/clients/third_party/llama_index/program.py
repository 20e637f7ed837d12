"""LlamaIndex's OpenAILike, as a chat model. The reply's `raw` is the completion of the OpenAI client."""

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
    new_metadata,
    order_status,
    report,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL,
    api_base=BASE_URL,
    api_key=API_KEY,
    is_chat_model=True,  # otherwise it calls /v1/completions
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    temperature=TEMPERATURE,
    max_tokens=MAX_TOKENS,
)


def to_messages(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    return [ChatMessage(role=message["role"], content=message["content"]) for message in messages]


def chat() -> dict[str, Any]:
    reply: Any = model.chat(to_messages(MESSAGES))
    return {"id": reply.raw.id, "text": reply.message.content}


def stream() -> dict[str, Any]:
    parts: Any = list(model.stream_chat(to_messages(MESSAGES)))
    return {"id": parts[-1].raw.id, "text": parts[-1].message.content, "pieces": sum(bool(p.delta) for p in parts)}


def tools() -> dict[str, Any]:
    tool = FunctionTool.from_defaults(order_status)
    reply: Any = model.chat_with_tools([tool], chat_history=to_messages(ORDER_MESSAGES), tool_choice="order_status")
    [call] = model.get_tool_calls_from_response(reply)
    return {"id": reply.raw.id, "tool": {"name": call.tool_name, "arguments": call.tool_kwargs}}


def structured() -> dict[str, Any]:
    """The object replaces the completion in `raw`: metadata names the request."""
    metadata = new_metadata()
    reply: Any = model.as_structured_llm(Opening).chat(to_messages(MESSAGES), extra_body={"metadata": metadata})
    value = Opening.model_validate_json(reply.message.content)
    return {"id": None, "metadata": metadata, "value": value.model_dump()}


def multi_turn() -> dict[str, Any]:
    first: Any = model.chat(to_messages(MESSAGES))
    reply: Any = model.chat(to_messages(continue_chat(first.message.content)))
    return {"id": reply.raw.id, "text": reply.message.content, "first_text": first.message.content}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
