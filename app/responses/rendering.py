"""Rendering: a chat completion as the response object that says the same."""

import time
from typing import Any

from app.responses.schemas import ResponsesRequest

STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "content_filter": "incomplete"}
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_id(completion_id: str) -> str:
    """Example: "chatcmpl-9f2c…" -> "resp_9f2c…"; feedback is given under the completion's id."""
    return "resp_" + completion_id.partition("-")[2]


class Rendering:
    """One reply on its way out: everything a response object says beside the reply itself, and how its items look."""

    def __init__(self, asked: ResponsesRequest, completion_id: str, model: str, created: int) -> None:
        self._asked = asked
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
            **self._echo(),
        }

    def _echo(self) -> dict[str, Any]:
        asked = self._asked
        choice = asked.tool_choice
        return {
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": self._text(),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
            "tools": [tool.model_dump() | {"strict": bool(tool.strict)} for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "user": asked.user,
        }

    def _text(self) -> dict[str, Any]:
        wanted = self._asked.text.format if self._asked.text else None
        return {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)}

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


def render(asked: ResponsesRequest, completion: dict[str, Any]) -> dict[str, Any]:
    """A whole chat completion as a response."""
    [choice] = completion["choices"]
    message, reason = choice["message"], choice["finish_reason"]
    status = STATUS.get(reason, "failed")
    rendering = Rendering(asked, completion["id"], completion["model"], completion["created"])
    said, calls = message.get("content"), message.get("tool_calls") or []
    ended = "completed" if status == "completed" else "incomplete"
    output = [rendering.message(0, ended, [text_part(said or "", shown(choice))])] if said or not calls else []
    for call in calls:
        function = call["function"]
        output.append(rendering.function_call(len(output), ended, call["id"], function["name"], function["arguments"]))
    return rendering.response(
        status,
        output,
        usage=usage(completion.get("usage")),
        incomplete=INCOMPLETE.get(reason),
        error="The reply was broken off." if status == "failed" else None,
    )


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def shown(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The log-probs of a choice. The Responses wire knows no token without bytes."""
    return [
        token
        | {
            "bytes": token.get("bytes") or [],
            "top_logprobs": [_top(other) for other in token.get("top_logprobs") or ()],
        }
        for token in (choice.get("logprobs") or {}).get("content") or ()
    ]


def _top(token: dict[str, Any]) -> dict[str, Any]:
    return token | {"bytes": token.get("bytes") or []}


def usage(counted: dict[str, Any] | None) -> dict[str, Any] | None:
    if counted is None:
        return None
    cached = (counted.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (counted.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": counted["total_tokens"],
    }
