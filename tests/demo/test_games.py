"""The parts of the benchmark that learns a game: random play, sampled chats, the rewards of turns, and the table."""

import asyncio
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Tokenizer

from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.foreign import seeded_tasks
from alignment.environments.protocols import Message, Observation, Outcome, Step, StepReward, Steps, Task
from alignment.environments.worlds import StepsWorld
from tests.benchmarks.games_table import GameResult, table
from tests.support.offline.game_model import train_game_model
from tests.support.offline.games import Game, RandomPlay, make_samples, play_games
from tests.support.offline.sampled_chats import SampledChats, SampledTurn
from tests.support.offline.sampler import Reply, Sampler

RULES: Message = {"role": "user", "content": "Guess a number from 1 to 5."}


class Guessing(Steps):
    """A game of three guesses. A number that was guessed before is refused, and costs a guess."""

    def __init__(self) -> None:
        self._number = 0
        self._guessed: list[int] = []

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return seeded_tasks(split, seed)

    async def reset(self, task: Task) -> Observation:
        self._number = 1 + task.seed % 5
        return Observation([RULES])

    async def step(self, reply: Message) -> Step:
        found = re.search(r"\[(\d)\]", str(reply["content"]))
        guess = int(found[1]) if found else 0
        hint = "It was guessed before." if guess in self._guessed else f"It is not {guess}."
        self._guessed.append(guess)
        is_over = guess == self._number or len(self._guessed) == 3
        return Step([{"role": "user", "content": hint}], 1.0 if guess == self._number else -1.0 * is_over, is_over)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def open_game(http: RandomPlay | SampledChats) -> LoopEnvironment:
    return LoopEnvironment(lambda: StepsWorld(Guessing()), http)


def first_tasks(count: int) -> list[Task]:
    return list(islice(seeded_tasks("train", 0), count))


async def test_random_play_guesses_no_number_twice_unless_it_may() -> None:
    legal, any_number = RandomPlay(range(1, 6), 0), RandomPlay(range(1, 6), 0, repeats=True)
    for http in (legal, any_number):
        await play_games(open_game(http), first_tasks(40), "random")
    for transcript in legal.transcripts.values():
        guesses = [message["content"] for message in transcript[1::2]]
        assert len(guesses) == len(set(guesses)) and all(guess in "[1][2][3][4][5]" for guess in guesses)
    assert "It was guessed before." in str(any_number.transcripts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen 40 games of random play, and nothing else."""
    http = RandomPlay(range(1, 6), 0)
    asyncio.run(_play(http))
    out = tmp_path_factory.mktemp("game-model")
    train_game_model(list(http.transcripts.values()), [[{"content": "It was guessed before."}]], "12345", out, 0)
    return out


async def _play(http: RandomPlay) -> None:
    await play_games(open_game(http), first_tasks(40), "random")


async def test_sampled_chats_are_token_exact(model: Path) -> None:
    """A prompt begins with the prompt and the reply before it; and games that wait together are sampled together."""
    sampler = Sampler(model, max_rows=16)
    tokenizer = Qwen2Tokenizer.from_pretrained(model)
    counts = []
    sample = sampler.sample

    def counted(prompts, *arguments, **options):  # type: ignore[no-untyped-def]
        counts.append(len(prompts))
        return sample(prompts, *arguments, **options)

    sampler.sample = counted  # type: ignore[method-assign]
    http = SampledChats(sampler, tokenizer, 0, max_tokens=6)
    games = await play_games(open_game(http), first_tasks(12), "sampled", http=http)
    assert counts[0] == 12 and len(counts) <= 3
    assert sum(len(game.turns) for game in games) == sum(counts)
    for game in games:
        assert tokenizer.decode(game.turns[0].prompt_ids).endswith(
            "<|im_start|>user\nGuess a number from 1 to 5.<|im_end|>\n<|im_start|>assistant\n"
        )
        for before, turn in zip(game.turns, game.turns[1:], strict=False):
            begin = (*before.prompt_ids, *before.reply.ids)
            assert turn.prompt_ids[: len(begin)] == begin
            assert tokenizer.decode(turn.prompt_ids[len(begin) :]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert not http.take_turns(games[0].key), "they were taken before"


def test_numbers_are_single_tokens_and_nothing_is_dropped(model: Path) -> None:
    tokenizer = Qwen2Tokenizer.from_pretrained(model)
    text = "It is not 3. It was guessed before. [3]"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("3") in ids and len(ids) < 20


def test_full_weights_are_sampled_from(model: Path) -> None:
    """Weights of another model give its replies."""
    sampler = Sampler(model)
    before = {name: tensor.clone() for name, tensor in sampler._weights.items() if name != "lm_head.weight"}
    changed = {name: tensor + 0.5 for name, tensor in before.items()}
    prompt = [[1, 2, 3]]

    def first() -> Reply:
        return sampler.sample(prompt, seeded(1), max_tokens=1)[0][0]

    original = first()
    sampler.load_weights(changed)
    assert first() != original
    sampler.load_weights(before)
    assert first() == original


def test_shared_prefixes_change_no_reply(model: Path) -> None:
    prompts = [[1, 2, 3, 4, *range(10, 10 + length)] for length in (3, 1, 6)] + [[1, 2, 3, 4, 60]]
    alone, shared = (
        list(chain(*Sampler(model, shares_prefix=shares).sample(prompts, seeded(3), count=2, max_tokens=5)))
        for shares in (False, True)
    )
    for one, other in zip(alone, shared, strict=True):
        assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_prompts_of_a_chat_that_are_kept_change_no_reply(model: Path) -> None:
    """Chats of different lengths go on together with a new one; then the weights change, and nothing kept is used."""
    first = {"a": [1, 2, 3, 4, 5], "b": [1, 2, 9]}
    second = {"a": [*first["a"], 7, 8, 9, 10], "b": [*first["b"], 6], "c": [1, 2, 3]}
    alone, keeping = Sampler(model), Sampler(model, shares_prefix=True)

    def check(prompts: dict[str, list[int]], seed: int) -> None:
        one = alone.sample(list(prompts.values()), seeded(seed), max_tokens=5)
        other = keeping.sample(list(prompts.values()), seeded(seed), chats=list(prompts), max_tokens=5)
        for [reply], [again] in zip(one, other, strict=True):
            assert again.ids == reply.ids and again.logprobs == pytest.approx(reply.logprobs, abs=1e-4)

    check(first, 1)
    check(second, 2)
    check(second, 3)  # nothing is new
    changed = {name: tensor + 0.5 for name, tensor in alone._weights.items() if name != "lm_head.weight"}
    for sampler in (alone, keeping):
        sampler.load_weights(changed)
    check({name: [*prompt, 3] for name, prompt in second.items()}, 4)
    keeping.end_chat("a")
    check({"a": [5, 6], "b": [*second["b"], 3, 4]}, 5)


def make_game(outcome: Outcome) -> Game:
    turns = [SampledTurn(f"t{number}", (1,) * (number + 1), Reply((7,), (-0.5,))) for number in range(3)]
    return Game("game", "task", outcome, turns)


def test_returns_are_discounted_from_the_end() -> None:
    samples = make_samples(make_game(Outcome(1.0)), "return", 0.5, 4, is_compared=False)
    assert [sample.reward for sample in samples] == [0.25, 0.5, 1.0]
    assert [sample.turn_reward for sample in samples] == [0.0, 0.0, 1.0]
    assert [(sample.depth, sample.parent, sample.num_next) for sample in samples] == [
        (0, None, 1),
        (1, "t0", 1),
        (2, "t1", 0),
    ]
    assert {sample.group for sample in samples} == {"t0", "t1", "t2"} and {sample.version for sample in samples} == {4}


def test_rewards_of_steps_count_for_the_turns_before_them() -> None:
    game = make_game(Outcome(-1.0, [StepReward("t1", 0.5)]))
    assert [sample.reward for sample in make_samples(game, "return", 0.5, 0, is_compared=False)] == [0.0, 0.0, -1.0]
    outcome = make_samples(game, "outcome", 0.5, 0, is_compared=True)
    assert [sample.reward for sample in outcome] == [-0.5] * 3, "the outcome and the rewards of its steps"
    assert [sample.turn_return for sample in outcome] == [0.0, 0.0, -1.0]
    assert {(sample.group, sample.depth) for sample in outcome} == {("task", None)}


def make_result(seed: int, *curve: float) -> GameResult:
    return GameResult("1–20 in 10 turns", "return", "", seed, 64, 10, 256, curve, 0, 60.0, 120.0)


def test_table_compares_runs_of_as_many_updates() -> None:
    runs = [make_result(1, 0.44, 0.7, 0.96), make_result(0, 0.46, 0.8, 0.98), make_result(2, 0.4, 0.5)]
    short, long = sorted(table(runs).splitlines()[2:], key=lambda row: row.count("±"))
    assert long == "| 1–20 in 10 turns | return | 0, 1 | 20 × 64 | 45 ± 13 % | 75 ± 64 % | 97 ± 13 % | 98, 96 | 2.0 |"
    assert short == "| 1–20 in 10 turns | return | 2 | 10 × 64 | 40 % | 40 % | 50 % | 50 | 2.0 |"
