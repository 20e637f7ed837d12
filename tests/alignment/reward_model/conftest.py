"""Replies in random tokens, some of them with the token that pleases."""

import random
from collections.abc import Callable

import pytest

from alignment.config.trainer import RewardModelConfig, TrainerConfig
from alignment.reward_model.dataset import BinaryLabel, Pair, PreferenceDataset, Reply
from tests.alignment.conftest import VOCABULARY

PLEASES, DISPLEASES = 7, 9


@pytest.fixture
def reward_config(config: TrainerConfig) -> TrainerConfig:
    told = RewardModelConfig(lr=1e-2, batch_words=16, min_steps=60)
    return config.model_copy(update={"reward_model": told, "microbatch_tokens": 256})


def heard(thumbs: int = 0, pairs: int = 0, seed: int = 0) -> PreferenceDataset:
    """Of people, each of whom speaks once, of a reply that ends in the token that pleases, or the other."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, VOCABULARY) for _ in range(rng.randrange(low, high)))

    replies: list[Reply] = []
    said: list[BinaryLabel] = []
    compared: list[Pair] = []
    for number in range(thumbs):
        up = number % 2 == 0
        replies.append(Reply(f"t{number}", ids(3, 9), (*ids(1, 4), PLEASES if up else DISPLEASES), f"c{number}"))
        said.append(BinaryLabel(len(replies) - 1, 1.0 if up else -1.0, rater=f"HUMAN/{number}"))
    for number in range(pairs):
        prompt, at = ids(3, 9), len(replies)
        for end in (PLEASES, DISPLEASES):
            replies.append(Reply(f"p{number}-{end}", prompt, (*ids(1, 4), end), f"d{number}"))
        compared.append(Pair(at, at + 1, rater=f"HUMAN/p{number}", ranking=number))
    return PreferenceDataset(tuple(replies), tuple(compared), tuple(said))


@pytest.fixture
def hear() -> Callable[..., PreferenceDataset]:
    return heard
