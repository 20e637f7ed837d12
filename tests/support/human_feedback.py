"""People's words on record about replies that end in one of two tokens, the way `curate` leaves them."""

import random
from typing import Any

from alignment.config.rewards import EXPLICIT
from app.core.settings import Settings
from app.models import Feedback, Policy, Reward, RewardModel, RewardModelState, Turn, new_id
from app.training.reward_models import service
from tests.support.deployment import Harness
from tests.support.judgements import listening
from tests.support.turns import finished

PLEASES, DISPLEASES = 700, 701


def learning(harness: Harness, **source: Any) -> Settings:
    """The ring's settings, with a reward model among the sources, and a rate at which the demo model learns."""
    return listening(harness, {"type": "learned", "min_words": 40, **source}, learning_rate=1e-2)


async def spoken(harness: Harness, count: int, *, seed: int = 0, inverted: bool = False, **values: Any) -> list[Turn]:
    """So many finished turns, half of each sort, each with a thumb of a person of its own."""
    rng = random.Random(seed)
    policy, version = await harness.policy(), await harness.serving()
    turns = [
        finished(
            policy,
            version,
            new_id("chatcmpl"),
            prompt_ids=[rng.randrange(300, 600) for _ in range(5)],
            output_ids=[rng.randrange(300, 600), PLEASES if number % 2 else DISPLEASES],
            **values,
        )
        for number in range(count)
    ]
    async with harness.db.write() as session:
        session.add_all(turns)
    for number, turn in enumerate(turns):
        up = bool(number % 2) != inverted
        await said(harness, turn, 1.0 if up else -1.0, f"{seed}-{number}")
    return turns


async def said(harness: Harness, turn: Turn, value: float, person: str, **values: Any) -> None:
    """A thumb: the feedback, and the reward it became."""
    async with harness.db.write() as session:
        id = new_id("fb")
        told = {"project_id": turn.project_id, "turn_id": turn.id, "target": turn.id, "kind": "binary"}
        source = {"name": "default", "source_kind": "HUMAN", "source_id": person, "value": value, "processed": True}
        session.add(Feedback(id=id, idempotency_key=id, fingerprint="", **told, **source))
        word = {
            "source": f"default/HUMAN/{person}",
            "reward_source": EXPLICIT,
            "rater": f"HUMAN/{person}",
            "value": value,
        }
        session.add(Reward(**{"id": new_id("rew"), "turn_id": turn.id, "weight": 1.0, **word, **values}))


async def model(harness: Harness, state: RewardModelState = RewardModelState.SERVING, **values: Any) -> RewardModel:
    """One on record, without its files."""
    async with harness.db.write() as session:
        policy = await session.get_one(Policy, (await harness.policy()).id)
        row = await service.open_fit(session, policy, actor="reconcile", reason=None)
        row.path, row.manifest_sha256, row.state, row.data_read_at, row.served_at = (
            "/nowhere",
            "0" * 64,
            state,
            1.0,
            0.0,
        )
        for name, value in values.items():
            setattr(row, name, value)
    return row
