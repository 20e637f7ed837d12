"""CrewAI's LLM, which loses the completion's id: metadata names the request."""

from typing import Any

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
    order_status,
    report,
)
from crewai import LLM
from crewai.events import LLMStreamChunkEvent, crewai_event_bus


def build_model(**options: Any) -> tuple[Any, dict[str, Any]]:
    metadata = new_metadata()
    options |= {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
    model = LLM(
        model=f"openai/{MODEL}",
        base_url=BASE_URL,
        api_key=API_KEY,
        additional_params={"extra_body": {"metadata": metadata}},
        **options,
    )
    return model, {"id": None, "metadata": metadata}


def chat() -> dict[str, Any]:
    model, reference = build_model()
    return reference | {"text": model.call(MESSAGES)}


def stream() -> dict[str, Any]:
    chunks: list[str] = []
    with crewai_event_bus.scoped_handlers():

        @crewai_event_bus.on(LLMStreamChunkEvent)
        def append(source: Any, event: LLMStreamChunkEvent) -> None:
            chunks.append(event.chunk)

        model, reference = build_model(stream=True)
        text = model.call(MESSAGES)
        crewai_event_bus.flush()
    return reference | {"text": text, "pieces": len(chunks)}


def tools() -> dict[str, Any]:
    model, reference = build_model()
    arguments: list[dict[str, Any]] = []

    def call_tool(order_id: str) -> str:
        arguments.append({"order_id": order_id})
        return order_status(order_id)

    model.call(ORDER_MESSAGES, tools=[ORDER_STATUS], available_functions={"order_status": call_tool})
    return reference | {"tool": {"name": "order_status", "arguments": arguments[0]}}


def structured() -> dict[str, Any]:
    model, reference = build_model()
    value = model.call(MESSAGES, response_model=Opening)
    opening = Opening.model_validate_json(value) if isinstance(value, str) else value
    return reference | {"value": opening.model_dump()}


def multi_turn() -> dict[str, Any]:
    first_model, _ = build_model()
    first = first_model.call(MESSAGES)
    model, reference = build_model()
    return reference | {"text": model.call(continue_chat(first)), "first_text": first}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
