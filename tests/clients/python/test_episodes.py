"""Episodes of attune-client: by `with`, in a subprocess, after errors, and while the service is away."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import httpx
import httpx2
import openai
import pytest
from attune_client import AsyncAttune, Attune, Conflict, ConnectionFailed, ServerError, TimedOut
from sqlalchemy import update

from alignment.environments.errors import InfrastructureFailure
from app.chat.episode_limits import end_expired
from app.core.database import now
from app.models import Episode, Feedback, Reward, Turn
from tests.support.deployment import Harness
from tests.support.faulty_api import FaultyApi, error_response
from workers.curate import curate

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Guess."}]
PROGRAM = """
import openai
client = openai.OpenAI()
client.chat.completions.create(model="shop", messages=[{"role": "user", "content": "Guess."}], temperature=0)
"""


async def ends(harness: Harness) -> list[tuple[str | None, float | None]]:
    return [(row.end_reason, row.outcome) for row in await harness.all(Episode)]


async def test_agent_in_the_same_process_and_in_another_one(client: Attune, harness: Harness, url: str) -> None:
    limits = {"max_turns": 9}
    with client.episode("shop", task="guess", sampling="policy", limits=limits, metadata={"seed": "7"}) as episode:
        assert episode.record["task"] == "guess" and "api_key" not in episode.record
        with openai.OpenAI(**episode.openai()) as agent:
            agent.chat.completions.create(model="shop", messages=MESSAGES, temperature=0)
        subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | episode.environment(), check=True)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=harness.key) as other:
            other.chat.completions.create(model="shop", messages=MESSAGES, extra_headers=episode.headers("critic"))
        client.feedback.up(episode.target)
        episode.end(0.5)
    turns = await harness.all(Turn)
    assert [(turn.episode_id, turn.agent, turn.exclusion_reason) for turn in turns] == [
        (episode.id, None, None),
        (episode.id, None, None),
        (episode.id, "critic", None),
    ]
    assert await ends(harness) == [("completed", 0.5)] and episode.record["end_reason"] == "completed"
    assert len(await harness.all(Feedback)) == 2


async def test_asynchronous_client(harness: Harness, url: str) -> None:
    async with AsyncAttune(url, harness.key) as client:
        async with client.episode("shop") as episode, openai.AsyncOpenAI(**episode.openai()) as agent:
            await agent.chat.completions.create(model="shop", messages=MESSAGES)
            await episode.end(1.0)
            await episode.end(1.0)
            with pytest.raises(Conflict):
                await episode.end(-1.0)
        with pytest.raises(ZeroDivisionError):
            async with client.episode("shop", failure_outcome=-1.0):
                raise ZeroDivisionError
    assert sorted(await ends(harness), key=str) == [("completed", 1.0), ("failed", -1.0)]
    assert [turn.episode_id for turn in await harness.all(Turn)] == [episode.id]


class Gateway(Exception):
    """An error of another package that carries a status."""

    status_code = 503


def raised(
    error: BaseException, cause: BaseException | None = None, context: BaseException | None = None
) -> BaseException:
    """Return the error as it is after `raise error from cause`, or after it was raised while handling `context`."""
    error.__context__ = context
    if cause is not None:
        error.__cause__ = cause
    return error


REQUEST = httpx2.Request("POST", "http://attune/v1/episodes/ep-1/chat/completions")
ERRORS: list[tuple[BaseException | None, str]] = [
    (None, "completed"),
    (ZeroDivisionError(), "abandoned"),
    (KeyboardInterrupt(), "abandoned"),
    (raised(KeyboardInterrupt(), context=TimeoutError()), "abandoned"),
    (raised(ZeroDivisionError(), cause=ValueError(), context=TimeoutError()), "abandoned"),
    (ConnectionFailed("the service was away"), "infrastructure"),
    (TimedOut("late"), "infrastructure"),
    (TimeoutError(), "infrastructure"),
    (ConnectionResetError(), "infrastructure"),
    (httpx.ReadTimeout("late"), "infrastructure"),
    (openai.APIConnectionError(request=REQUEST), "infrastructure"),
    (openai.APITimeoutError(REQUEST), "infrastructure"),
    (openai.InternalServerError("down", response=httpx2.Response(500, request=REQUEST), body=None), "infrastructure"),
    (openai.RateLimitError("busy", response=httpx2.Response(429, request=REQUEST), body=None), "infrastructure"),
    (openai.BadRequestError("wrong", response=httpx2.Response(400, request=REQUEST), body=None), "abandoned"),
    (Gateway(), "infrastructure"),
    (InfrastructureFailure("no sandbox"), "infrastructure"),
    (raised(RuntimeError("the agent stopped"), cause=InfrastructureFailure("no sandbox")), "infrastructure"),
    (raised(RuntimeError("the agent stopped"), context=openai.APITimeoutError(REQUEST)), "infrastructure"),
    (ExceptionGroup("tasks", [ZeroDivisionError(), TimeoutError()]), "infrastructure"),
]


@pytest.mark.parametrize(("error", "reason"), ERRORS, ids=repr)
async def test_end_of_the_block_is_the_end_of_the_episode(
    client: Attune, harness: Harness, error: BaseException | None, reason: str
) -> None:
    """Without an outcome that the caller named, none is learned from."""

    def attempt() -> None:
        with client.episode("shop"):
            if error is not None:
                raise error

    if error is None:
        attempt()
    else:
        with pytest.raises(type(error)):
            attempt()
    assert await ends(harness) == [(reason, None)]
    assert await harness.all(Feedback) == []


@pytest.mark.parametrize(
    ("error", "end"),
    [(ZeroDivisionError(), ("failed", -0.5)), (TimeoutError(), ("infrastructure", None))],
    ids=repr,
)
async def test_failure_outcome_is_that_of_errors_but_not_of_outages(
    client: Attune, harness: Harness, error: Exception, end: tuple[str, float | None]
) -> None:
    with pytest.raises(type(error)), client.episode("shop", failure_outcome=-0.5):
        raise error
    assert await ends(harness) == [end]


async def test_failure_that_the_caller_reports_has_the_policys_outcome(client: Attune, harness: Harness) -> None:
    with client.episode("shop") as episode:
        episode.end(reason="failed")
    assert [row.value for row in await harness.all(Feedback)] == [-1.0]


@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"deadline_seconds": 60}], ids=str)
async def test_limit_that_has_ended_the_episode_is_no_failure(
    client: Attune, harness: Harness, limits: dict[str, float]
) -> None:
    """Nothing is reported about it, so that a later report counts."""
    episode = client.episode("shop", limits=limits, failure_outcome=-1.0)
    with pytest.raises(openai.ConflictError), episode, openai.OpenAI(**episode.openai()) as agent:
        agent.chat.completions.create(model="shop", messages=MESSAGES)
        if "deadline_seconds" in limits:
            async with harness.db.write() as session:
                await session.execute(update(Episode).values(created_at=now() - 9, deadline_at=now() - 1))
        agent.chat.completions.create(model="shop", messages=MESSAGES)
    assert await ends(harness) == [("max_turns" if "max_turns" in limits else "deadline", None)]
    assert await harness.all(Feedback) == []
    episode.end(0.5)
    assert [row.outcome for row in await harness.all(Episode)] == [0.5]


async def test_lost_response_creates_no_second_episode(client: Attune, harness: Harness, api: FaultyApi) -> None:
    api.faults = ["lose_response"]
    with client.episode("shop") as episode:
        assert episode.start().id == episode.id
    assert [row.id for row in await harness.all(Episode)] == [episode.id]


def test_episode_that_is_not_created_has_no_id(client: Attune) -> None:
    with pytest.raises(RuntimeError, match="start"):
        client.episode("shop").environment()


def test_environment_for_anthropics_clients_is_the_service_itself(client: Attune, url: str) -> None:
    with client.episode("shop") as episode:
        variables = episode.environment(anthropic=True)
    assert variables["ANTHROPIC_BASE_URL"] == url and variables["ANTHROPIC_API_KEY"] == variables["OPENAI_API_KEY"]
    assert variables["OPENAI_BASE_URL"] == f"{url}/v1/episodes/{episode.id}"
    assert set(episode.environment()) == {"OPENAI_BASE_URL", "OPENAI_API_KEY"}


@pytest.mark.parametrize("fault", ["lose_response", "away"])
async def test_outcome_waits_in_the_queue_while_the_service_is_away(
    harness: Harness, api: FaultyApi, url: str, tmp_path: Path, fault: Literal["lose_response", "away"]
) -> None:
    """It counts once, also if the report had arrived and only its response was lost."""
    with Attune(url, harness.key, max_retries=0) as client:
        with client.queue(tmp_path / "outcomes.db", background=False) as queue:
            with client.episode("shop", queue=queue) as episode:
                with openai.OpenAI(**episode.openai()) as agent:
                    agent.chat.completions.create(model="shop", messages=MESSAGES)
                api.faults = ["lose_response" if fault == "lose_response" else error_response(503)]
                episode.end(0.5)
            assert (queue.pending, episode.is_ended) == (1, True)
            queue.flush(timeout=30)
        assert await ends(harness) == [("completed", 0.5) if fault == "lose_response" else (None, None)]
        async with harness.db.write() as session:
            await session.execute(update(Episode).values(deadline_at=now() - 1))
        await end_expired(harness.db)
        await curate(harness.db, harness.settings)
    assert [(row.source, row.value) for row in await harness.all(Reward)] == [("episode/outcome/CODE/episode", 0.5)]


async def test_end_without_an_outcome_needs_the_service(
    client: Attune, harness: Harness, api: FaultyApi, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Attune(url, harness.key, max_retries=0) as hasty:
        with pytest.raises(ServerError), hasty.episode("shop"):
            api.faults = [error_response(503)]
        with pytest.raises(ZeroDivisionError), hasty.episode("shop"):
            api.faults = [error_response(503)]
            raise ZeroDivisionError
    assert "was not reported" in caplog.text, "the agent's own error is the one that is raised"
    assert await ends(harness) == [(None, None)] * 2
