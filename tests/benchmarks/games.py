"""Measure learning in a game of another package: `make bench-games` or `python -m tests.benchmarks.games`.

TextArena's GuessTheNumber runs unchanged in a process of its own, behind the loop of planned runs. The player is a
model of 0.2 M parameters that was pretrained on random legal play. Only the HTTP between loop and model is replaced: by
the offline sampler, with token-exact prompts. A finished run is a line in `--out` and is not repeated.
"""

import argparse
import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from uuid import uuid4

import torch
from transformers import Qwen2Tokenizer

from alignment.config.trainer import TrainerConfig
from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.foreign import ForeignSteps
from alignment.environments.host_pool import EnvironmentSpec, HostPool
from alignment.environments.host_process import ADAPTERS, HostConfig
from alignment.environments.protocols import Task
from alignment.environments.service_http import ServiceTransport
from alignment.environments.tools.base import JsonObject
from alignment.environments.worlds import StepsWorld
from alignment.errors import NothingToCompare, NoVariance
from alignment.trainer.trainer import Trainer
from alignment.types import Batch
from app.core.settings import REPOSITORY, Settings
from app.core.settings.derived import trainer_config
from tests.benchmarks.deployment import machine
from tests.benchmarks.games_table import GameResult, table
from tests.benchmarks.results import append_row, read_rows
from tests.clients.third_party.environments import prepare
from tests.support.offline.experiment import copy_actor
from tests.support.offline.game_model import train_game_model
from tests.support.offline.games import Credit, Game, RandomPlay, make_samples, play_games
from tests.support.offline.sampled_chats import SampledChats
from tests.support.offline.sampler import Sampler

OUT = REPOSITORY / "docs" / "measurements" / "games.jsonl"
PINS = REPOSITORY / "tests" / "alignment" / "environments" / "packages"
TOKENIZER_GAMES = 50
MAX_TOKENS = 8  # of a reply, which has four
SHOWN = ("won", "turns", "guard/kl", "actor/step_scale")  # metrics of an update
EVALUATION = "evaluation"  # the split of the games that are never trained on


@dataclass(frozen=True)
class Arm:
    """How the turns of a game are credited, and what they are compared with."""

    credit: Credit
    algorithm: Mapping[str, Any]
    attempts: int = 1  # at each task


ARMS = {
    "outcome": Arm("outcome", {"type": "ppo"}),
    "return": Arm("return", {"type": "ppo"}),
    "turn_gae": Arm("return", {"type": "ppo", "estimator": "turn_gae"}),
    "grpo": Arm("outcome", {"type": "grpo"}, attempts=8),
    "gigpo": Arm("outcome", {"type": "gigpo"}, attempts=8),
    "grpo-return": Arm("return", {"type": "grpo"}, attempts=8),
}


@dataclass(frozen=True)
class Rules:
    """The game: guess a number from 1 to `numbers` in so many turns."""

    numbers: int
    turns: int

    @property
    def label(self) -> str:
        return f"1–{self.numbers} in {self.turns} turns"


class GameProcess:
    """The game's process, and the games played in it."""

    def __init__(self, pool: HostPool, seed: int) -> None:
        self._pool = pool
        self._seed = seed

    def environment(self, http: ServiceTransport) -> LoopEnvironment:
        return LoopEnvironment(lambda: StepsWorld(ForeignSteps(self._pool, uuid4().hex)), http)

    def tasks(self, split: str) -> Iterator[Task]:
        return ForeignSteps(self._pool, "tasks").tasks(split, self._seed)


@asynccontextmanager
async def open_game(rules: Rules, seed: int) -> AsyncIterator[GameProcess]:
    arguments: JsonObject = {"max_number": rules.numbers, "max_turns": rules.turns}
    spec = EnvironmentSpec(ADAPTERS / "textarena_adapter.py", "GuessTheNumber-v0", arguments, "textarena")
    pool = HostPool(spec, HostConfig(python=prepare("games", PINS) / "bin" / "python"))
    try:
        yield GameProcess(pool, seed)
    finally:
        await pool.close()


async def pretrain(process: GameProcess, rules: Rules, num_games: int, seed: int, out: Path) -> None:
    """Write a model that was trained on so many games of random legal play.

    Its tokenizer also knows what the game says to a number that was guessed before.
    """
    numbers = range(1, rules.numbers + 1)
    legal, any_number = RandomPlay(numbers, seed), RandomPlay(numbers, seed, repeats=True)
    for http, count in ((legal, num_games), (any_number, TOKENIZER_GAMES)):
        await play_games(process.environment(http), islice(process.tasks("pretraining"), count), "random")
    transcripts, others = (list(http.transcripts.values()) for http in (legal, any_number))
    await asyncio.to_thread(train_game_model, transcripts, others, map(str, numbers), out, seed)


def make_config(arm: Arm, arguments: argparse.Namespace, seed: int) -> TrainerConfig:
    """Return the service's defaults for full weights, but for the algorithm and what the options set."""
    changes = {
        "trainer.adaptation": "full",
        "algorithm": dict(arm.algorithm),
        "trainer.kl_target": arguments.kl_target,
        "trainer.seed": seed,
        "trainer.device": "cpu",
    }
    config = trainer_config(Settings().replace(changes))
    optim = config.optim.model_copy(update={"lr": arguments.lr})
    return config.model_copy(update={"reward_model": None, "optim": optim})


class Learner:
    """One run: a model, its trainer, and the games that it learns from."""

    def __init__(self, process: GameProcess, model: Path, arm: Arm, arguments: argparse.Namespace, seed: int) -> None:
        self._arm = arm
        self._discount = Settings().rewards.episode_discount
        self._trainer = Trainer(model, make_config(arm, arguments, seed))
        self._sampler = Sampler(model, max_rows=arguments.games, shares_prefix=True)
        # Not AutoTokenizer, which would take Qwen2's own for this kind of model where a file is missing.
        tokenizer = Qwen2Tokenizer.from_pretrained(model, local_files_only=True)
        self._chats = SampledChats(self._sampler, tokenizer, seed, max_tokens=MAX_TOKENS)
        self._environment = process.environment(self._chats)
        self._process = process
        self._tasks = process.tasks("training")
        self.num_refused = 0

    async def play(self, tasks: Iterator[Task], name: str, count: int, attempts: int = 1) -> list[Game]:
        """Play `count` games with the newest version."""
        self._sampler.load_weights(copy_actor(self._trainer))
        chosen = islice(tasks, count // attempts)
        return await play_games(self._environment, chosen, name, attempts=attempts, http=self._chats)

    async def evaluate(self, count: int) -> float:
        """Return the share of games won, always of the same tasks."""
        games = await self.play(self._process.tasks(EVALUATION), EVALUATION, count)
        return sum(game.is_won for game in games) / len(games)

    async def update(self, number: int, num_games: int) -> dict[str, float]:
        """Play games, and learn from them."""
        games = await self.play(self._tasks, f"update-{number}", num_games, self._arm.attempts)
        is_compared = self._arm.attempts > 1
        samples = [
            sample
            for game in games
            for sample in make_samples(game, self._arm.credit, self._discount, number, is_compared=is_compared)
        ]
        metrics = {
            "won": sum(game.is_won for game in games) / len(games),
            "turns": len(samples) / len(games),
        }
        try:
            return metrics | self._trainer.update(Batch(f"batch-{number}", "player", tuple(samples))).metrics
        except (NoVariance, NothingToCompare):
            self.num_refused += 1
            return metrics


async def run(rules: Rules, name: str, seed: int, arguments: argparse.Namespace) -> GameResult:
    directory = Path(mkdtemp(prefix="attune-games-"))
    try:
        async with open_game(rules, seed) as process:
            started = time.process_time()
            await pretrain(process, rules, arguments.pretraining, seed, directory / "model")
            pretraining_seconds = time.process_time() - started
            learner = Learner(process, directory / "model", ARMS[name], arguments, seed)
            curve = [await learner.evaluate(arguments.evaluation)]
            started = time.process_time()
            for number in range(arguments.updates):
                metrics = await learner.update(number, arguments.games)
                shown = ", ".join(f"{key} {metrics[key]:.3g}" for key in SHOWN if key in metrics)
                print(f"{rules.label}, {name}, seed {seed}, update {number + 1}: {shown}", flush=True)
                if (number + 1) % arguments.every == 0:
                    curve.append(await learner.evaluate(arguments.evaluation))
                    print(f"held-out games won: {curve[-1]:.1%}", flush=True)
            return GameResult(
                rules=rules.label,
                arm=name,
                label=arguments.label,
                seed=seed,
                games=arguments.games,
                every=arguments.every,
                evaluation=arguments.evaluation,
                curve=curve,
                refused=learner.num_refused,
                pretraining_seconds=pretraining_seconds,
                seconds=time.process_time() - started,
            )
    finally:
        shutil.rmtree(directory)


async def run_all(arguments: argparse.Namespace) -> None:
    print(f"{machine()}\n", flush=True)
    rules = Rules(arguments.numbers, arguments.turns)
    results = [GameResult(**row) for row in read_rows(arguments.out)]
    finished = {(one.rules, one.arm, one.label, one.seed) for one in results}
    for name in arguments.arms:
        for seed in arguments.seeds:
            if (rules.label, name, arguments.label, seed) not in finished:
                results.append(await run(rules, name, seed, arguments))
                append_row(arguments.out, asdict(results[-1]))
    print(f"\n{table(results)}")


def main(options: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=20, help="the largest number")
    parser.add_argument("--turns", type=int, default=10, help="of a game")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=["return"], help="credit and algorithm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--games", type=int, default=64, help="of an update")
    parser.add_argument("--pretraining", type=int, default=2000, help="games of random play")
    parser.add_argument("--every", type=int, default=10, help="updates between two evaluations")
    parser.add_argument("--evaluation", type=int, default=256, help="games of an evaluation")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--kl-target", type=float, default=0.02)
    parser.add_argument("--label", default="", help="names runs with other settings")
    parser.add_argument("--out", type=Path, default=OUT)
    torch.set_num_threads(1)
    asyncio.run(run_all(parser.parse_args(options)))


if __name__ == "__main__":
    main()
