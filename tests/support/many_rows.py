"""Many rows for acts that take long: datasets, ratings, versions, expired turns, backlogs. A few statements each."""

import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.models import Dataset, Deployment, Engine, Feedback, Policy, Project, Version, VersionState
from app.projects.service import create_policy

POLICY = "shop"
NUMBERS = "WITH RECURSIVE series(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM series WHERE n < :count)"
PERSON = "ada"
DATASET = "ds-1"
OLD_SECONDS = 100 * 86_400.0  # the age of turns that have expired
OTHER_PROJECT = "proj-other"
VOTES_OF_REPLY = 10  # in a backlog
TOKENS = b"\x07\x00\x00\x00" * 256
MESSAGES = '[{"role": "user", "content": "When do you open on Saturday, and can I bring my bicycle?"}]'
REPLY = '{"role": "assistant", "content": "From nine to five. Bring it before noon, so that it is ready on Monday."}'
VERSION_OF_TURN = "CASE WHEN n <= :samples THEN :base ELSE 'ver-' || ((n - 1) / :samples) END"

INSERT_TURNS = f"""
    INSERT INTO turns (id, project_id, policy_id, version_id, completion_id, choice_index, conversation_id, history_id,
        engine, state, stream, messages, sampling, prompt_ids, output_ids, logprobs, reply, finish_reason,
        num_prompt_tokens, num_output_tokens, end_user, created_at, finished_at, processed)
    {NUMBERS} SELECT 'turn-' || n, :project, :policy, :version, 'turn-' || n, 0, 'talk-' || ((n - 1) / :length),
        CASE WHEN (n - 1) % :length = 0 THEN NULL ELSE 'turn-' || (n - 1) END, 'engine-0', 'done', :no, '{MESSAGES}',
        '{{}}', :tokens, :tokens, :tokens, '{REPLY}', 'stop', 256, 256, :end_user, :time + 0.001 * n,
        :time + 0.001 * n, :yes FROM series
"""
INSERT_CONVERSATION_FEEDBACK = f"""
    INSERT INTO feedback (id, project_id, conversation_id, target, kind, name, value, raw_value, source_kind,
        source_id, request_metadata, idempotency_key, fingerprint, processed, created_at)
    {NUMBERS} SELECT 'fb-' || n, :project, 'talk-' || (n - 1), 'conversation:talk-' || (n - 1), 'binary', 'default', 1,
        'true', 'HUMAN', :person, '{{}}', 'fb-' || n, '', :yes, :time FROM series
"""
INSERT_CONVERSATION_REWARDS = """
    INSERT INTO rewards (id, turn_id, source, reward_source, feedback_seq, rater, value, weight, created_at)
    SELECT 'rew-' || turns.id, turns.id, 'default/HUMAN/ada', 'explicit', feedback.seq, 'HUMAN/ada', 1, 1, :time
    FROM turns JOIN feedback ON feedback.conversation_id = turns.conversation_id
"""
INSERT_OPEN_SAMPLES = """
    INSERT INTO samples (turn_id, policy_id, version_id, reward, state, ready_at, conversation_id, rater, created_at)
    SELECT turns.id, policy_id, version_id, 1, 'open', :time, turns.conversation_id, 'HUMAN/ada', :time
    FROM turns JOIN rewards ON rewards.turn_id = turns.id
"""
# `count` versions, each of which has learned from `samples` replies of its parent that a program has judged.
INSERT_VERSIONS = (
    f"""
    INSERT INTO versions (id, policy_id, number, parent_id, batch_id, state, adapter_name, adapter_path,
        manifest_sha256, metrics, timings, live_at, attempt, fence, created_at)
    {NUMBERS} SELECT 'ver-' || n, :policy, n, CASE WHEN n = 1 THEN :base ELSE 'ver-' || (n - 1) END, 'bat-' || n,
        CASE WHEN n = :count THEN 'live' ELSE 'superseded' END, '{POLICY}-v' || n, '/nowhere/v' || n, '', '{{}}',
        '{{}}', n, 1, 1, n FROM series
    """,
    f"""
    INSERT INTO batches (id, policy_id, parent_id, state, num_samples, num_raters, version_id, metrics, settled_at,
        attempt, fence, created_at)
    {NUMBERS} SELECT 'bat-' || n, :policy, CASE WHEN n = 1 THEN :base ELSE 'ver-' || (n - 1) END, 'trained', :samples,
        1, 'ver-' || n, '{{}}', n, 1, 1, :time FROM series
    """,
)
INSERT_TRAINED = (
    f"""
    INSERT INTO feedback (id, project_id, turn_id, target, kind, name, value, raw_value, source_kind, source_id,
        request_metadata, idempotency_key, fingerprint, processed, batch_id, created_at)
    {NUMBERS} SELECT 'fb-' || n, :project, 'turn-' || n, 'turn-' || n, 'binary', 'default', 1, 'true', 'CODE', 'ci',
        '{{}}', 'fb-' || n, '', :yes, 'bat-' || ((n - 1) / :samples + 1), :time FROM series
    """,
    """
    INSERT INTO rewards (id, turn_id, source, reward_source, feedback_seq, rater, value, weight, created_at)
    SELECT 'rew-' || turn_id, turn_id, 'default/CODE/ci', 'explicit', seq, 'CODE/ci', 1, 1, :time FROM feedback
    """,
    """
    INSERT INTO samples (turn_id, policy_id, version_id, reward, state, ready_at, rater, batch_id, created_at)
    SELECT turns.id, policy_id, version_id, 1, 'trained', :time, 'CODE/ci', batch_id, :time
    FROM turns JOIN feedback ON feedback.turn_id = turns.id
    """,
    "INSERT INTO batch_turns (batch_id, turn_id) SELECT batch_id, turn_id FROM samples",
    f"UPDATE turns SET version_id = {VERSION_OF_TURN.replace('n ', 'CAST(substr(id, 6) AS integer) ')} "
    "WHERE id LIKE 'turn-%'",
)
INSERT_BACKLOG = f"""
    INSERT INTO feedback (id, project_id, turn_id, target, kind, name, value, raw_value, source_kind, source_id,
        request_metadata, idempotency_key, fingerprint, processed, created_at)
    {NUMBERS} SELECT 'fb-' || n, :project, 'turn-' || ((n - 1) / :votes + 1), 'turn-' || ((n - 1) / :votes + 1),
        'binary', 'default', 1, 'true', 'HUMAN', 'user-' || (n % :votes), '{{}}', 'fb-' || n, '', :yes, :time
    FROM series
"""
INSERT_DATASET_ROWS = f"""
    INSERT INTO dataset_rows (dataset_id, row_number, content) {NUMBERS} SELECT :dataset, n - 1, '{{"messages": []}}'
    FROM series
"""


async def _execute(session: AsyncSession, statement: str, values: Mapping[str, Any]) -> None:
    used = {name: value for name, value in values.items() if f":{name}" in statement}
    await session.execute(text(statement), used)


async def _read_values(session: AsyncSession, policy_name: str = POLICY) -> dict[str, Any]:
    """Return the parameters that every statement may have."""
    policy = (await session.scalars(select(Policy).where(Policy.name == policy_name))).one()
    base = (await session.scalars(select(Version.id).where(Version.policy_id == policy.id, Version.number == 0))).one()
    ids = {"project": policy.project_id, "policy": policy.id, "version": base, "base": base}
    return {**ids, "time": time.time() - 60, "no": False, "yes": True, "tokens": TOKENS, "person": PERSON}


async def insert_turns(
    db: Database, count: int, *, length: int = 10, end_user: str | None = None, age: float = 0.0
) -> None:
    """Insert replies in conversations of `length` turns. `age`: in seconds."""
    async with db.write() as session:
        values = await _read_values(session)
        values |= {"count": count, "length": length, "end_user": end_user, "time": values["time"] - age}
        await _execute(session, INSERT_TURNS, values)


async def insert_ratings(db: Database, ratings: int, length: int) -> None:
    """Insert so many conversations of `length` turns of others, each rated as a whole by PERSON."""
    await insert_turns(db, ratings * length, length=length)
    async with db.write() as session:
        values = await _read_values(session) | {"count": ratings}
        for statement in (INSERT_CONVERSATION_FEEDBACK, INSERT_CONVERSATION_REWARDS, INSERT_OPEN_SAMPLES):
            await _execute(session, statement, values)


async def insert_versions(db: Database, count: int, samples: int) -> None:
    """Insert a line of versions after version 0, of which the last one serves. No person has judged one of them."""
    await insert_turns(db, count * samples)
    async with db.write() as session:
        values = await _read_values(session) | {"count": count, "samples": samples}
        for statement in INSERT_VERSIONS:
            await _execute(session, statement, values)
        for statement in INSERT_TRAINED:
            await _execute(session, statement, values | {"count": count * samples})
        await session.execute(update(Version).where(Version.number == 0).values(state=VersionState.SUPERSEDED))
        serving = f"ver-{count}"
        await session.execute(update(Deployment).values(version_id=serving, previous_version_id=values["base"]))
        await session.execute(update(Policy).values(head_version_id=serving))
        await session.execute(update(Engine).values(loaded=[f"{POLICY}-v{count}"]))


async def insert_backlog(db: Database, count: int, model: str) -> None:
    """Insert another project with so many votes, which are processed."""
    async with db.write() as session:
        session.add(Project(id=OTHER_PROJECT, name="other"))
        await session.flush()
        await create_policy(session, OTHER_PROJECT, "other", model)
        values = await _read_values(session, "other")
        turns = {"count": (count - 1) // VOTES_OF_REPLY + 1, "length": 1, "end_user": None}
        await _execute(session, INSERT_TURNS, values | turns)
        await _execute(session, INSERT_BACKLOG, values | {"count": count, "votes": VOTES_OF_REPLY})


async def release_backlog(db: Database) -> None:
    """Let the votes of the other project wait to be processed."""
    async with db.write() as session:
        await session.execute(update(Feedback).where(Feedback.project_id == OTHER_PROJECT).values(processed=False))


async def insert_dataset(db: Database, rows: int) -> None:
    """Insert the dataset DATASET."""
    async with db.write() as session:
        values = await _read_values(session) | {"count": rows, "dataset": DATASET}
        names = {"project_id": values["project"], "name": "prompts", "kind": "prompts"}
        session.add(Dataset(id=DATASET, sha256="0" * 64, num_rows=rows, num_bytes=rows, **names))
        await session.flush()
        await _execute(session, INSERT_DATASET_ROWS, values)


async def analyze(db: Database) -> None:
    """Let the planner know the tables, as PostgreSQL does by itself."""
    async with db.engine.connect() as connection:
        await (await connection.execution_options(isolation_level="AUTOCOMMIT")).execute(text("ANALYZE"))
