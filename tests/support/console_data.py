"""A deployment with a history, for the console: conversations, votes, a rejected version, a canary."""

import random
from typing import Any

from sqlalchemy import update

from app.core.database import now
from app.deployments import service
from app.models import Engine, Version, VersionState
from app.policies.locks import lock_policy
from tests.support.deployment import Harness
from tests.support.trained_versions import publish
from tests.support.updates import BY_TEST, reject
from workers.curate import curate

TALKS = (
    (
        ("When are you open?", "We are open from nine to six, Monday to Saturday."),
        ("And on Sunday?", "Closed on Sundays."),
    ),
    (("What does an inspection cost?", "An inspection costs 49 euros and takes about an hour."),),
    (("My chain slips in the high gears.", "It is probably worn. Bring the bike in; measuring it is free."),),
    (
        ("Do you repair e-bikes?", "Yes, all makes but two. Which one do you have?"),
        ("A Gazelle.", "That one we repair."),
    ),
    (("Can I get my bike today?", "If you bring it before ten, by six this evening."),),
)
NUM_VERSIONS = 8
METRICS = {"guard/kl": 0.012, "actor/step_scale": 0.8, "actor/lr_scale": 1.1, "reference_kl": 0.05}


async def add_history(harness: Harness, *, talks_by_version: int = 6, seed: int = 0) -> None:
    """Create versions of which newer ones are approved more. The last but one is rejected; the last is the canary."""
    rng = random.Random(seed)
    await _add_talks(harness, await harness.serving(), talks_by_version, 0.4, rng)
    for number in range(1, NUM_VERSIONS - 1):
        version = await publish(harness)
        await _set_metrics(harness, version, number)
        await _add_talks(harness, version, talks_by_version, 0.4 + 0.08 * number, rng)
    rejected = await harness.version(VersionState.TRAINED)
    await reject(harness, rejected, "its KL from the parent version is 0.09 per token (k3); the limit is 0.05")
    await _set_metrics(harness, rejected, 40)
    await start_canary(harness)
    await curate(harness.db, harness.settings)


async def start_canary(harness: Harness) -> Version:
    """Create a version that serves a quarter of the conversations."""
    async with harness.db.write() as session:
        locked = await lock_policy(session, (await harness.policy()).id)
        policy = locked.policy
        numbers = [row.number for row in await harness.all(Version)]
        version = Version(
            id=f"ver-canary-{max(numbers) + 1}",
            policy_id=policy.id,
            number=max(numbers) + 1,
            parent_id=policy.head_version_id,
            state=VersionState.VERIFIED,
            adapter_name=f"shop-v{max(numbers) + 1}",
            adapter_path="/nowhere",
            manifest_sha256="0" * 64,
            metrics=METRICS,
        )
        session.add(version)
        engine = await session.get_one(Engine, "engine-0")
        engine.loaded = [*engine.loaded, version.adapter_name or ""]
        engine.heartbeat_at = now()
        await session.flush()
        policy.head_version_id = version.id
        await service.start_canary(locked, version, 0.25, BY_TEST, watched=True)
    return version


async def _set_metrics(harness: Harness, version: Version, number: int) -> None:
    metrics = METRICS | {"guard/kl": 0.011 + 0.001 * number, "reference_kl": 0.02 * number}
    async with harness.db.write() as session:
        await session.execute(update(Version).where(Version.id == version.id).values(metrics=metrics))


async def _add_talks(harness: Harness, version: Version, count: int, approved: float, rng: random.Random) -> None:
    """Create conversations, and a vote on each reply but the first of every third one."""
    items: list[dict[str, Any]] = []
    for number in range(count):
        talk, user = rng.choice(TALKS), f"user-{rng.randrange(40)}"
        messages: list[dict[str, Any]] = []
        parent = None
        for question, reply in talk:
            messages = [*messages, {"role": "user", "content": question}]
            turn = await harness.turn(
                version,
                conversation_id=f"talk-v{version.number}-{number}",
                parent_id=parent,
                own_messages=messages,
                reply={"role": "assistant", "content": reply},
                end_user=user,
                num_prompt_tokens=9 * len(messages),
                num_output_tokens=len(reply.split()),
            )
            messages, parent = [*messages, {"role": "assistant", "content": reply}], turn.id
            if number % 3:
                value = "up" if rng.random() < approved else "down"
                vote = {"completion_id": turn.id, "kind": "binary", "value": value, "source": {"id": user}}
                items.append(vote)
    answer = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert answer.status_code == 200, answer.text
