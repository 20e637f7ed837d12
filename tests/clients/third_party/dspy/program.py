"""DSPy's LM with messages. The history of the model keeps each response, and so the completion's id."""

from typing import Any

import dspy
from client_program import (
    API_KEY,
    BASE_URL,
    MAX_TOKENS,
    MESSAGES,
    MODEL,
    ORDER_MESSAGES,
    ORDER_STATUS,
    TEMPERATURE,
    Opening,
    continue_chat,
    new_metadata,
    report,
)

SAMPLING: Any = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, "cache": False, "num_retries": 0}
model = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=API_KEY, **SAMPLING)


def call(messages: list[dict[str, Any]], **options: Any) -> tuple[Any, str]:
    [output] = model(messages=messages, **options)
    return output, model.history[-1]["response"].id


def text_of(output: Any) -> str:
    return output if isinstance(output, str) else output["text"]


def chat() -> dict[str, Any]:
    output, id = call(MESSAGES)
    return {"id": id, "text": text_of(output)}


class Answer(dspy.Module):
    def forward(self, messages: list[dict[str, Any]], metadata: dict[str, str]) -> Any:
        return dspy.Prediction(text=text_of(call(messages, extra_body={"metadata": metadata})[0]))


async def stream() -> dict[str, Any]:
    """DSPy's own engine shows no id of a stream: metadata names the request."""
    metadata = new_metadata()
    parts = [part async for part in dspy.streamify(Answer())(messages=MESSAGES, metadata=metadata)]
    return {"id": None, "metadata": metadata, "text": parts[-1].text, "pieces": len(parts) - 1}


def tools() -> dict[str, Any]:
    choice = {"type": "function", "function": {"name": "order_status"}}
    output, id = call(ORDER_MESSAGES, tools=[ORDER_STATUS], tool_choice=choice)
    [tool_call] = output["tool_calls"]
    return {"id": id, "tool": {"name": tool_call.function.name, "arguments": tool_call.function.arguments}}


def structured() -> dict[str, Any]:
    output, id = call(MESSAGES, response_format=Opening)
    return {"id": id, "value": Opening.model_validate_json(text_of(output)).model_dump()}


def multi_turn() -> dict[str, Any]:
    first, _ = call(MESSAGES)
    output, id = call(continue_chat(text_of(first)))
    return {"id": id, "text": text_of(output), "first_text": text_of(first)}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
