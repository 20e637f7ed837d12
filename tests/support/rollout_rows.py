"""Short ways to create group samples and prompt sets, and to run the rollout stage."""

from typing import Any

from sqlalchemy import select, update

from alignment.config.rollouts import RolloutsConfig
from app.core.settings import Settings
from app.inference.keys import load_engine_keys
from app.inference.pool import EnginePool
from app.models import Dataset, DatasetKind, DatasetRow, Engine, Origin, PlanState, Rollout, RolloutPlan, Turn, new_id
from tests.support.deployment import Harness
from tests.support.judgements import settings_with_sources
from workers.curate import curate
from workers.rollouts.sampler import RolloutJob, sample_rollouts

HI = [{"role": "user", "content": "hi"}]


def with_group_sampling(harness: Harness, url: str, extra_replies: int = 3, **fields: Any) -> Settings:
    """Return the harness's settings with group sampling and a reward service at `url`."""
    group_samples = {"extra_replies": extra_replies, **fields.pop("group_sampling", {})}
    rollouts = RolloutsConfig.model_validate({"group_sampling": group_samples, **fields})
    return settings_with_sources(harness, {"type": "http", "url": url}, rollouts=rollouts)


def reward_by_id(body: dict[str, Any]) -> dict[str, float]:
    """Return a different reward for each reply, even if two have the same text."""
    return {"reward": int(body["turn"]["id"][-4:], 16) / 0xFFFF}


async def chat(harness: Harness, **fields: Any) -> Turn:
    """Send a chat request through the API, and return its turn."""
    answer = await harness.api.post("/v1/chat/completions", json={"model": "shop", "messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    return await harness.get(Turn, answer.json()["id"])


async def plan_group_samples(harness: Harness, settings: Settings) -> list[Turn]:
    """Run the curate stage, and return the group samples, none of them sampled yet."""
    await curate(harness.db, settings)
    return await read_group_samples(harness)


async def run_rollouts(harness: Harness, settings: Settings, owner: str = "me") -> list[Rollout]:
    """Run the curate and rollout stages once, and return all rollouts."""
    await curate(harness.db, settings)
    await sample_rollouts(harness.db, settings, owner)
    return await read_rollouts(harness)


async def run_rollout_job(harness: Harness, settings: Settings, rollout: Rollout, engine: Engine) -> int:
    """Run one attempt at a claimed rollout. Returns the number of rollouts that reached a final state."""
    pool = EnginePool(load_engine_keys(settings))
    try:
        return await RolloutJob(harness.db, settings, pool, rollout, engine).run()
    finally:
        await pool.close()


async def read_group_samples(harness: Harness) -> list[Turn]:
    return [turn for turn in await read_turns(harness) if turn.origin == Origin.GROUP_SAMPLE]


async def read_turns(harness: Harness) -> list[Turn]:
    async with harness.db.read() as session:
        return list(await session.scalars(select(Turn).order_by(Turn.completion_id, Turn.choice_index)))


async def read_rollouts(harness: Harness) -> list[Rollout]:
    async with harness.db.read() as session:
        return list(
            await session.scalars(select(Rollout).order_by(Rollout.row_number, Rollout.choice_index, Rollout.id))
        )


async def make_rollouts_due(harness: Harness) -> None:
    """End all back-offs and leases."""
    async with harness.db.write() as session:
        await session.execute(update(Rollout).values(due_at=0.0, lease_until=None))


async def create_prompt_set(harness: Harness, *rows: tuple[str, str | None], name: str = "sums") -> Dataset:
    """Create a dataset of questions and references."""
    policy = await harness.policy()
    async with harness.db.write() as session:
        dataset = Dataset(
            id=new_id("ds"),
            project_id=policy.project_id,
            name=name,
            kind=DatasetKind.PROMPTS,
            num_rows=len(rows),
            sha256=new_id("x"),
        )
        session.add(dataset)
        await session.flush()
        for number, (question, reference) in enumerate(rows):
            content: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
            content |= {"reference": reference} if reference is not None else {}
            session.add(DatasetRow(dataset_id=dataset.id, row_number=number, content=content))
    return dataset


async def create_plan(harness: Harness, **fields: Any) -> dict[str, Any]:
    body = {"dataset": "sums", "verifier": {"type": "number"}, "n": 2, **fields}
    answer = await harness.api.post("/v1/policies/shop/rollouts/plans", json=body)
    assert answer.status_code == 201, answer.text
    plan: dict[str, Any] = answer.json()
    return plan


async def read_plan(harness: Harness) -> RolloutPlan:
    [row] = await harness.all(RolloutPlan)
    assert isinstance(row, RolloutPlan) and row.state in tuple(PlanState)
    return row
