"""A user that a model plays: a persona, at one version, with a seed for each of its messages.

Its chats are background tasks of the service (docs/chat.md) and belong to no episode: they are recorded, and neither
trained on, judged, nor counted as turns of the agent.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from pydantic import ValidationError

from alignment.environments.agent_chat import Completion
from alignment.environments.attempts import Attempt, ChatEndpoint, derive_seed
from alignment.environments.errors import InfrastructureFailure, ServiceRefusal
from alignment.environments.protocols import Message
from alignment.environments.service_http import ServiceHttp
from alignment.environments.users.simulated_user import SimulatedUser, digest_of, text_of
from alignment.errors import UnavailableEnvironment

TASK = "simulated_user"
TASK_HEADER = "x-attune-task"
EPISODE_HEADER = "x-attune-metadata-simulated-user-of"
REPLY_SECONDS = 120.0
UNUSABLE = frozenset({401, 403, 404})  # statuses that every other chat would have, too
FIXED_VERSION = re.compile(r"@v\d+$|-\d{4}-\d{2}-\d{2}$|-\d{8}$")  # assistant@v3, or a dated model of another service
STOP_MARK = "###STOP###"
GREETING = "Hello! How can I help you?"
RULES = """
You are the user in this dialogue; the other side is an assistant. Write the user's next message and nothing else:
short, as people write, and not all that you know at once. Do not do the assistant's work, and do not make up what is
not said above. When you have what you want, or see that you will not get it, write {stop_mark} and nothing else."""


@dataclass
class ModelUser(SimulatedUser):
    """A user that a model plays.

    Attributes:
        persona: Who the user is, what they want, and what they know: the beginning of the system prompt.
        model: The model at one version: `assistant@v3`, or a dated model of another service.
        name: A name of the persona, to be recorded; the persona itself is recorded as a digest.
        first: The first message of the user; None: the model writes it.
        greeting: What the model takes for the assistant's first message. The agent does not see it.
        temperature: 0 repeats a dialogue, up to rounding. Services may take a seed as a hint, as Attune does.
        max_tokens: Of a message.
        stop_mark: What ends the dialogue. What is before it in the same message is not sent.
        rules: The end of the system prompt.
        endpoint: Where the model is; None: the service of the run, with the run's API key.
        revision: Which weights another service has under the name, if the name does not say so.
    """

    persona: str
    model: str
    name: str = ""
    first: str | None = None
    greeting: str = GREETING
    temperature: float = 0.0
    max_tokens: int = 256
    stop_mark: str = STOP_MARK
    rules: str = RULES
    endpoint: ChatEndpoint | None = None
    revision: str | None = None
    _attempt: Attempt = field(default=Attempt(), init=False, repr=False)
    _own_http: ServiceHttp | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises UnavailableEnvironment for a model without a fixed version."""
        is_named = self.revision is not None and self.endpoint is not None
        if not is_named and FIXED_VERSION.search(self.model) is None:
            policy = self.model.partition("@")[0]
            raise UnavailableEnvironment(
                f"a simulated user needs a model at one version, and {self.model!r} names none: it would be another "
                f"user after each release. Write '{policy}@v3'; `attune versions` lists the versions. For a service "
                "whose names have no versions, set `endpoint`, and in `revision` which weights it serves."
            )

    def describe(self) -> Mapping[str, str]:
        model = self.model if self.revision is None else f"{self.model} {self.revision}"
        hidden = ("endpoint", "_attempt", "_own_http")
        settings = [getattr(self, each.name) for each in fields(self) if each.name not in hidden]
        place = "" if self.endpoint is None else f" at {urlsplit(self.endpoint.base_url).netloc}"
        label = f"model {model}{place}" + (f", {self.name}" if self.name else "")
        return {"user": label, "user_sha256": digest_of(*settings)}

    async def begin(self, attempt: Attempt) -> str:
        self._attempt = attempt
        if self.first is not None:
            return self.first
        first = await self._write([])
        if first is None:
            raise InfrastructureFailure("the simulated user ended the dialogue before its first message")
        return first

    async def reply(self, messages: Sequence[Message]) -> str | None:
        return await self._write(list(_flip(messages)))

    async def close(self) -> None:
        if self._own_http is not None:
            await self._own_http.close()
            self._own_http = None

    async def _write(self, dialogue: list[Message]) -> str | None:
        """Return the user's next message, or None at the end of the dialogue."""
        system = self.persona.strip() + "\n" + self.rules.format(stop_mark=self.stop_mark)
        beginning: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": self.greeting},
        ]
        num_written = sum(message["role"] == "assistant" for message in dialogue)
        text = await self._chat([*beginning, *dialogue], derive_seed(self._attempt.seed, num_written))
        if self.stop_mark in text:
            return None
        if not text.strip():
            raise InfrastructureFailure(f"the simulated user, {self.model}, has written an empty message")
        return text.strip()

    async def _chat(self, messages: Sequence[Message], seed: int) -> str:
        """Return the model's reply. Raises InfrastructureFailure, and UnavailableEnvironment if none can be had."""
        endpoint = self.endpoint or self._attempt.endpoint
        if endpoint is None:
            raise UnavailableEnvironment("a simulated user needs an endpoint outside of a run: ModelUser(endpoint=…)")
        body: dict[str, object] = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_completion_tokens": self.max_tokens,
            "seed": seed,
        }
        if self.endpoint is None:
            body["service_tier"] = "flex"  # as the attempt's own chats: those of people come first
        headers = {TASK_HEADER: TASK}
        if self._attempt.episode_id:
            headers[EPISODE_HEADER] = self._attempt.episode_id
        url = endpoint.base_url.rstrip("/") + "/chat/completions"
        try:
            answer = await self._http().request("POST", url, endpoint.api_key, body, headers, seconds=REPLY_SECONDS)
            return text_of(Completion.model_validate_json(answer.content).choices[0].message)
        except ServiceRefusal as refusal:
            message = f"the chat of the simulated user, {self.model}, was refused with {refusal.status}: {refusal}"
            kind = UnavailableEnvironment if refusal.status in UNUSABLE else InfrastructureFailure
            raise kind(message) from refusal
        except InfrastructureFailure as error:
            raise InfrastructureFailure(f"the simulated user, {self.model}: {error}") from error
        except (ValidationError, IndexError) as error:
            raise InfrastructureFailure("the answer to the simulated user is no chat completion") from error

    def _http(self) -> ServiceHttp:
        """Return the run's client, or one of its own for another endpoint."""
        if self.endpoint is None and self._attempt.http is not None:
            return self._attempt.http
        if self._own_http is None:
            self._own_http = ServiceHttp(connections=1)
        return self._own_http


def _flip(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the dialogue as the user's model sees it: it is the assistant. It sees no instructions and no tools."""
    roles = {"user": "assistant", "assistant": "user"}
    for message in messages:
        role, text = roles.get(str(message["role"])), text_of(message)
        if role is not None and text:
            yield {"role": role, "content": text}
