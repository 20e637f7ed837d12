"""Chats with an agent's model: one request a turn, and the limits that the service reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import BaseModel, ValidationError

from alignment.environments.errors import InfrastructureFailure, ServiceRefusal
from alignment.environments.protocols import Agent, Message, Reason
from alignment.environments.service_http import ServiceTransport
from alignment.environments.tools.base import JsonObject, ToolSchema
from alignment.environments.tools.tool_calls import AssistantMessage

STATE_HEADER = "x-attune-state-key"
REPLY_SECONDS = 600.0
# What the service refuses a chat with once an episode has reached a limit.
LIMIT_BY_CODE: dict[str | None, Reason] = {
    "episode_max_turns": "max_turns",
    "episode_max_tokens": "max_tokens",
    "episode_deadline": "deadline",
    "episode_idle_timeout": "deadline",
    "context_length_exceeded": "max_tokens",
}


class LimitReached(Exception):
    """The agent may not go on."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class Choice(BaseModel):
    message: JsonObject
    finish_reason: str | None = None


class Usage(BaseModel):
    completion_tokens: int = 0


class Completion(BaseModel):
    id: str
    choices: list[Choice]
    usage: Usage = Usage()


@dataclass(frozen=True)
class Reply:
    """A reply: the assistant's message as the next chat has to repeat it, without what is null."""

    completion_id: str
    message: Message
    num_tokens: int

    def called_tools(self) -> list[str]:
        """Return the names of the tools that it calls."""
        calls = AssistantMessage.model_validate(self.message).tool_calls or ()
        return [call.function.name for call in calls]


class AgentChat:
    """Chats of one attempt."""

    def __init__(self, http: ServiceTransport, agent: Agent) -> None:
        self._http = http
        self._agent = agent
        self._url = agent.base_url.rstrip("/") + "/chat/completions"

    async def send(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], state_key: str | None = None
    ) -> Reply:
        """Return the agent's reply. Raises LimitReached and InfrastructureFailure.

        What else the service refuses is the environment's mistake, such as a message without a role: that is raised as
        ServiceRefusal.
        """
        body: dict[str, object] = {"model": self._agent.model, "messages": messages}
        if tools:
            body["tools"] = tools
        if self._agent.limits.max_reply_tokens is not None:
            body["max_completion_tokens"] = self._agent.limits.max_reply_tokens
        headers = dict(self._agent.headers)
        if state_key is not None:
            headers[STATE_HEADER] = state_key
        try:
            answer = await self._http.request(
                "POST", self._url, self._agent.api_key, body, headers, seconds=REPLY_SECONDS
            )
        except ServiceRefusal as refusal:
            reason = LIMIT_BY_CODE.get(refusal.code)
            if reason is None:
                raise
            raise LimitReached(reason) from refusal
        return _read(answer.content)


def _read(content: bytes) -> Reply:
    try:
        completion = Completion.model_validate_json(content)
        message = completion.choices[0].message
    except (ValidationError, IndexError) as error:
        raise InfrastructureFailure("the answer of the service is no chat completion") from error
    present = {name: value for name, value in message.items() if value is not None}
    return Reply(completion.id, cast("Message", present), completion.usage.completion_tokens)
