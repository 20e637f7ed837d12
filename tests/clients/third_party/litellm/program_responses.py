"""LiteLLM's `responses` with an OpenAI-compatible endpoint. It rewrites their ids, which feedback accepts."""

from typing import Any

import litellm
from client_program import (
    API_KEY,
    BASE_URL,
    MAX_TOKENS,
    MESSAGES,
    MODEL,
    NEXT_QUESTION,
    ORDER_MESSAGES,
    ORDER_STATUS,
    TEMPERATURE,
    Opening,
    report,
)

OPTIONS: Any = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY}
OPTIONS |= {"temperature": TEMPERATURE, "max_output_tokens": MAX_TOKENS}
TOOL: Any = {"type": "function", "strict": False, **ORDER_STATUS["function"]}
# LiteLLM does not know the model, and would wait for the whole reply and cut it into pieces.
litellm.register_model({f"openai/{MODEL}": {"litellm_provider": "openai", "supports_native_streaming": True}})


def chat() -> dict[str, Any]:
    reply: Any = litellm.responses(input=MESSAGES, **OPTIONS)
    assert len(reply.id) > 100, "LiteLLM returns its own id"
    return {"id": reply.id, "text": reply.output_text}


def stream() -> dict[str, Any]:
    events: Any = list(litellm.responses(input=MESSAGES, stream=True, **OPTIONS))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    return {"id": events[-1].response.id, "text": "".join(texts), "pieces": len(texts)}


def tools() -> dict[str, Any]:
    choice: Any = {"type": "function", "name": "order_status"}
    reply: Any = litellm.responses(input=ORDER_MESSAGES, tools=[TOOL], tool_choice=choice, **OPTIONS)
    [call] = [item for item in reply.output if item.type == "function_call"]
    return {"id": reply.id, "tool": {"name": call.name, "arguments": call.arguments}}


def structured() -> dict[str, Any]:
    reply: Any = litellm.responses(input=MESSAGES, text_format=Opening, **OPTIONS)
    return {"id": reply.id, "value": Opening.model_validate_json(reply.output_text).model_dump()}


def multi_turn() -> dict[str, Any]:
    first: Any = litellm.responses(input=MESSAGES, **OPTIONS)
    reply: Any = litellm.responses(input=NEXT_QUESTION, previous_response_id=first.id, **OPTIONS)
    return {"id": reply.id, "text": reply.output_text, "first_text": first.output_text}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
