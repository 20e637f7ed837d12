"""Render a chat completion as a response object."""

import time
from typing import Any

from app.responses.schemas import ResponsesRequest

STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "content_filter": "incomplete"}
INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_id(completion_id: str) -> str:
    """Return the response's id. Example: "chatcmpl-9f2c…" -> "resp_9f2c…"; feedback accepts both."""
    return "resp_" + completion_id.partition("-")[2]


class ResponseRenderer:
    """Builds the response object of one reply and the items of its output."""

    def __init__(self, request: ResponsesRequest, completion_id: str, model: str, created: int) -> None:
        self._request = request
        self._completion_id = completion_id
        self._suffix = completion_id.partition("-")[2]
        self._model = model
        self._created = created

    def response(
        self,
        status: str,
        output: list[dict[str, Any]],
        *,
        usage: dict[str, Any] | None = None,
        incomplete: str | None = None,
        error: str | None = None,
    ) -> dict[str, Any]:
        return {
            "id": response_id(self._completion_id),
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "completion_id": self._completion_id,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "model": self._model,
            "output": output,
            "usage": usage,
            **self._echoed_params(),
        }

    def _echoed_params(self) -> dict[str, Any]:
        request = self._request
        choice = request.tool_choice
        return {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": self._text_config(),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
            "tools": [tool.model_dump() | {"strict": bool(tool.strict)} for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def _text_config(self) -> dict[str, Any]:
        text_format = self._request.text.format if self._request.text else None
        return {"format": {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True)}

    def message(self, index: int, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._suffix}_{index}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def function_call(self, index: int, status: str, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {
            "id": f"fc_{self._suffix}_{index}",
            "type": "function_call",
            "call_id": call_id,
            "name": name,
            "arguments": arguments,
            "status": status,
        }


def render_response(request: ResponsesRequest, completion: dict[str, Any]) -> dict[str, Any]:
    """Return a whole chat completion as a response object."""
    [choice] = completion["choices"]
    message, reason = choice["message"], choice["finish_reason"]
    status = STATUS.get(reason, "failed")
    renderer = ResponseRenderer(request, completion["id"], completion["model"], completion["created"])
    text, calls = message.get("content"), message.get("tool_calls") or []
    item_status = "completed" if status == "completed" else "incomplete"
    output = []
    if text or not calls:
        output.append(renderer.message(0, item_status, [text_part(text or "", choice_logprobs(choice))]))
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        output.append(renderer.function_call(len(output), item_status, call["id"], name, arguments))
    return renderer.response(
        status,
        output,
        usage=response_usage(completion.get("usage")),
        incomplete=INCOMPLETE_REASONS.get(reason),
        error="The reply ended before it was complete." if status == "failed" else None,
    )


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def choice_logprobs(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the log-probs of a choice. The Responses API requires `bytes` and `top_logprobs` for every token."""
    return [
        token
        | {
            "bytes": token.get("bytes") or [],
            "top_logprobs": [_with_bytes(other) for other in token.get("top_logprobs") or ()],
        }
        for token in (choice.get("logprobs") or {}).get("content") or ()
    ]


def _with_bytes(token: dict[str, Any]) -> dict[str, Any]:
    return token | {"bytes": token.get("bytes") or []}


def response_usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a chat completion's usage in the form of the Responses API."""
    if usage is None:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
