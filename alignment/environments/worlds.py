"""One world of an attempt, be it a Steps or an Interaction: what the loop asks of both."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from alignment.environments.attempts import Attempt, Described, TakesAttempt, TakesDialogue
from alignment.environments.protocols import (
    Interaction,
    Message,
    Observation,
    Step,
    StepReward,
    Steps,
    Task,
    Unfinished,
)

LOWEST_REWARD = -1.0


class World(ABC):
    """A world. One object plays one attempt."""

    @abstractmethod
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield tasks, as Environment does."""

    @abstractmethod
    async def describe(self, task: Task, seed: int) -> Mapping[str, str]:
        """Return what is recorded with an attempt, as Described does."""

    @abstractmethod
    async def begin(self, task: Task, attempt: Attempt) -> Observation:
        """Return what the agent sees first."""

    @abstractmethod
    async def answer(self, messages: Sequence[Message]) -> Step:
        """Go on after the last of the messages, a reply of the agent."""

    @abstractmethod
    async def judge(
        self, rewards: Sequence[StepReward], dialogue: Sequence[Message], *, is_over: bool
    ) -> tuple[float, Sequence[StepReward]]:
        """Return the outcome, and what of the replies' rewards is left beside it.

        `dialogue`: all messages that the agent has seen or written. `is_over`: the world itself has ended the attempt,
        not a limit.
        """

    @abstractmethod
    async def close(self) -> None:
        """Free what the world holds."""


class StepsWorld(World):
    """The world of a Steps. Its last reward is the outcome, so that no reward counts twice.

    A world that has not come to its end has said no outcome. If that were worth more than a loss, stalling would pay.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return self._steps.tasks(split, seed)

    async def describe(self, task: Task, seed: int) -> Mapping[str, str]:
        return await _describe(self._steps, task, seed)

    async def begin(self, task: Task, attempt: Attempt) -> Observation:
        if isinstance(self._steps, TakesAttempt):
            self._steps.take_attempt(attempt)
        return await self._steps.reset(task)

    async def answer(self, messages: Sequence[Message]) -> Step:
        return await self._steps.step(messages[-1])

    async def judge(
        self, rewards: Sequence[StepReward], dialogue: Sequence[Message], *, is_over: bool
    ) -> tuple[float, Sequence[StepReward]]:
        if is_over:
            return rewards[-1].reward, rewards[:-1]
        unfinished = self._steps.unfinished_reward() if isinstance(self._steps, Unfinished) else LOWEST_REWARD
        return unfinished, rewards

    async def close(self) -> None:
        await self._steps.close()


class InteractionWorld(World):
    """The world of an Interaction. Its score is the outcome, beside the rewards of all replies."""

    def __init__(self, interaction: Interaction) -> None:
        self._interaction = interaction

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return self._interaction.tasks(split, seed)

    async def describe(self, task: Task, seed: int) -> Mapping[str, str]:
        return await _describe(self._interaction, task, seed)

    async def begin(self, task: Task, attempt: Attempt) -> Observation:
        if isinstance(self._interaction, TakesAttempt):
            self._interaction.take_attempt(attempt)
        return await self._interaction.start(task)

    async def answer(self, messages: Sequence[Message]) -> Step:
        feedback = await self._interaction.respond(messages)
        is_completed = feedback.is_done and not feedback.is_truncated
        return Step((feedback.message,), feedback.reward, is_completed, feedback.is_truncated)

    async def judge(
        self, rewards: Sequence[StepReward], dialogue: Sequence[Message], *, is_over: bool
    ) -> tuple[float, Sequence[StepReward]]:
        if isinstance(self._interaction, TakesDialogue):
            self._interaction.take_dialogue(dialogue)
        return await self._interaction.score(), rewards

    async def close(self) -> None:
        await self._interaction.finish()


async def _describe(part: Steps | Interaction, task: Task, seed: int) -> Mapping[str, str]:
    return await part.describe_attempt(task, seed) if isinstance(part, Described) else {}
