"""Two real processes play one run over HTTP, and one of them is killed in the middle of its attempts."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Iterator

import pytest

from app.core.settings import REPOSITORY
from app.main import create_app
from app.models import Episode, Feedback, RunAttempt, Sample, SampleState, Turn
from tests.support.deployment import Harness
from tests.support.processes import PATIENCE_SECONDS, until
from tests.support.scripted_engine import ScriptedEngine, serve
from workers.curate import curate

ROOMS = "tests.support.environments:Rooms"
LEASE_SECONDS = 4.0
CONCURRENCY = 2
NUM_TASKS, GROUP_SIZE = 4, 2


@pytest.fixture
def service_url(harness: Harness) -> Iterator[str]:
    """Yield the URL of the API, whose leases are short."""
    settings = harness.settings.replace({"workers.lease_seconds": LEASE_SECONDS})
    with serve(create_app(settings), lifespan="on") as url:
        yield url


async def start(harness: Harness, url: str) -> Process:
    """Start `attune environments run`, the same command each time."""
    command = [sys.executable, "-m", "app.cli.main", "environments", "run", ROOMS, "--run", "together", "--json"]
    command += ["--tasks", str(NUM_TASKS), "--group", str(GROUP_SIZE), "--concurrency", str(CONCURRENCY)]
    own = {"PYTHONPATH": str(REPOSITORY), "ATTUNE_URL": url, "ATTUNE_API_KEY": harness.key, "ATTUNE_POLICY": "shop"}
    return await asyncio.create_subprocess_exec(
        *command, cwd=REPOSITORY, env=dict(os.environ, **own), stdout=PIPE, stderr=PIPE
    )


async def test_killed_process_costs_its_attempts_a_repetition(
    harness: Harness, scripted: ScriptedEngine, service_url: str
) -> None:
    scripted.is_blocked = lambda reply: True
    killed = await start(harness, service_url)

    async def is_playing(number: int) -> bool:
        return len(scripted.running) == number

    await until(lambda: is_playing(CONCURRENCY), PATIENCE_SECONDS, "the first process plays")
    of_killed = {row.id for row in await harness.all(Episode)}
    other = await start(harness, service_url)
    await until(lambda: is_playing(2 * CONCURRENCY), PATIENCE_SECONDS, "both processes play")
    killed.kill()
    await killed.wait()
    scripted.is_blocked = lambda reply: False
    output, errors = await other.communicate()
    assert other.returncode == 0, errors.decode()
    summary = json.loads(output)
    num_attempts = NUM_TASKS * GROUP_SIZE
    planned = {"waiting": 0, "under_way": 0, "done": num_attempts, "lost": 0, "cancelled": 0}
    assert summary["is_complete"] and summary["planned"] == planned

    attempts = await harness.all(RunAttempt)
    episodes = {row.id: row for row in await harness.all(Episode)}
    completed = {row.id for row in episodes.values() if row.reported_reason == "completed"}
    assert len(completed) == num_attempts and {row.episode_id for row in attempts} == completed, "one for each attempt"
    assert not completed & of_killed and len(of_killed) == CONCURRENCY
    lost = [row for row in episodes.values() if row.id not in completed]
    assert {row.reported_reason for row in lost} == {"infrastructure"}
    assert {(row.group_id, row.outcome) for row in lost} == {(None, None)}
    groups = Counter(episodes[id].group_id for id in completed)
    assert groups == {f"together/train-{number}": GROUP_SIZE for number in range(NUM_TASKS)}

    await curate(harness.db, harness.settings)
    outcomes = [row.episode_id for row in await harness.all(Feedback) if row.name == "outcome"]
    assert sorted(map(str, outcomes)) == sorted(completed), "each is counted once"
    episode_of = {turn.id: turn.episode_id for turn in await harness.all(Turn)}
    learned = {episode_of[row.turn_id] for row in await harness.all(Sample) if row.state == SampleState.OPEN}
    assert learned == completed
