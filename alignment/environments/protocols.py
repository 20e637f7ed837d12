"""What an environment is: tasks, and a way to play one with an agent behind an OpenAI-compatible URL.

Three forms. `Environment` owns its loop: it talks to the agent's URL as it likes, and then says a number. `Steps` and
`Interaction` leave the loop to `episode_loop`: they say what the agent sees and what its replies are worth. Subclass
them, or write a class with the same methods.

Rewards are from -1 to 1, as the service takes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from pydantic import JsonValue

from alignment.environments.tools.base import JsonObject, ToolSchema
from alignment.environments.tools.toolbox import Toolbox

ENTRY_POINT_GROUP = "attune.environments"

Message = Mapping[str, JsonValue]  # of a chat, on OpenAI's wire
Reason = Literal["completed", "failed", "max_turns", "max_tokens", "deadline", "abandoned", "infrastructure"]


@dataclass(frozen=True)
class Task:
    """A task. All attempts at it begin in the same state.

    Attributes:
        id: Its name, the same in every run: attempts at it are found and compared by it.
        data: The row of the task: also what the model must not see, such as a reference.
        seed: For environments that draw random numbers.
    """

    id: str
    data: Mapping[str, JsonValue] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Limits:
    """How long an attempt may last; None: without a limit. The service holds them, too, where no more is said."""

    max_turns: int | None = None
    max_tokens: int | None = None  # of all replies
    max_reply_tokens: int | None = None  # of one reply; the service does not hold it, whoever sends the chats does
    deadline_seconds: float = 3600.0


@dataclass(frozen=True)
class Agent:
    """Where the agent is reached in one episode: all chats with this key belong to the episode.

    Attributes:
        base_url: For OpenAI's clients, as in `OpenAI(base_url=…, api_key=…)`.
        model: What chats name as `model`.
        headers: To be sent with every chat.
        episode_id: The episode's id.
        seed: Of this attempt: the same in each run of the same seed. Of a Task all attempts have the same.
    """

    base_url: str
    api_key: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    episode_id: str = ""
    limits: Limits = field(default_factory=Limits)
    seed: int = 0


@dataclass(frozen=True)
class StepReward:
    """The reward of one reply. `completion_id` is the id of the chat completion."""

    completion_id: str
    reward: float


@dataclass(frozen=True)
class Outcome:
    """How an attempt went.

    Attributes:
        reward: What it is worth in the end, beside the rewards of its steps; None: nobody can tell.
        step_rewards: Rewards of single replies.
        metrics: Figures for people.
        reason: Why it ended. A limit is one that the environment itself has set, or has seen in a refusal.
    """

    reward: float | None
    step_rewards: Sequence[StepReward] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: Reason = "completed"


@dataclass(frozen=True)
class Observation:
    """What the agent sees first.

    Attributes:
        messages: The first messages of the chat.
        tools: `tools` of the chats that the environment answers itself: `step` gets the reply with the calls.
        toolbox: Tools that the loop executes for the environment, which sees the replies without such calls alone.
        state_key: A name of the state, by which `gigpo` compares replies; see docs/episodes.md.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    toolbox: Toolbox | None = None
    state_key: str | None = None


@dataclass(frozen=True)
class Step:
    """What a reply has led to: the five values of gymnasium.

    Attributes:
        messages: What the agent sees next, after its reply: answers of tools, the next observation.
        reward: The reward of the reply.
        terminated: The task is over, done or failed.
        truncated: The environment has cut the attempt off, at a limit of its own.
        info: Numbers of the last step become metrics.
        state_key: The name of the state after the reply.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: JsonObject = field(default_factory=dict)
    state_key: str | None = None


@dataclass(frozen=True)
class Feedback:
    """An interaction's answer to a reply: what the agent sees next, the reply's reward, and whether it is over.

    `is_truncated`: it is over since the interaction has cut it off, at a limit of its own.
    """

    message: Message
    reward: float = 0.0
    is_done: bool = False
    is_truncated: bool = False


@runtime_checkable
class Environment(Protocol):
    """Anything that talks to an OpenAI-compatible URL and then says a number.

    Many attempts run at a time. An exception of `run` says that the environment failed: nothing is learned from the
    attempt, and another one takes its place. AgentFailure says that the agent did.
    """

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield tasks, perhaps without end: the same ones in the same order for the same split and seed."""
        ...

    async def run(self, task: Task, agent: Agent) -> Outcome:
        """Play one attempt with the agent."""
        ...

    async def close(self) -> None:
        """Free what the environment holds."""
        return None


@runtime_checkable
class HasPlaces(Protocol):
    """What an Environment may have, too: how many attempts it can serve at a time.

    More are not begun, since an attempt that waits in the environment spends its deadline.
    """

    async def max_concurrency(self) -> int:
        """Return the number. Raises as `run` does if the environment cannot be opened."""
        ...


@runtime_checkable
class Steps(Protocol):
    """A world that is reset and then steps, as in gymnasium. One object is made for each attempt, without arguments
    but those of `open_environment`.

    The reward of the last step is the outcome of the attempt; the others are rewards of their replies. An attempt that
    a limit ends before the world does has the outcome -1, or what `Unfinished` says.
    """

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield tasks, as Environment does."""
        ...

    async def reset(self, task: Task) -> Observation:
        """Begin the task."""
        ...

    async def step(self, reply: Message) -> Step:
        """Go on after a reply of the agent: an assistant's message."""
        ...

    async def close(self) -> None:
        """Free what the world holds. It is also called after a failure."""
        return None


@runtime_checkable
class Unfinished(Protocol):
    """What a Steps may have, too: the outcome of an attempt that a limit ends before the world does."""

    def unfinished_reward(self) -> float:
        """Return it. Where it is more than a loss, a policy learns to stall."""
        ...


@runtime_checkable
class Interaction(Protocol):
    """A conversation with feedback, as verl's BaseInteraction. One object is made for each attempt, as for Steps.

    `score` is the outcome of the attempt, beside the rewards of its replies.
    """

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield tasks, as Environment does."""
        ...

    async def start(self, task: Task) -> Observation:
        """Begin the task (verl: start_interaction)."""
        ...

    async def respond(self, messages: Sequence[Message]) -> Feedback:
        """Answer the last of the messages, a reply of the agent (verl: generate_response)."""
        ...

    async def score(self) -> float:
        """Return the reward of the attempt, also of one that a limit has ended (verl: calculate_score)."""
        ...

    async def finish(self) -> None:
        """Free what the conversation holds (verl: finalize_interaction). It is also called after a failure."""
        return None
