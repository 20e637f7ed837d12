"""What trackers need beside the base install, told before anything starts."""

from collections.abc import Sequence
from importlib.util import find_spec

from app.core.settings import TrackerName

PACKAGES: tuple[TrackerName, ...] = ("tensorboard", "wandb")  # called like the trackers


def require(trackers: Sequence[TrackerName]) -> None:
    """Raises ValueError, which says what to install."""
    for tracker in trackers:
        if tracker in PACKAGES and find_spec(tracker) is None:
            raise ValueError(
                f"ATTUNE_TRACKERS names {tracker}, which is not installed here: pip install 'attune[track]'"
            )
