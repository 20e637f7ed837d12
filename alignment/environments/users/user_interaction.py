"""An Interaction of a simulated user and a function that grades the dialogue."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from alignment.environments.attempts import Attempt
from alignment.environments.protocols import Feedback, Interaction, Message, Observation, Task
from alignment.environments.users.simulated_user import SimulatedUser


class UserInteraction(Interaction):
    """A dialogue with a simulated user, who begins and ends it. Write `tasks`, `user` and `grade`.

    `max_turns`: after so many replies the dialogue is over, whatever the user wants.
    """

    max_turns = 20
    _attempt = Attempt()
    _task: Task
    _user: SimulatedUser | None = None
    _dialogue: Sequence[Message] = ()
    _num_turns = 0

    @abstractmethod
    def user(self, task: Task) -> SimulatedUser:
        """Return the user of an attempt, a new one."""

    @abstractmethod
    async def grade(self, task: Task, dialogue: Sequence[Message]) -> float:
        """Return the reward of the attempt, from -1 to 1. The dialogue has all messages, also results of tools."""

    def observe(self, task: Task, first: Message) -> Observation:
        """Return what the agent sees first: the user's message. Add instructions and tools here."""
        return Observation([first])

    def take_attempt(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def describe(self, task: Task, seed: int) -> Mapping[str, str]:
        return {**self.user(task).describe(), "user_seed": str(seed)}

    async def start(self, task: Task) -> Observation:
        self._task = task
        self._user = self.user(task)
        first = await self._user.begin(self._attempt)
        return self.observe(task, {"role": "user", "content": first})

    async def respond(self, messages: Sequence[Message]) -> Feedback:
        assert self._user is not None, "start comes first"
        self._dialogue = list(messages)
        self._num_turns += 1
        text = None
        if self._num_turns < self.max_turns:
            text = await self._user.reply(messages)
        return Feedback({"role": "user", "content": text or ""}, is_done=text is None)

    async def score(self) -> float:
        return await self.grade(self._task, self._dialogue)

    async def finish(self) -> None:
        if self._user is not None:
            await self._user.close()
