"""Recompute the log-probs of every recorded reply with the version it names, and count the replies that differ."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlalchemy import select

from alignment.trainer.scoring import recompute_logprobs
from alignment.types import Sample
from app.chat.histories import read_prompt_ids
from app.core.database import Database
from app.core.settings import Settings
from app.models import Turn, TurnState, Version
from workers.base_model import model_dir
from workers.training import recorded_samples

# In float32 the engine and the trainer agree to 1e-5; an update of the demo changes log-probs by 1e-2 or more.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class LogprobReport:
    """`mislabelled`: replies whose log-probs differ by more than TOLERANCE from those of the version they name."""

    replies: int
    mislabelled: int
    largest_distance: float


async def check_logprobs(db: Database, settings: Settings) -> LogprobReport:
    async with db.read() as session:
        rows = await session.execute(
            select(Turn, Version)
            .join(Version, Version.id == Turn.version_id)
            .where(Turn.state == TurnState.DONE, Turn.exclusion_reason.is_(None))
            .order_by(Version.number, Turn.created_at, Turn.id)
        )
        samples_by_adapter: dict[str | None, list[Sample]] = {}
        turns = [(turn, version) for turn, version in rows]
        prompt_ids = await read_prompt_ids(session, [turn.id for turn, _ in turns])
        for turn, version in turns:
            sample = recorded_samples.to_sample(turn, prompt_ids[turn.id], 0.0, version.number)
            samples_by_adapter.setdefault(version.adapter_path, []).append(sample)
    distances: list[float] = []
    for path, samples in samples_by_adapter.items():
        recomputed = recompute_logprobs(model_dir(settings.model), Path(path) if path else None, samples)
        distances += [
            float(np.abs(np.asarray(sample.logprobs) - np.asarray(logprobs)).max())
            for sample, logprobs in zip(samples, recomputed, strict=True)
        ]
    return LogprobReport(len(distances), sum(not d <= TOLERANCE for d in distances), max(distances, default=0.0))
