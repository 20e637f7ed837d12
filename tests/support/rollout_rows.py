"""Short ways to have group samples cast, prompt sets imported, and rollouts asked for."""

from typing import Any

from sqlalchemy import select, update

from alignment.config.rollouts import RolloutsConfig
from app.core.settings import Settings
from app.models import Dataset, DatasetKind, DatasetRow, Origin, PlanState, Rollout, RolloutPlan, Turn, new_id
from tests.support.deployment import Harness
from tests.support.judgements import listening
from workers.feedback.curate import curate
from workers.rollouts.sample import roll_out

HI = [{"role": "user", "content": "hi"}]


def with_group_sampling(harness: Harness, url: str, extra_replies: int = 3, **fields: Any) -> Settings:
    """The ring's settings, with group samples and a service that judges them."""
    group_samples = {"extra_replies": extra_replies, **fields.pop("group_sampling", {})}
    rollouts = RolloutsConfig.model_validate({"group_sampling": group_samples, **fields})
    return listening(harness, {"type": "http", "url": url}, rollouts=rollouts)


async def chat(harness: Harness, **fields: Any) -> Turn:
    """A chat through the API, on record."""
    answer = await harness.api.post("/v1/chat/completions", json={"model": "shop", "messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    return await harness.get(Turn, answer.json()["id"])


async def cast(harness: Harness, settings: Settings) -> list[Turn]:
    """The group samples of all chats that have ended, not asked for yet."""
    await curate(harness.db, settings)
    return await group_samples(harness)


async def rolled(harness: Harness, settings: Settings, owner: str = "me") -> list[Rollout]:
    await curate(harness.db, settings)
    await roll_out(harness.db, settings, owner)
    return await rollouts(harness)


async def group_samples(harness: Harness) -> list[Turn]:
    return [turn for turn in await turns(harness) if turn.origin == Origin.GROUP_SAMPLE]


async def turns(harness: Harness) -> list[Turn]:
    async with harness.db.read() as session:
        return list(await session.scalars(select(Turn).order_by(Turn.completion_id, Turn.choice_index)))


async def rollouts(harness: Harness) -> list[Rollout]:
    async with harness.db.read() as session:
        return list(await session.scalars(select(Rollout).order_by(Rollout.row_number, Rollout.choice_index)))


async def due(harness: Harness) -> None:
    """The pauses are over, and so are the leases of the dead."""
    async with harness.db.write() as session:
        await session.execute(update(Rollout).values(due_at=0.0, lease_until=None))


async def prompts(harness: Harness, *rows: tuple[str, str | None]) -> Dataset:
    """A dataset of questions and references."""
    policy = await harness.policy()
    async with harness.db.write() as session:
        dataset = Dataset(
            id=new_id("ds"),
            project_id=policy.project_id,
            name="sums",
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


async def plan(harness: Harness, **fields: Any) -> dict[str, Any]:
    body = {"dataset": "sums", "verifier": {"type": "number"}, "n": 2, **fields}
    answer = await harness.api.post("/v1/policies/shop/rollouts/plans", json=body)
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def planned(harness: Harness) -> RolloutPlan:
    [row] = await harness.all(RolloutPlan)
    assert isinstance(row, RolloutPlan) and row.state in tuple(PlanState)
    return row
