"""Planned attempts with the real API and a scripted engine: groups, ends by reason, repetition, interruption."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import ClassVar
from unittest.mock import AsyncMock, patch

import pytest
from sqlalchemy import create_engine, select, update

from alignment.environments import environment_run
from alignment.environments.environment_run import EnvironmentRun
from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.errors import InfrastructureFailure, ServiceRefusal
from alignment.environments.protocols import Agent, Environment, Limits, Outcome, StepReward, Task
from alignment.environments.run_client import RunClient
from alignment.environments.run_summary import RunSummary
from alignment.environments.service_http import ServiceHttp
from alignment.environments.worlds import InteractionWorld, StepsWorld
from app.core.database_url import blocking_url
from app.main import create_app
from app.models import EndReason, Episode, EpisodeState, Feedback, RunAttempt, Turn
from tests.support.deployment import Harness
from tests.support.environments import PLAN, Endless, Faulty, Rooms, open_run
from tests.support.scripted_engine import ScriptedEngine, serve

pytestmark = pytest.mark.usefixtures("scripted")


def lost(summary: RunSummary) -> int:
    assert summary.planned is not None
    return summary.planned.lost


def rooms() -> LoopEnvironment:
    return LoopEnvironment(lambda: StepsWorld(Rooms()))


async def test_attempts_at_a_task_are_a_group(harness: Harness, live_url: str) -> None:
    plan = replace(PLAN, num_tasks=2, group_size=3, split="test", seed=7, metadata={"environment": "rooms"})
    async with open_run(rooms(), live_url, harness.key, plan) as run:
        summary = await run.run()
    rows = await harness.all(Episode)
    assert sorted((row.task, row.group_id, row.group_size) for row in rows) == [
        *[("test-0", "run-1/test-0", 3)] * 3,
        *[("test-1", "run-1/test-1", 3)] * 3,
    ]
    assert {row.sampling for row in rows} == {"policy"}
    expected = {"environment": "rooms", "run": "run-1", "split": "test", "seed": "7"}
    assert all(row.request_metadata == expected for row in rows)
    assert summary.ends == {"completed": 6} and summary.is_complete and lost(summary) == 0
    assert (summary.mean_reward, summary.mean_turns, summary.num_turns) == (0.75, 3, 18)
    assert summary.metrics == {"rooms": 3.0}


async def test_single_attempts_have_no_group(harness: Harness, live_url: str) -> None:
    async with open_run(rooms(), live_url, harness.key) as run:
        await run.run()
    [episode] = await harness.all(Episode)
    assert (episode.group_id, episode.task, episode.end_reason, episode.outcome) == (None, "train-0", "completed", 0.5)


async def test_rewards_of_steps_are_feedback_on_their_replies(harness: Harness, live_url: str) -> None:
    async with open_run(rooms(), live_url, harness.key) as run:
        await run.run()
    turns = sorted(await harness.all(Turn), key=lambda turn: turn.episode_step)
    steps = [row for row in await harness.all(Feedback) if row.name == "step"]
    assert [(row.turn_id, row.value, row.source_kind, row.source_id) for row in steps] == [
        (turns[0].id, 0.25, "CODE", "environment")
    ]
    assert [turn.state_key for turn in turns] == ["room 0", "room 1", "room 2"]


@pytest.mark.parametrize("fault", ["raise", "host", "sandbox"])
async def test_lost_attempt_is_repeated_once(harness: Harness, live_url: str, fault: str) -> None:
    async with open_run(Faulty([fault]), live_url, harness.key, replace(PLAN, group_size=2, concurrency=1)) as run:
        summary = await run.run()
    rows = await harness.all(Episode)
    assert [row.end_reason for row in rows] == ["infrastructure", "completed", "completed"]
    assert [row.outcome for row in rows] == [None, 1.0, 1.0]
    assert [row.group_id for row in rows] == [None, "run-1/train-0", "run-1/train-0"], "it leaves its place"
    assert summary.ends == {"infrastructure": 1, "completed": 2}
    assert lost(summary) == 0 and summary.mean_reward == 1.0 and len(summary.errors) == 1


async def test_attempt_that_is_lost_twice_is_given_up(harness: Harness, live_url: str) -> None:
    plan = replace(PLAN, num_tasks=2, concurrency=1)
    async with open_run(Faulty(["raise", "raise"]), live_url, harness.key, plan) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2, "completed": 1} and lost(summary) == 1
    [(message, number)] = summary.errors.items()
    assert number == 2 and re.fullmatch(r"KeyError: 'board' \(environments\.py:\d+ in run\)", message)


async def test_agent_that_gives_up_has_failed(harness: Harness, live_url: str) -> None:
    async with open_run(Faulty(["agent"]), live_url, harness.key) as run:
        summary = await run.run()
    [episode] = await harness.all(Episode)
    assert episode.end_reason == "failed" and summary.ends == {"failed": 1}
    [outcome] = await harness.all(Feedback)
    assert outcome.value == -1.0, "the value of a failure without an outcome"


@pytest.mark.parametrize(
    ("limits", "reason", "num_turns"),
    [
        (Limits(max_turns=2), "max_turns", 2),
        (Limits(max_tokens=9), "max_tokens", 2),
        (Limits(deadline_seconds=0.001), "deadline", 0),
    ],
    ids=["turns", "tokens", "deadline"],
)
async def test_limit_ends_an_attempt_that_is_graded_all_the_same(
    harness: Harness, live_url: str, limits: Limits, reason: str, num_turns: int
) -> None:
    environment = LoopEnvironment(lambda: InteractionWorld(Endless()))
    async with open_run(environment, live_url, harness.key, replace(PLAN, limits=limits)) as run:
        summary = await run.run()
    [episode] = await harness.all(Episode)
    assert (episode.end_reason, episode.outcome, summary.num_turns) == (reason, 0.75, num_turns)
    assert summary.ends == {reason: 1}


async def test_limit_that_the_environment_does_not_know(harness: Harness, live_url: str) -> None:
    """Its second chat is refused, and it raises what its client raises. The attempt is not left out of its group."""

    class Chats(Faulty):
        async def run(self, task: Task, agent: Agent) -> Outcome:
            await super().run(task, agent)
            return await super().run(task, agent)

    async with open_run(Chats([]), live_url, harness.key, replace(PLAN, limits=Limits(max_turns=1))) as run:
        summary = await run.run()
    [episode] = await harness.all(Episode)
    assert episode.end_reason == "max_turns"
    assert [row.value for row in await harness.all(Feedback)] == [-1.0], "it pays what a failure does"
    assert summary.ends == {"max_turns": 1} and list(summary.errors.values()) == [1]


@pytest.mark.parametrize(
    "error",
    [InfrastructureFailure("the process has died"), KeyError("board"), IndexError("row 4096 of 1409"), None],
    ids=repr,
)
async def test_failure_after_the_deadline_is_no_outcome(
    harness: Harness, live_url: str, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """The service has ended the episode by then, but not a chat of the agent has been refused: the host has failed, or
    the environment hangs."""
    monkeypatch.setattr(environment_run, "HANG_SECONDS", 0.0)

    class Late(Faulty):
        async def run(self, task: Task, agent: Agent) -> Outcome:
            await super().run(task, agent)
            async with harness.db.write() as session:
                ended = {"state": EpisodeState.ENDED, "end_reason": EndReason.DEADLINE, "ended_at": time.time()}
                await session.execute(update(Episode).where(Episode.id == agent.episode_id).values(ended))
            if error is not None:
                raise error
            await asyncio.Event().wait()
            raise AssertionError("never")

    plan = PLAN if error is not None else replace(PLAN, limits=Limits(deadline_seconds=2.0))
    async with open_run(Late([]), live_url, harness.key, plan) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2} and await harness.all(Feedback) == []


@pytest.mark.parametrize("outcome", [Outcome(1.5), Outcome(float("nan")), Outcome(0.0, [StepReward("nobody", 0.5)])])
async def test_rewards_that_the_service_does_not_take_are_the_environments_mistake(
    harness: Harness, live_url: str, outcome: Outcome
) -> None:
    async with open_run(Faulty([], outcome), live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2} and lost(summary) == 1
    [message] = summary.errors
    assert "reward" in message


async def test_rewards_of_an_environment_with_its_own_loop(harness: Harness, live_url: str) -> None:
    async with open_run(Faulty(["step"], Outcome(0.5)), live_url, harness.key) as run:
        summary = await run.run()
    assert summary.mean_reward == 0.75
    assert [row.value for row in await harness.all(Feedback)] == [0.25, 0.5]


async def test_rewards_of_other_replies_are_refused(harness: Harness, live_url: str) -> None:
    """An environment of others could reward whatever it has heard the id of."""
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
    other = (await harness.api.post("/v1/chat/completions", json=body)).json()["id"]
    async with open_run(Faulty([], Outcome(0.5, [StepReward(other, 1.0)])), live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2} and await harness.all(Feedback) == []


async def test_same_run_again_plays_nothing_twice(harness: Harness, live_url: str) -> None:
    plan = replace(PLAN, num_tasks=2, group_size=2, concurrency=1)
    async with open_run(Faulty(["raise"]), live_url, harness.key, plan) as run:
        first = await run.run()
    environment = Faulty([])
    async with open_run(environment, live_url, harness.key, replace(plan, num_tasks=3)) as run:
        second = await run.run()
    assert environment.num_attempts == 2, "those of the third task"
    assert (first.num_attempts, second.num_attempts) == (5, 2)
    assert first.planned is not None and second.planned is not None
    assert (first.planned.done, second.planned.done, second.mean_outcome) == (4, 6, 1.0)
    assert len(await harness.all(Episode)) == 7


class Blocked(Environment):
    """It chats once and then waits without end."""

    def __init__(self) -> None:
        self._faulty = Faulty([])
        self.is_waiting = asyncio.Event()

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return self._faulty.tasks(split, seed)

    async def run(self, task: Task, agent: Agent) -> Outcome:
        await self._faulty.run(task, agent)
        self.is_waiting.set()
        await asyncio.Event().wait()
        raise AssertionError("never")


async def interrupt(environment: Blocked, run: EnvironmentRun) -> None:
    running = asyncio.create_task(run.run())
    await environment.is_waiting.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_interrupted_attempt_is_abandoned_and_repeated_by_the_next_run(harness: Harness, live_url: str) -> None:
    environment = Blocked()
    async with open_run(environment, live_url, harness.key) as run:
        await interrupt(environment, run)
        assert not run.summary().is_complete
    [episode] = await harness.all(Episode)
    assert (episode.end_reason, episode.outcome) == ("abandoned", None)
    async with open_run(Faulty([]), live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"completed": 1} and summary.is_complete


async def test_interruptions_cost_no_try(harness: Harness, live_url: str) -> None:
    for _ in range(3):
        environment = Blocked()
        async with open_run(environment, live_url, harness.key) as run:
            await interrupt(environment, run)
    async with open_run(Faulty(["raise"]), live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"completed": 1, "infrastructure": 1} and lost(summary) == 0
    assert [row.end_reason for row in await harness.all(Episode)] == ["abandoned"] * 3 + ["infrastructure", "completed"]


async def test_interruptions_cost_no_place_in_the_group(harness: Harness, live_url: str) -> None:
    plan = replace(PLAN, group_size=2, concurrency=1)
    for _ in range(4):
        environment = Blocked()
        async with open_run(environment, live_url, harness.key, plan) as run:
            await interrupt(environment, run)
    async with open_run(Faulty([]), live_url, harness.key, plan) as run:
        summary = await run.run()
    assert summary.ends == {"completed": 2} and lost(summary) == 0 and summary.is_complete
    groups = [row.group_id for row in await harness.all(Episode)]
    assert groups == [None] * 4 + ["run-1/train-0"] * 2


async def test_process_that_lost_its_lease_records_nothing(harness: Harness, live_url: str) -> None:
    """It was stopped for longer than its lease: another one has played the attempt meanwhile."""

    class Slow(Faulty):
        async def run(self, task: Task, agent: Agent) -> Outcome:
            await super().run(task, agent)
            async with harness.db.write() as session:
                await session.execute(update(RunAttempt).values(lease_until=0.0))
            async with open_run(Faulty([]), live_url, harness.key) as other:
                assert (await other.run()).ends == {"completed": 1}
            return Outcome(-1.0)

    async with open_run(Slow([]), live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"abandoned": 1} and summary.is_complete and lost(summary) == 0
    assert summary.errors == {environment_run.TAKEN_OVER: 1}
    first, second = await harness.all(Episode)
    assert (first.end_reason, first.outcome, second.outcome) == ("infrastructure", None, 1.0)
    assert [row.value for row in await harness.all(Feedback)] == [1.0]


async def test_end_that_a_killed_process_has_not_reported_is_repeated(harness: Harness, live_url: str) -> None:
    """The service has ended its episode at the deadline meanwhile."""
    environment = Blocked()
    async with open_run(environment, live_url, harness.key) as run:
        with patch.object(RunClient, "release", AsyncMock()):
            await interrupt(environment, run)
    async with harness.db.write() as session:
        ended = {"state": EpisodeState.ENDED, "end_reason": EndReason.DEADLINE, "ended_at": time.time()}
        await session.execute(update(Episode).values(ended))
        await session.execute(update(RunAttempt).values(lease_until=0.0))
    async with open_run(Faulty([]), live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"completed": 1} and summary.is_complete
    reasons = [(row.end_reason, row.reported_reason) for row in await harness.all(Episode)]
    assert reasons == [("deadline", "infrastructure"), ("completed", "completed")]


async def test_leases_are_renewed_while_the_environment_blocks_the_event_loop(harness: Harness) -> None:
    engine = create_engine(blocking_url(harness.settings.database_url))

    def read_heartbeat() -> float | None:
        with engine.connect() as connection:
            return connection.scalar(select(RunAttempt.heartbeat_at))

    class Blocking(Faulty):
        async def run(self, task: Task, agent: Agent) -> Outcome:
            claimed_at = read_heartbeat()
            while read_heartbeat() == claimed_at:
                time.sleep(0.01)
            return await super().run(task, agent)

    settings = harness.settings.replace({"workers.lease_seconds": 2.0})
    with serve(create_app(settings), lifespan="on") as url:
        async with open_run(Blocking([]), url, harness.key) as run:
            summary = await run.run()
    engine.dispose()
    assert summary.is_complete and summary.planned is not None and summary.planned.done == 1


async def test_environment_with_fewer_tasks_is_played_to_its_end(harness: Harness, live_url: str) -> None:
    class Three(Faulty):
        def tasks(self, split: str, seed: int) -> Iterator[Task]:
            return islice(super().tasks(split, seed), 3)

    for _ in range(2):
        async with open_run(Three([]), live_url, harness.key, replace(PLAN, num_tasks=9, group_size=2)) as run:
            summary = await run.run()
        assert summary.is_complete and summary.planned is not None and summary.planned.done == 6
    assert len(await harness.all(Episode)) == 6


async def test_no_more_attempts_are_begun_than_the_environment_can_serve(harness: Harness, live_url: str) -> None:
    """An attempt that waits for a place would spend its deadline."""

    class Narrow(Faulty):
        num_open: ClassVar[list[int]] = []

        async def max_concurrency(self) -> int:
            return 2

        async def run(self, task: Task, agent: Agent) -> Outcome:
            self.num_open.append(sum(row.state == EpisodeState.OPEN for row in await harness.all(Episode)))
            return await super().run(task, agent)

    async with open_run(Narrow([]), live_url, harness.key, replace(PLAN, num_tasks=6)) as run:
        summary = await run.run()
    assert summary.ends == {"completed": 6} and max(Narrow.num_open) <= 2


async def test_unreachable_service_ends_the_run(harness: Harness, live_url: str) -> None:
    async with open_run(Faulty([]), "http://127.0.0.1:1", harness.key, patience=0.0) as run:
        with pytest.raises(InfrastructureFailure, match="is not reached"):
            await run.run()


async def test_refused_episode_ends_the_run(harness: Harness, live_url: str) -> None:
    async with open_run(Faulty([]), live_url, harness.key, replace(PLAN, policy="nobody")) as run:
        with pytest.raises(ServiceRefusal, match="no policy 'nobody'"):
            await run.run()
    assert await harness.all(Episode) == []


async def test_engine_that_is_down_is_infrastructure(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    scripted.refuse_status = 500
    environment = LoopEnvironment(lambda: StepsWorld(Rooms()), ServiceHttp(patience=0.0))
    async with open_run(environment, live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2} and lost(summary) == 1


async def test_listing_of_tasks_does_not_hold_up_attempts(harness: Harness, live_url: str) -> None:
    """The second task is listed only when the first attempt has ended."""
    has_played = threading.Event()

    class Slow(Faulty):
        def tasks(self, split: str, seed: int) -> Iterator[Task]:
            yield Task("first")
            assert has_played.wait(60)
            yield Task("second")

        async def run(self, task: Task, agent: Agent) -> Outcome:
            outcome = await super().run(task, agent)
            has_played.set()
            return outcome

    async with open_run(Slow([]), live_url, harness.key, replace(PLAN, num_tasks=2)) as run:
        summary = await run.run()
    assert summary.ends == {"completed": 2}


async def test_two_tasks_of_one_name_are_refused(harness: Harness, live_url: str) -> None:
    class Twice(Faulty):
        def tasks(self, split: str, seed: int) -> Iterator[Task]:
            return iter([Task("same"), Task("same")])

    async with open_run(Twice([]), live_url, harness.key, replace(PLAN, num_tasks=2)) as run:
        with pytest.raises(ValueError, match="two tasks with the id 'same'"):
            await run.run()
