"""Planned runs for tests: created, claimed and reported over the API."""

from typing import Any

import httpx2
from sqlalchemy import update

from app.core.database import now
from app.models import RunAttempt
from tests.support.deployment import Harness

RUNS = "/v1/environments/runs"
PLAN: dict[str, Any] = {"name": "monday", "policy": "shop", "num_tasks": 1}


async def post(harness: Harness, path: str, **body: Any) -> httpx2.Response:
    return await harness.api.post(f"{RUNS}/monday/{path}", json=body)


async def join(harness: Harness, **fields: Any) -> httpx2.Response:
    return await harness.api.post(RUNS, json={**PLAN, **fields})


async def read(harness: Harness) -> dict[str, Any]:
    body: dict[str, Any] = (await harness.api.get(f"{RUNS}/monday")).json()
    return body


async def claim(harness: Harness, owner: str = "one", **fields: Any) -> dict[str, Any]:
    """Return the attempt that is claimed. There must be one."""
    answer = (await post(harness, "claim", owner=owner, **fields)).json()
    assert answer["attempt"] is not None, answer
    attempt: dict[str, Any] = answer["attempt"]
    return attempt


async def act(harness: Harness, attempt: dict[str, Any], verb: str, **body: Any) -> httpx2.Response:
    return await post(harness, f"attempts/{attempt['id']}/{verb}", fence=attempt["fence"], **body)


async def start(harness: Harness, attempt: dict[str, Any], **body: Any) -> dict[str, Any]:
    """Return the episode of a claimed attempt."""
    answer = await act(harness, attempt, "start", **{"task": f"task-{attempt['task_index']}", **body})
    assert answer.status_code in (200, 201), answer.text
    episode: dict[str, Any] = answer.json()
    return episode


async def finish(harness: Harness, attempt: dict[str, Any], **body: Any) -> dict[str, Any]:
    answer = await act(harness, attempt, "finish", **body)
    assert answer.status_code == 200, answer.text
    view: dict[str, Any] = answer.json()
    return view


async def expire(harness: Harness, attempt: dict[str, Any], seconds_ago: float = 3600.0) -> None:
    """Let the lease of an attempt have run out."""
    async with harness.db.write() as session:
        expiry = update(RunAttempt).where(RunAttempt.id == attempt["id"]).values(lease_until=now() - seconds_ago)
        await session.execute(expiry)
