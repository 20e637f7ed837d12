"""The evaluation of a reward model does not depend on the unit of its scores."""

import pytest
import torch

from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, Reply
from alignment.reward_model.evaluate import calibrate, evaluate, scores_to_rewards

VALUES = [1.0, -1.0, -1.0, 1.0, -1.0] * 4


def make_dataset() -> PreferenceDataset:
    replies = tuple(Reply(f"t{number}", (number,), (1,)) for number in range(len(VALUES)))
    return PreferenceDataset(replies, labels=tuple(BinaryLabel(*label) for label in enumerate(VALUES)))


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0, 30.0])
def test_scores_that_order_all_replies_agree_with_all_labels(spread: float) -> None:
    """A model that was fitted on 60 votes had scores with a spread of 0.1, and predicted "down" for every reply."""
    dataset = make_dataset()
    scores = 0.3 + spread * (torch.tensor(VALUES) + torch.linspace(-0.5, 0.5, len(VALUES)))
    assert evaluate(dataset, scores, seed=0)["agreement"] == 1.0
    rewards = scores_to_rewards(scores.double(), calibrate(dataset, scores))
    assert ((rewards * torch.tensor(VALUES)) > 0.2).all()


def test_equal_scores_give_equal_rewards() -> None:
    dataset = make_dataset()
    scores = torch.full((len(VALUES),), 0.7)
    rewards = scores_to_rewards(scores.double(), calibrate(dataset, scores))
    assert (rewards == rewards[0]).all() and rewards[0] < 0, "most labels are negative"
