"""Create human feedback and rewards, as `curate` stores them, for replies that end in one of two tokens."""

import random
from typing import Any

from alignment.config.rewards import EXPLICIT
from app.core.settings import Settings
from app.models import Feedback, Reward, RewardModel, RewardModelState, Turn, new_id
from app.policies.locks import lock_policy
from app.training import reward_models
from tests.support.deployment import Harness
from tests.support.judgements import settings_with_sources
from tests.support.turns import make_turn

PREFERRED_TOKEN, REJECTED_TOKEN = 700, 701


def settings_with_reward_model(harness: Harness, **source: Any) -> Settings:
    """Return the harness's settings with a reward model as a source, and a learning rate for the demo model."""
    return settings_with_sources(harness, {"type": "learned", "min_feedback": 40, **source}, trainer__optim__lr=1e-2)


async def create_rated_turns(
    harness: Harness, count: int, *, seed: int = 0, inverted: bool = False, **values: Any
) -> list[Turn]:
    """Create finished turns, half of them approved, each rated by a different person. `inverted` swaps the ratings."""
    rng = random.Random(seed)
    policy, version = await harness.policy(), await harness.serving()
    turns = [
        make_turn(
            policy,
            version,
            new_id("chatcmpl"),
            own_prompt_ids=[rng.randrange(300, 600) for _ in range(5)],
            output_ids=[rng.randrange(300, 600), PREFERRED_TOKEN if number % 2 else REJECTED_TOKEN],
            **values,
        )
        for number in range(count)
    ]
    async with harness.db.write() as session:
        session.add_all(turns)
    for number, turn in enumerate(turns):
        is_up = bool(number % 2) != inverted
        await add_rating(harness, turn, 1.0 if is_up else -1.0, f"{seed}-{number}")
    return turns


async def add_rating(harness: Harness, turn: Turn, value: float, person: str, **values: Any) -> None:
    """Store a rating: the feedback and its reward."""
    async with harness.db.write() as session:
        id = new_id("fb")
        target = {"project_id": turn.project_id, "turn_id": turn.id, "target": turn.id, "kind": "binary"}
        source = {"name": "default", "source_kind": "HUMAN", "source_id": person, "value": value, "processed": True}
        session.add(Feedback(id=id, idempotency_key=id, fingerprint="", **target, **source))
        reward = {
            "source": f"default/HUMAN/{person}",
            "reward_source": EXPLICIT,
            "rater": f"HUMAN/{person}",
            "value": value,
        }
        session.add(Reward(**{"id": new_id("rew"), "turn_id": turn.id, "weight": 1.0, **reward, **values}))


async def create_reward_model(
    harness: Harness, state: RewardModelState = RewardModelState.SERVING, **values: Any
) -> RewardModel:
    """Create a reward model row without its files."""
    async with harness.db.write() as session:
        locked = await lock_policy(session, (await harness.policy()).id)
        row = await reward_models.create_fit(locked, actor="reconcile", reason=None)
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
