"""Check what must hold of a planned run, and of the tokens of its episodes, after any number of faults."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.histories import read_prompt_ids
from app.core.database import Database, chunked
from app.core.settings import Settings
from app.models import (
    AttemptState,
    EndReason,
    Episode,
    Feedback,
    PlannedRun,
    RunAttempt,
    Sample,
    SampleState,
    Turn,
    Version,
)
from tests.support.scripted_engine import logprob

NUM_STEPS = 3  # of an attempt
OUTCOME = 0.5
LEARNED_FROM = (SampleState.OPEN, SampleState.BATCHED, SampleState.TRAINED)
MAX_SHOWN = 20  # errors of one kind
TOLERANCE = 1e-5  # log-probs are recorded in float32


@dataclass
class RunReport:
    """Counts, and a sentence for each violation."""

    counts: dict[str, int]
    errors: list[str]


async def check_run(settings: Settings, name: str, num_attempts: int) -> RunReport:
    """Check the run of this name, which has so many attempts."""
    async with Database(settings.database_url) as db, db.read_snapshot() as session:
        episodes = list(await session.scalars(select(Episode).order_by(Episode.id)))
        completed = {row.id for row in episodes if row.reported_reason == EndReason.COMPLETED}
        attempts = await _check_attempts(session, name, num_attempts, completed)
        learned = await _check_learned(session, episodes, completed)
        tokens = await _check_tokens(session)
    counts = {**attempts.counts, "tries": len(episodes), **learned.counts, **tokens.counts}
    return RunReport(counts, attempts.errors + learned.errors + tokens.errors)


async def _check_attempts(session: AsyncSession, name: str, num_attempts: int, completed: set[str]) -> RunReport:
    """Each attempt is done, by one complete episode of its own, or is lost after its last try."""
    of_run = select(RunAttempt).join(PlannedRun, PlannedRun.id == RunAttempt.run_id).where(PlannedRun.name == name)
    attempts = list(await session.scalars(of_run.order_by(RunAttempt.id)))
    done = Counter(row.episode_id or "" for row in attempts if row.state == AttemptState.DONE)
    lost = Counter(f"attempts lost, {row.reason}" for row in attempts if row.state == AttemptState.LOST)
    errors: list[str] = []
    if not len(attempts) == done.total() + lost.total() == num_attempts:
        states = dict(Counter(row.state for row in attempts))
        errors.append(f"{num_attempts} attempts are planned, and {len(attempts)} are in these states: {states}")
    errors += _first(f"{count} attempts have the episode {id!r}" for id, count in done.items() if count > 1)
    errors += _first(f"the complete episode {id} is that of no attempt" for id in sorted(completed - done.keys()))
    errors += _first(f"the episode {id!r} of a done attempt is not complete" for id in sorted(done.keys() - completed))
    return RunReport({"attempts": done.total(), "attempts lost": lost.total(), **lost}, errors)


async def _check_learned(session: AsyncSession, episodes: list[Episode], completed: set[str]) -> RunReport:
    """A complete episode has one outcome, and all its turns are learned from. A lost one has no outcome, nor turns."""
    reported = select(Feedback.episode_id).where(Feedback.name == "outcome").order_by(Feedback.seq)
    outcomes = Counter(id or "" for id in await session.scalars(reported))
    samples = select(Turn.episode_id, Sample.state).join(Sample, Sample.turn_id == Turn.id)
    samples = samples.where(Turn.episode_id.is_not(None), Sample.state.in_(LEARNED_FROM)).order_by(Turn.id)
    states = [(episode_id or "", state) for episode_id, state in await session.execute(samples)]
    num_turns = Counter(episode_id for episode_id, _ in states)
    errors = _first(
        f"the complete episode {row.id} has {outcomes[row.id]} outcomes, {row.outcome} for its own"
        for row in episodes
        if row.id in completed and (outcomes[row.id], row.outcome) != (1, OUTCOME)
    )
    errors += _first(f"the lost episode {id!r} has an outcome" for id in sorted(outcomes.keys() - completed))
    errors += _first(f"the lost episode {id} is learned from" for id in sorted(num_turns.keys() - completed))
    errors += _first(
        f"{num_turns[id]} turns of the complete episode {id} are learned from"
        for id in sorted(completed)
        if num_turns[id] < NUM_STEPS
    )
    num_trained = sum(state == SampleState.TRAINED for _, state in states)
    counts = {"outcomes": outcomes.total(), "turns learned from": len(states), "of them trained": num_trained}
    return RunReport(counts, errors)


async def _check_tokens(session: AsyncSession) -> RunReport:
    """Each recorded log-prob is the scripted engine's for the token, what is before it, and the turn's version."""
    adapters = {
        id: (adapter, number)
        for id, adapter, number in await session.execute(
            select(Version.id, Version.adapter, Version.number).order_by(Version.id)
        )
    }
    ids = list(await session.scalars(select(Turn.id).where(Turn.logprobs.is_not(None)).order_by(Turn.id)))
    num_tokens, wrong, versions = 0, [], set()
    for chunk in chunked(ids):
        prompts = await read_prompt_ids(session, chunk)
        query = select(Turn.id, Turn.version_id, Turn.output_ids, Turn.logprobs).where(Turn.id.in_(chunk))
        for id, version_id, output_ids, logprobs in await session.execute(query.order_by(Turn.id)):
            adapter, number = adapters[version_id]
            assert output_ids is not None and logprobs is not None
            versions.add(number)
            num_tokens += len(output_ids)
            before = [*prompts[id], *output_ids]
            num_before = len(prompts[id])
            expected = [logprob(adapter, before[:at], before[at]) for at in range(num_before, len(before))]
            differs = [abs(one - other) > TOLERANCE for one, other in zip(expected, logprobs, strict=True)]
            if any(differs):
                wrong.append(f"{sum(differs)} log-probs of turn {id} are not those of v{number}")
    counts = {"tokens": num_tokens, "versions that replied": len(versions), "turns of another version": len(wrong)}
    return RunReport(counts, _first(wrong))


def _first(errors: Iterable[str]) -> list[str]:
    found = list(errors)
    return found[:MAX_SHOWN] + ([f"and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else [])
