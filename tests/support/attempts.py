"""Attempts of a group of episodes, for tests of what compares them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from app.models import Sample, Turn
from tests.support import episodes
from tests.support.deployment import Harness
from workers.curate import curate

GROUP = {"id": "ticket-7", "size": 2}
LIMITS = {"deadline_seconds": 3600}
SOURCES = [{"type": "explicit"}]


def compare(harness: Harness, values: Mapping[str, float] = MappingProxyType({})) -> Harness:
    """Make it a deployment that compares, whose batches are smaller than a group; `values` are further settings."""
    trainer = {"trainer.batch_size": 4, "trainer.max_batch_size": 4, "trainer.max_wait_seconds": 0.0}
    raters = {"raters.max_rater_share": 1.0, "raters.min_raters": 1}
    harness.settings = harness.settings.replace({"algorithm": {"type": "grpo"}, **trainer, **raters, **values})
    return harness


async def attempt(harness: Harness, length: int, outcome: float | None = None, **fields: Any) -> dict[str, Any]:
    """Make an attempt of so many turns; with an outcome it has ended."""
    episode = await episodes.create(harness, **{"group": GROUP, "limits": LIMITS, **fields})
    parent: Turn | None = None
    for step in range(1, length + 1):
        goes_on: dict[str, Any] = {"parent_id": parent.id, "prefix_reuse": "exact"} if parent is not None else {}
        place: dict[str, Any] = {"episode_id": episode["id"], "episode_step": step, "conversation_id": episode["id"]}
        parent = await harness.turn(num_prompt_tokens=3, **place, **goes_on)
    if outcome is not None:
        await episodes.end(harness, episode["id"], outcome=outcome)
    return episode


async def read_samples(harness: Harness) -> dict[str, list[Sample]]:
    """Curate, and return the samples of each episode in the order of their steps."""
    await curate(harness.db, harness.settings)
    turns = sorted(await harness.all(Turn), key=lambda turn: turn.episode_step or 0)
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    found: dict[str, list[Sample]] = {}
    for turn in turns:
        if turn.id in samples:
            found.setdefault(turn.episode_id or "", []).append(samples[turn.id])
    return found
