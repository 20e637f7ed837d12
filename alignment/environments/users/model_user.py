"""A user that a model plays: a persona, at one version, with a seed for each of its messages.

Its chats are background tasks of the service (docs/chat.md) and belong to no episode: they are recorded, and neither
trained on, judged, nor counted as turns of the agent.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from urllib.parse import urlsplit

from pydantic import ValidationError

from alignment.environments.agent_chat import Choice, Completion
from alignment.environments.attempts import Attempt, ChatEndpoint, derive_seed
from alignment.environments.errors import InfrastructureFailure, ServiceRefusal
from alignment.environments.protocols import Message
from alignment.environments.service_http import ServiceHttp, ServiceTransport
from alignment.environments.users.simulated_user import SimulatedUser, digest_of, text_of
from alignment.errors import UnavailableEnvironment

TASK = "simulated_user"
TASK_HEADER = "x-attune-task"
EPISODE_HEADER = "x-attune-metadata-simulated-user-of"
REPLY_SECONDS = 120.0
UNUSABLE = frozenset({401, 403, 404})  # statuses that every other chat would have, too
FIRST_MESSAGE_UNUSABLE = UNUSABLE | {400, 422}  # there the agent has written nothing yet that can be to blame
FIXED_VERSION = re.compile(r"@v\d+\Z")  # assistant@v3
DATED_MODEL = re.compile(r"-\d{4}-\d{2}-\d{2}\Z|-\d{8}\Z")  # of another service; here it may be a policy's name
ROLES = {"user": "assistant", "assistant": "user"}  # as the user's model sees them
NO_ANSWER = "(no answer)"  # instead of an empty reply, which services refuse
STOP_MARK = "###STOP###"
STOP_FIELD = "{stop_mark}"  # in rules
GREETING = "Hello! How can I help you?"
RULES = """
You are the user in this dialogue; the other side is an assistant. Write the user's next message and nothing else:
short, as people write, and not all that you know at once. Do not do the assistant's work, and do not make up what is
not said above. When you have what you want, or see that you will not get it, write {stop_mark} and nothing else."""
STOP_RULE = "To end the dialogue, write {stop_mark} and nothing else."  # where the rules do not say it


@dataclass
class ModelUser(SimulatedUser):
    """A user that a model plays.

    Attributes:
        persona: Who the user is, what they want, and what they know: the beginning of the system prompt.
        model: The model at one version: `assistant@v3`, or a dated model of another service.
        name: A name of the persona, to be recorded; the persona itself is recorded as a digest.
        first: The first message of the user; None: the model writes it.
        greeting: What the model takes for the assistant's first message. The agent does not see it.
        temperature: 0 repeats a dialogue, up to rounding. Services may take a seed as a hint, as Attune does. None:
            none is sent, for models that refuse one.
        max_tokens: Of a message, with its reasoning. A message that is longer is a failure of the user.
        stop_mark: What ends the dialogue. What is before it in the same message is not sent.
        rules: The end of the system prompt. {stop_mark} in it is replaced; without the mark, a sentence is added.
        endpoint: Where the model is; None: the service of the run, with the run's API key.
        revision: Which weights another service has under the name, if the name does not say so.
    """

    persona: str
    model: str
    name: str = ""
    first: str | None = None
    greeting: str = GREETING
    temperature: float | None = 0.0
    max_tokens: int = 256
    stop_mark: str = STOP_MARK
    rules: str = RULES
    endpoint: ChatEndpoint | None = None
    revision: str | None = None
    _attempt: Attempt = field(default=Attempt(), init=False, repr=False)
    _own_http: ServiceHttp | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises UnavailableEnvironment for a model without a fixed version."""
        is_fixed = FIXED_VERSION.search(self.model) is not None
        if self.endpoint is not None:
            is_fixed = is_fixed or self.revision is not None or DATED_MODEL.search(self.model) is not None
        if not is_fixed:
            policy = self.model.partition("@")[0]
            raise UnavailableEnvironment(
                f"a simulated user needs a model at one version, and {self.model!r} names none: it would be another "
                f"user after each release. Write '{policy}@v3'; `attune versions` lists the versions. For a service "
                "whose names have no versions or dates, set `endpoint`, and in `revision` which weights it serves."
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
        return await self._write(messages)

    async def close(self) -> None:
        if self._own_http is not None:
            await self._own_http.close()
            self._own_http = None

    async def _write(self, dialogue: Sequence[Message]) -> str | None:
        """Return the user's next message, or None at the end of the dialogue."""
        system: Message = {"role": "system", "content": self._system_prompt()}
        greeting: Message = {"role": "assistant", "content": self.greeting}
        num_written = sum(message["role"] == "user" for message in dialogue)
        choice = await self._chat([system, *_flip([greeting, *dialogue])], num_written)
        text = text_of(choice.message)
        if self.stop_mark in text:
            return None
        if choice.finish_reason == "length":
            raise InfrastructureFailure(
                f"a message of the simulated user, {self.model}, was cut at max_tokens, {self.max_tokens}: set more"
            )
        if not text.strip():
            raise InfrastructureFailure(f"the simulated user, {self.model}, has written an empty message")
        return text.strip()

    def _system_prompt(self) -> str:
        rules = self.rules if STOP_FIELD in self.rules or self.stop_mark in self.rules else f"{self.rules}\n{STOP_RULE}"
        return self.persona.strip() + "\n" + rules.replace(STOP_FIELD, self.stop_mark)

    async def _chat(self, messages: Sequence[Message], num_written: int) -> Choice:
        """Return the model's reply. Raises InfrastructureFailure, and UnavailableEnvironment if none can be had."""
        endpoint = self.endpoint or self._attempt.endpoint
        if endpoint is None:
            raise UnavailableEnvironment("a simulated user needs an endpoint outside of a run: ModelUser(endpoint=…)")
        body: dict[str, object] = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_tokens,
            "seed": derive_seed(self._attempt.seed, num_written),
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.endpoint is None:
            body["service_tier"] = "flex"  # as the attempt's own chats: those of people come first
        headers = {TASK_HEADER: TASK}
        if self._attempt.episode_id:
            headers[EPISODE_HEADER] = self._attempt.episode_id
        url = endpoint.base_url.rstrip("/") + "/chat/completions"
        try:
            answer = await self._http(endpoint).request(
                "POST", url, endpoint.api_key, body, headers, seconds=REPLY_SECONDS
            )
            return Completion.model_validate_json(answer.content).choices[0]
        except ServiceRefusal as refusal:
            message = f"the chat of the simulated user, {self.model}, was refused with {refusal.status}: {refusal}"
            unusable = UNUSABLE if num_written else FIRST_MESSAGE_UNUSABLE
            kind = UnavailableEnvironment if refusal.status in unusable else InfrastructureFailure
            raise kind(message) from refusal
        except InfrastructureFailure as error:
            raise InfrastructureFailure(f"the simulated user, {self.model}: {error}") from error
        except (ValidationError, IndexError) as error:
            raise InfrastructureFailure("the answer to the simulated user is no chat completion") from error

    def _http(self, endpoint: ChatEndpoint) -> ServiceTransport:
        """Return the client of the run or of the endpoint, or else one of its own."""
        of_run = self._attempt.http if self.endpoint is None else None
        if (http := of_run or endpoint.http) is not None:
            return http
        if self._own_http is None:
            self._own_http = ServiceHttp(connections=1)
        return self._own_http


def _flip(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the dialogue as the user's model sees it: it is the assistant. It sees no instructions and no tools.

    Roles alternate, since chat templates refuse others: neighbours of one role become one message.
    """
    of_dialogue = (message for message in messages if message["role"] in ROLES)
    for role, neighbours in groupby(of_dialogue, lambda message: str(message["role"])):
        texts = [text for text in map(text_of, neighbours) if text.strip()]
        yield {"role": ROLES[role], "content": "\n\n".join(texts) or NO_ANSWER}
