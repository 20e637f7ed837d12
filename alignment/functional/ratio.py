"""Ratios of two policies' probabilities, kept where floats can hold them."""

from torch import Tensor

LOG_RATIO_BOUND = 20.0  # e^20 is far beyond any cap, and still a finite float32


def bounded(log_ratio: Tensor) -> Tensor:
    """clamp(log π − log π', ±20), any shape.  The guard of verl `compute_policy_loss_vanilla`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
