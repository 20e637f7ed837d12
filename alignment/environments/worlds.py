"""One world of an attempt, be it a Steps or an Interaction: what the loop asks of both."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from alignment.environments.protocols import Interaction, Message, Observation, Step, StepReward, Steps, Task


class World(ABC):
    """A world. One object plays one attempt."""

    @abstractmethod
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield tasks, as Environment does."""

    @abstractmethod
    async def begin(self, task: Task) -> Observation:
        """Return what the agent sees first."""

    @abstractmethod
    async def answer(self, messages: Sequence[Message]) -> Step:
        """Go on after the last of the messages, a reply of the agent."""

    @abstractmethod
    async def judge(self, rewards: Sequence[StepReward]) -> tuple[float, Sequence[StepReward]]:
        """Return the outcome, and what of the replies' rewards is left beside it."""

    @abstractmethod
    async def close(self) -> None:
        """Free what the world holds."""


class StepsWorld(World):
    """The world of a Steps. The last reward is the outcome, so that no reward counts twice."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return self._steps.tasks(split, seed)

    async def begin(self, task: Task) -> Observation:
        return await self._steps.reset(task)

    async def answer(self, messages: Sequence[Message]) -> Step:
        return await self._steps.step(messages[-1])

    async def judge(self, rewards: Sequence[StepReward]) -> tuple[float, Sequence[StepReward]]:
        if not rewards:
            return 0.0, ()
        return rewards[-1].reward, rewards[:-1]

    async def close(self) -> None:
        await self._steps.close()


class InteractionWorld(World):
    """The world of an Interaction. Its score is the outcome, beside the rewards of all replies."""

    def __init__(self, interaction: Interaction) -> None:
        self._interaction = interaction

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return self._interaction.tasks(split, seed)

    async def begin(self, task: Task) -> Observation:
        return await self._interaction.start(task)

    async def answer(self, messages: Sequence[Message]) -> Step:
        feedback = await self._interaction.respond(messages)
        return Step((feedback.message,), feedback.reward, terminated=feedback.is_done)

    async def judge(self, rewards: Sequence[StepReward]) -> tuple[float, Sequence[StepReward]]:
        return await self._interaction.score(), rewards

    async def close(self) -> None:
        await self._interaction.finish()
