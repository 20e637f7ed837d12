"""An Interaction of a simulated user and a function that grades the dialogue."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from alignment.environments.attempts import Attempt
from alignment.environments.protocols import Feedback, Interaction, Message, Observation, Task
from alignment.environments.users.simulated_user import SimulatedUser


class UserInteraction(Interaction):
    """A dialogue with a simulated user, who begins and ends it. Write `tasks`, `user` and `grade`.

    `max_turns`: after so many replies the attempt is cut off, as at any other limit, if the user goes on.
    """

    max_turns = 20
    _attempt = Attempt()
    _task: Task
    _user: SimulatedUser | None = None
    _dialogue: Sequence[Message] = ()
    _num_turns = 0

    @abstractmethod
    def user(self, task: Task) -> SimulatedUser:
        """Return the user of an attempt, a new one. An attempt is described by another one, which begins nothing."""

    @abstractmethod
    async def grade(self, task: Task, dialogue: Sequence[Message]) -> float:
        """Return the reward of the attempt, from -1 to 1.

        The dialogue has all messages that the agent has seen or written, also results of tools. After a limit it may
        end with any of them, and have no reply.
        """

    def observe(self, task: Task, first: Message) -> Observation:
        """Return what the agent sees first: the user's message. Add instructions and tools here."""
        return Observation([first])

    def take_attempt(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def take_dialogue(self, messages: Sequence[Message]) -> None:
        self._dialogue = messages

    async def describe_attempt(self, task: Task, seed: int) -> Mapping[str, str]:
        user = self.user(task)
        try:
            return {**user.describe(), "user_seed": str(seed)}
        finally:
            await user.close()

    async def start(self, task: Task) -> Observation:
        self._task = task
        self._user = self.user(task)
        first = await self._user.begin(self._attempt)
        return self.observe(task, {"role": "user", "content": first})

    async def respond(self, messages: Sequence[Message]) -> Feedback:
        assert self._user is not None, "start comes first"
        self._num_turns += 1
        text = await self._user.reply(messages)
        is_truncated = text is not None and self._num_turns >= self.max_turns
        return Feedback({"role": "user", "content": text or ""}, is_done=text is None, is_truncated=is_truncated)

    async def score(self) -> float:
        return await self.grade(self._task, self._dialogue)

    async def finish(self) -> None:
        if self._user is not None:
            await self._user.close()
