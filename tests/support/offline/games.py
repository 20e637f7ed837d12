"""Games played offline, by random legal play or by the sampler, and the samples of what was played."""

import asyncio
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import orjson

from alignment.environments.protocols import Agent, Environment, Limits, Message, Outcome, Task
from alignment.environments.service_http import ServiceAnswer, ServiceTransport
from alignment.signals.combine_rewards import CombinedReward
from alignment.signals.tree_returns import Step, episode_return, tree_returns, turn_rewards
from alignment.types import Sample
from tests.support.offline.game_model import Transcript
from tests.support.offline.sampled_chats import SampledChats, SampledTurn

Credit = Literal["outcome", "return"]
GUESS = re.compile(r"\[(\d+)\]")


class RandomPlay(ServiceTransport):
    """Guesses a number that it has not guessed before in this game, each with the same probability.

    With `repeats` it guesses any number, which the game refuses where it was guessed before.
    """

    def __init__(self, numbers: Sequence[int], seed: int, *, repeats: bool = False) -> None:
        self._numbers = numbers
        self._random = random.Random(seed)
        self._repeats = repeats
        self.transcripts: dict[str, Transcript] = {}  # by the API key

    async def request(
        self,
        method: str,
        url: str,
        key: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = 60.0,
    ) -> ServiceAnswer:
        messages = cast("Mapping[str, Sequence[Message]]", body)["messages"]
        guessed = {int(GUESS.findall(str(message["content"]))[0]) for message in messages[1::2]}
        number = self._random.choice([n for n in self._numbers if self._repeats or n not in guessed])
        reply = {"role": "assistant", "content": f"[{number}]"}
        self.transcripts[key] = [cast("Mapping[str, str]", message) for message in (*messages, reply)]
        completion = {"id": f"{key}-{len(messages)}", "choices": [{"message": reply, "finish_reason": "stop"}]}
        return ServiceAnswer(orjson.dumps(completion), False)

    async def close(self) -> None:
        """It holds nothing open."""


@dataclass(frozen=True)
class Game:
    """A game that was played: the attempt's key, its task, how it ended, and its turns in token space."""

    key: str
    task: str
    outcome: Outcome
    turns: Sequence[SampledTurn] = ()

    @property
    def is_won(self) -> bool:
        return self.outcome.reward == 1.0


async def play_games(
    environment: Environment, tasks: Iterable[Task], name: str, *, attempts: int = 1, http: SampledChats | None = None
) -> list[Game]:
    """Play each task so many times, all games at once. `http` is asked for what it has sampled for them."""

    async def play(task: Task, number: int) -> Game:
        key = f"{name}-{task.id}-{number}"
        outcome = await environment.run(task, Agent("http://sampler", key, "player", {}, key, Limits()))
        return Game(key, task.id, outcome, () if http is None else http.take_turns(key))

    return list(await asyncio.gather(*(play(task, number) for task in tasks for number in range(attempts))))


def make_samples(game: Game, credit: Credit, discount: float, version: int, *, is_compared: bool) -> list[Sample]:
    """Return the turns of a game with the rewards that the service would give them (docs/episodes.md, "Credit").

    `is_compared`: the game is compared with the others of its task.
    """
    assert game.outcome.reward is not None
    rewards = {step.completion_id: CombinedReward(step.reward, 1.0) for step in game.outcome.step_rewards}
    ids = [turn.completion_id for turn in game.turns]
    steps = [Step(id, parent, rewards.get(id)) for id, parent in zip(ids, [None, *ids], strict=False)]
    outcome = CombinedReward(game.outcome.reward, 1.0)
    whole = episode_return(steps, outcome)
    returns = {id: found.value for id, found in tree_returns(steps, outcome, discount).items() if found is not None}
    own = turn_rewards(steps, outcome)
    assert whole is not None
    is_return = credit == "return"
    return [
        Sample(
            turn_id=turn.completion_id,
            prompt_ids=turn.prompt_ids,
            output_ids=turn.reply.ids,
            logprobs=turn.reply.logprobs,
            reward=returns[turn.completion_id] if is_return else whole.value,
            version=version,
            group=game.task if is_compared else turn.completion_id,
            conversation=game.key,
            turn_index=number,
            episode=game.key,
            depth=number if is_return else None,
            parent=steps[number].parent if is_return else None,
            num_next=int(is_return and number + 1 < len(steps)),
            turn_reward=own[turn.completion_id] if is_return else None,
            turn_return=returns[turn.completion_id] if is_compared and not is_return else None,
        )
        for number, turn in enumerate(game.turns)
    ]
