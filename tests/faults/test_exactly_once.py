"""Ten concurrent sends of the same feedback, over two API processes: one row, one 201, and one answer for all."""

import asyncio
import os
import random
from collections.abc import Iterator

import orjson
import pytest
from sqlalchemy import func, select

from app.models import Feedback
from tests.benchmarks.http_client import ConnectionPool, HttpResponse, post
from tests.support.deployment import Harness
from tests.support.processes import processes

FULL = os.environ.get("ATTUNE_FULL") == "1"
ITEMS = 10_000 if FULL else 200
SENDS = 10
CONCURRENCY = 8  # concurrent items, so 80 concurrent requests
pytestmark = [pytest.mark.timeout(3600 if FULL else 600)]


@pytest.fixture
def two_apis(harness: Harness) -> Iterator[tuple[str, str]]:
    """Two API processes on one database, so that only the database can resolve a race between them."""
    settings = harness.settings.replace({"limits.requests_per_minute": 10**9, "limits.max_concurrency": 10**6})
    with processes(settings) as one, processes(settings) as other:
        one.start("api")
        other.start("api")
        yield one.settings.local_url, other.settings.local_url


async def test_ten_concurrent_sends_of_one_feedback_are_one_row(harness: Harness, two_apis: tuple[str, str]) -> None:
    turns = [(await harness.turn()).id for _ in range(20)]
    semaphore = asyncio.Semaphore(CONCURRENCY)
    async with ConnectionPool(two_apis[0]) as one, ConnectionPool(two_apis[1]) as other:

        async def send(number: int) -> None:
            async with semaphore:
                check_answers(await send_ten_times(harness, [one, other], turns[number % len(turns)], number))

        async with asyncio.TaskGroup() as group:
            for number in range(ITEMS):
                group.create_task(send(number))

    async with harness.db.read() as session:
        rows = await session.scalar(select(func.count()).select_from(Feedback))
        keys = await session.scalar(select(func.count(Feedback.idempotency_key.distinct())))
    assert (rows, keys) == (ITEMS, ITEMS)
    print(f"\n{ITEMS} items x {SENDS} sends over two processes on {harness.db.engine.dialect.name}: {rows} rows")


async def send_ten_times(harness: Harness, apis: list[ConnectionPool], turn: str, number: int) -> list[HttpResponse]:
    vote = {"kind": "binary", "value": number % 2 == 0, "source": f"user-{number}"}
    body = {"id": f"item-{number}", "completion_id": turn, **vote}
    headers = {"authorization": f"Bearer {harness.key}"}
    targets = [apis[at % 2] for at in range(SENDS)]
    random.shuffle(targets)
    return await asyncio.gather(*(api.request(post(api.url, "/v1/feedback", body, headers)) for api in targets))


def check_answers(answers: list[HttpResponse]) -> None:
    statuses = sorted(answer.status for answer in answers)
    assert statuses == [200] * (SENDS - 1) + [201], (statuses, [answer.body[:200] for answer in answers])
    [first] = [orjson.loads(answer.body) for answer in answers if answer.status == 201]
    replay = first | {"effective": True, "withdrawn": False}
    for answer in answers:
        assert orjson.loads(answer.body) == (first if answer.status == 201 else replay), "one answer for all"
    replayed = [answer.header("idempotent-replayed") for answer in answers if answer.status == 200]
    assert replayed == ["true"] * (SENDS - 1)
