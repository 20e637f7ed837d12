"""Fit a reward model in one call, without the slices in which the trainer's ranks run a fit."""

from alignment.reward_model.dataset import PreferenceDataset
from alignment.reward_model.model import RewardModel


def fit_reward_model(model: RewardModel, dataset: PreferenceDataset) -> dict[str, float]:
    """Fit the model on the dataset except its held-out part, calibrate it on that, and return its metrics."""
    steps = model.begin(dataset)
    while not model.advance(steps):
        pass
    return model.finish()
