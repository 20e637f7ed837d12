"""What the ranks of a trainer return: what they wrote and measured, in no words of the database.

`batches` and `reward_model_fits` record it. Nothing here loads torch.
"""

from dataclasses import dataclass
from pathlib import Path

from alignment.types import UpdateReport


@dataclass(frozen=True)
class ComparedProbe:
    """The probe texts' token ids, and each token's log-prob under the new version and under its parent."""

    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    parent_logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class UpdateTimings:
    """Seconds of the phases of one update, without those of the probes."""

    restore: float
    update: float
    export: float


@dataclass(frozen=True)
class TrainedVersion:
    """The version that an update has written, and what the update says of its batch."""

    directory: Path
    manifest_sha256: str
    is_full_weights: bool
    probe: ComparedProbe
    report: UpdateReport
    timings: UpdateTimings


@dataclass(frozen=True)
class FittedRewardModel:
    """The files of a fitted reward model, and its metrics.

    With a `refusal` it must not serve, and its files are there to predict the votes until the next fit.
    """

    directory: Path
    manifest_sha256: str
    metrics: dict[str, float]
    refusal: str | None = None
