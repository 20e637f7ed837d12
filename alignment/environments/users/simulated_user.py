"""What a simulated user is: it begins a dialogue, answers the assistant, and ends it."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from alignment.environments.attempts import Attempt
from alignment.environments.protocols import Message

DIGEST_CHARS = 16


@runtime_checkable
class SimulatedUser(Protocol):
    """The user of one dialogue. One object is made for each attempt, and one more to describe it, which is closed.

    The same attempt has the same user: what it draws, it draws by the attempt's seed. Exceptions of its methods are
    failures of the environment, and say nothing about the agent.
    """

    def describe(self) -> Mapping[str, str]:
        """Return what is recorded of it, as `Described` does: `user`, a short name, and `user_sha256`, a digest."""
        ...

    async def begin(self, attempt: Attempt) -> str:
        """Return the first message of the dialogue."""
        ...

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """Return the answer to the last of the messages, a reply of the assistant, or None to end the dialogue."""
        ...

    async def close(self) -> None:
        """Free what the user holds. It is also called after a failure."""
        return None


def digest_of(*parts: object) -> str:
    """Return a digest of what makes a user: the text itself may hold what a viewer of the record must not read."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:DIGEST_CHARS]


def text_of(message: Message) -> str:
    """Return the text of a message, "" for one of tool calls alone."""
    content = message.get("content")
    return content if isinstance(content, str) else ""
