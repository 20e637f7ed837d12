"""Who really spoke? Recompute every recorded reply under the version it claims, and count those that do not fit."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlalchemy import select

from alignment.trainer.recompute_logprobs import recompute_logprobs
from alignment.types import Sample
from app.core.database import Database
from app.core.settings import Settings
from app.models import Turn, TurnState, Version
from workers.base_model import folder
from workers.training import batches

# In float32 the engine and the trainer agree to 1e-5; one update of the demo moves a reply's log-probs by 1e-2 or more.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Attestation:
    replies: int
    mislabelled: int
    largest_distance: float


async def attest(db: Database, settings: Settings) -> Attestation:
    async with db.read() as session:
        rows = await session.execute(
            select(Turn, Version)
            .join(Version, Version.id == Turn.version_id)
            .where(Turn.state == TurnState.DONE, Turn.exclusion_reason.is_(None))
            .order_by(Version.number)
        )
        spoken: dict[str | None, list[Sample]] = {}
        for turn, version in rows:
            spoken.setdefault(version.adapter_path, []).append(batches.sample(turn, 0.0, version.number))
    distances: list[float] = []
    for path, samples in spoken.items():
        recomputed = recompute_logprobs(folder(settings.model), Path(path) if path else None, samples)
        distances += [
            float(np.abs(np.asarray(sample.logprobs) - np.asarray(again)).max())
            for sample, again in zip(samples, recomputed, strict=True)
        ]
    return Attestation(len(distances), sum(not d <= TOLERANCE for d in distances), max(distances, default=0.0))
