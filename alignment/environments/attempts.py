"""One attempt at a task: its seed, how it reaches the service, and what environments may have for it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from alignment.environments.protocols import Task
from alignment.environments.service_http import ServiceHttp

SEED_BITS = 31


def derive_seed(*parts: str | int) -> int:
    """Return a seed of 31 bits: the same one for the same parts.

    Example: derive_seed(run_seed, "train-0", 1) is that of the second attempt at a task.
    """
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> (32 - SEED_BITS)


@dataclass(frozen=True)
class ChatEndpoint:
    """Where chats are sent, for OpenAI's API: the URL ends with `/v1`."""

    base_url: str
    api_key: str = field(repr=False)


@dataclass(frozen=True)
class Attempt:
    """One attempt, for what differs between the attempts at a task.

    Attributes:
        seed: The same in each run of the same seed, also where the attempt is repeated.
        episode_id: The episode's id.
        endpoint: The service, for chats that are no part of the episode; None outside of a run.
        http: The client for the endpoint.
    """

    seed: int = 0
    episode_id: str = ""
    endpoint: ChatEndpoint | None = None
    http: ServiceHttp | None = None


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
class Described(Protocol):
    """What an Environment, a Steps or an Interaction may have, too: what is recorded with each attempt.

    Another description is another run: a run cannot go on with it.
    """

    def describe(self, task: Task, seed: int) -> Mapping[str, str]:
        """Return pairs of metadata for an attempt with this seed: at most 8, of at most 512 characters."""
        ...
