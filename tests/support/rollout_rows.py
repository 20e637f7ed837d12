"""Short ways to have siblings cast, prompt sets imported, and rollouts asked for."""

from typing import Any

from sqlalchemy import select, update

from alignment.config.rollouts import RolloutsConfig
from app.core.settings import Settings
from app.models import Dataset, DatasetKind, DatasetRow, Origin, PlanState, Rollout, RolloutPlan, Turn, new_id
from tests.support.deployment import Ring
from tests.support.judgements import listening
from workers.feedback.curate import curate
from workers.rollouts.sample import roll_out

HI = [{"role": "user", "content": "hi"}]


def shadowing(ring: Ring, url: str, siblings: int = 3, **fields: Any) -> Settings:
    """The ring's settings, with siblings and a service that judges them."""
    shadows = {"siblings": siblings, **fields.pop("shadows", {})}
    rollouts = RolloutsConfig.model_validate({"shadows": shadows, **fields})
    return listening(ring, {"type": "http", "url": url}, rollouts=rollouts)


async def chat(ring: Ring, **fields: Any) -> Turn:
    """A chat through the API, on record."""
    answer = await ring.api.post("/v1/chat/completions", json={"model": "shop", "messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    return await ring.get(Turn, answer.json()["id"])


async def cast(ring: Ring, settings: Settings) -> list[Turn]:
    """The siblings of all chats that have ended, not asked for yet."""
    await curate(ring.db, settings)
    return await shadows(ring)


async def rolled(ring: Ring, settings: Settings, owner: str = "me") -> list[Rollout]:
    await curate(ring.db, settings)
    await roll_out(ring.db, settings, owner)
    return await rollouts(ring)


async def shadows(ring: Ring) -> list[Turn]:
    return [turn for turn in await turns(ring) if turn.origin == Origin.SHADOW]


async def turns(ring: Ring) -> list[Turn]:
    async with ring.db.read() as session:
        return list(await session.scalars(select(Turn).order_by(Turn.completion_id, Turn.choice_index)))


async def rollouts(ring: Ring) -> list[Rollout]:
    async with ring.db.read() as session:
        return list(await session.scalars(select(Rollout).order_by(Rollout.number, Rollout.choice_index)))


async def due(ring: Ring) -> None:
    """The pauses are over, and so are the leases of the dead."""
    async with ring.db.write() as session:
        await session.execute(update(Rollout).values(due_at=0.0, lease_until=None))


async def prompts(ring: Ring, *rows: tuple[str, str | None]) -> Dataset:
    """A dataset of questions and references."""
    policy = await ring.policy()
    async with ring.db.write() as session:
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
            session.add(DatasetRow(dataset_id=dataset.id, number=number, content=content))
    return dataset


async def plan(ring: Ring, **fields: Any) -> dict[str, Any]:
    body = {"dataset": "sums", "verifier": {"type": "number"}, "n": 2, **fields}
    answer = await ring.api.post("/v1/policies/shop/rollouts/plans", json=body)
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def planned(ring: Ring) -> RolloutPlan:
    [row] = await ring.all(RolloutPlan)
    assert isinstance(row, RolloutPlan) and row.state in tuple(PlanState)
    return row
