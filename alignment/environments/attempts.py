"""One attempt at a task: its seed, how it reaches the service, and what environments may have for it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from alignment.environments.protocols import Message, Task
from alignment.environments.service_http import ServiceTransport

SEED_BITS = 31
MAX_PAIRS = 8  # of a description: the run adds its own
MAX_VALUE_CHARS = 512


def derive_seed(*parts: str | int) -> int:
    """Return a seed of 31 bits: the same one for the same parts.

    Example: derive_seed(run_seed, "train-0", 1) is that of the second attempt at a task.
    """
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> (32 - SEED_BITS)


@dataclass(frozen=True)
class ChatEndpoint:
    """Where chats are sent, for OpenAI's API: the URL ends with `/v1`.

    `http` is a client that trusts the certificates of the host; it is not closed with the users that it serves.
    """

    base_url: str
    api_key: str = field(repr=False)
    http: ServiceTransport | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Attempt:
    """One attempt, for what differs between the attempts at a task.

    Attributes:
        seed: The same in each run of the same seed, also where the attempt is repeated.
        episode_id: The episode's id.
        endpoint: The service, for chats that are no part of the episode; None outside of a run.
        http: The client for the endpoint, instead of the endpoint's own.
    """

    seed: int = 0
    episode_id: str = ""
    endpoint: ChatEndpoint | None = None
    http: ServiceTransport | None = None


@runtime_checkable
class UsesService(Protocol):
    """What an Environment may have, too: it gets the endpoint of the run, for chats that are no part of an episode."""

    def use_service(self, endpoint: ChatEndpoint) -> None:
        """Take the endpoint, before the first attempt."""
        ...


@runtime_checkable
class TakesAttempt(Protocol):
    """What a Steps or an Interaction may have, too: it gets its attempt before it begins."""

    def take_attempt(self, attempt: Attempt) -> None:
        """Take the attempt."""
        ...


@runtime_checkable
class TakesDialogue(Protocol):
    """What an Interaction may have, too: it gets the dialogue before its score is wanted, also at a limit."""

    def take_dialogue(self, messages: Sequence[Message]) -> None:
        """Take all messages that the agent has seen or written, with its calls and their results."""
        ...


@runtime_checkable
class Described(Protocol):
    """What an Environment, a Steps or an Interaction may have, too: what is recorded with each attempt.

    Another description is another run: a run cannot go on with it.
    """

    async def describe_attempt(self, task: Task, seed: int) -> Mapping[str, str]:
        """Return pairs of metadata for an attempt with this seed: at most 8, of at most 512 characters.

        Of an Interaction or a Steps, an object that plays nothing is called. The run's own pairs go before these.
        """
        ...


def check_description(description: object) -> Mapping[str, str]:
    """Return the description. Raises ValueError for one that is no metadata of an episode."""
    if not isinstance(description, Mapping) or len(description) > MAX_PAIRS:
        raise ValueError(f"describe_attempt must return at most {MAX_PAIRS} pairs of texts")
    for name, value in description.items():
        if not isinstance(name, str) or not isinstance(value, str) or len(value) > MAX_VALUE_CHARS:
            raise ValueError(f"describe_attempt must return texts of at most {MAX_VALUE_CHARS} characters: {name!r}")
    return description
