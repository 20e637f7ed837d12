"""Stored responses: read one, and continue the conversation that it belongs to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy.ext.asyncio import AsyncSession

from alignment.chat_messages import AssistantMessage
from alignment.json_values import as_object, as_text
from app.chat import histories, repository
from app.core.errors import BadRequest, NotFound
from app.inference.chat_format import ChatCompletion
from app.models import Policy, Turn, TurnState, Version, to_completion_id
from app.policies.references import version_name
from app.responses.events import ResponseEvents, render_response
from app.responses.request import ResponsesRequest

NO_REPLY: AssistantMessage = {"role": "assistant", "content": None}
PARAMS_KEY: Final = "response"  # in a turn's `request_params`: the parameters that a chat request does not have


@dataclass(frozen=True)
class PreviousResponse:
    """The messages of a response's conversation, its output included and its instructions not."""

    messages: Sequence[Mapping[str, object]]
    conversation_id: str | None


def recorded_params(request: ResponsesRequest) -> dict[str, object]:
    """Return what a turn records of the request beside the equivalent chat request.

    The instructions are the first message of its prompt.
    """
    fields = {"has_instructions": bool(request.instructions), "previous_response_id": request.previous_response_id}
    return {PARAMS_KEY: {name: value for name, value in fields.items() if value}}


async def get_response(session: AsyncSession, project_id: str, response_id: str) -> dict[str, object]:
    """Return a response object as it was sent, without log-probs. Raises NotFound."""
    turn, policy, version = await _get_turn(session, project_id, response_id)
    instructions = (await _read_prompt(session, turn))[0]
    request, label, created = _to_request(turn, instructions), version_name(policy, version), int(turn.created_at)
    if turn.state == TurnState.OPEN:
        return as_object(ResponseEvents(request, turn.completion_id, label, created).start()[0]["response"])
    prompt, output = turn.num_prompt_tokens or 0, turn.num_output_tokens or 0
    completion: ChatCompletion = {
        "id": turn.completion_id,
        "model": label,
        "created": created,
        "choices": [{"message": turn.reply or NO_REPLY, "finish_reason": turn.finish_reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }
    response = render_response(request, completion)
    if response["completed_at"] is not None and turn.finished_at is not None:
        response["completed_at"] = int(turn.finished_at)
    return response


async def get_previous_response(
    session: AsyncSession, project_id: str, response_id: str, episode_id: str | None = None
) -> PreviousResponse:
    """Return the response that a request continues. Raises BadRequest for an unknown and for an unfinished one.

    With the key of an episode, `episode_id`, the responses of all others are unknown.
    """
    try:
        turn, _, _ = await _get_turn(session, project_id, response_id)
        if episode_id not in (None, turn.episode_id):
            raise NotFound(f"There is no response '{response_id}'.", param="response_id")
    except NotFound as error:
        code, param = "previous_response_not_found", "previous_response_id"
        raise BadRequest(error.message, code=code, param=param) from error
    if turn.state != TurnState.DONE or turn.reply is None:
        raise BadRequest(f"The response '{response_id}' has not been completed.", param="previous_response_id")
    _, messages = await _read_prompt(session, turn)
    return PreviousResponse([*messages, turn.reply], turn.conversation_id)


async def _get_turn(session: AsyncSession, project_id: str, response_id: str) -> tuple[Turn, Policy, Version]:
    completion_id = to_completion_id(response_id) if response_id.startswith("resp_") else ""
    try:
        [turn, *_], policy, version = await repository.get_completion(session, project_id, completion_id)
    except NotFound as error:
        raise NotFound(f"There is no response '{response_id}'.", param="response_id") from error
    return turn, policy, version


async def _read_prompt(session: AsyncSession, turn: Turn) -> tuple[str | None, list[dict[str, object]]]:
    """Return the instructions, if there are any, and the other messages of a turn's prompt."""
    messages = (await histories.read_messages(session, [turn.id])).get(turn.id, [])
    if messages and turn.request_params.get(PARAMS_KEY, {}).get("has_instructions"):
        return as_text(messages[0]["content"]), messages[1:]
    return None, messages


def _to_request(turn: Turn, instructions: str | None) -> ResponsesRequest:
    """Return the request of a turn, without its input."""
    params, sampling = turn.request_params, turn.sampling
    tool_choice, text_format = params.get("tool_choice"), params.get("response_format")
    if isinstance(tool_choice, dict):
        tool_choice = {"type": "function", **as_object(tool_choice["function"])}
    if text_format is not None:
        text_format = {"type": text_format["type"], **as_object(text_format.get("json_schema", {}))}
    return ResponsesRequest.model_validate(
        {
            "model": "-",
            "input": "-",
            "instructions": instructions,
            "previous_response_id": params.get(PARAMS_KEY, {}).get("previous_response_id"),
            "tools": [{"type": "function", **as_object(tool["function"])} for tool in params.get("tools", ())] or None,
            "tool_choice": tool_choice,
            "parallel_tool_calls": params.get("parallel_tool_calls"),
            "text": {"format": text_format} if text_format else None,
            "temperature": sampling.get("temperature"),
            "top_p": sampling.get("top_p"),
            "max_output_tokens": sampling.get("max_tokens"),
            "top_logprobs": params.get("top_logprobs"),
            "service_tier": params.get("service_tier"),
            "metadata": turn.request_metadata,
            "user": turn.end_user,
        }
    )
