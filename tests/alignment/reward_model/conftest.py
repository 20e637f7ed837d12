"""Datasets of random tokens in which replies that end in one token are preferred."""

import random

import pytest

from alignment.config.trainer import RewardModelConfig, TrainerConfig
from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, PreferencePair, Reply
from tests.alignment.conftest import VOCABULARY

PREFERRED_TOKEN, REJECTED_TOKEN = 7, 9


@pytest.fixture
def reward_config(config: TrainerConfig) -> TrainerConfig:
    reward_model = RewardModelConfig(lr=1e-2, batch_size=16, min_steps=60)
    return config.model_copy(update={"reward_model": reward_model, "micro_batch_tokens": 256})


def make_dataset(num_labels: int = 0, num_pairs: int = 0, seed: int = 0) -> PreferenceDataset:
    """Return labels and pairs, each by another rater, about replies that end in the preferred or the rejected token."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, VOCABULARY) for _ in range(rng.randrange(low, high)))

    replies: list[Reply] = []
    labels: list[BinaryLabel] = []
    preference_pairs: list[PreferencePair] = []
    for number in range(num_labels):
        is_positive = number % 2 == 0
        replies.append(
            Reply(
                f"t{number}", ids(3, 9), (*ids(1, 4), PREFERRED_TOKEN if is_positive else REJECTED_TOKEN), f"c{number}"
            )
        )
        labels.append(BinaryLabel(len(replies) - 1, 1.0 if is_positive else -1.0, rater=f"HUMAN/{number}"))
    for number in range(num_pairs):
        prompt, first_index = ids(3, 9), len(replies)
        for last_token in (PREFERRED_TOKEN, REJECTED_TOKEN):
            replies.append(Reply(f"p{number}-{last_token}", prompt, (*ids(1, 4), last_token), f"d{number}"))
        preference_pairs.append(PreferencePair(first_index, first_index + 1, rater=f"HUMAN/p{number}", ranking=number))
    return PreferenceDataset(tuple(replies), tuple(preference_pairs), tuple(labels))
