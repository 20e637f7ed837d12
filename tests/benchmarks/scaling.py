"""Measure whether curate and assemble slow down with 10 k, 100 k and 1 M old turns: `make bench-scaling`.

It uses new PostgreSQL databases. The new feedback is batches of 96 (`--rounds` of them), each processed and assembled
as the workers do it. One statement replaces the trainer.
"""

import argparse
import asyncio
import os
import time
from random import Random
from statistics import median
from uuid import uuid4

import psycopg
from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.models import Batch, BatchState, Feedback, Policy, Sample, SampleState, Turn, TurnState, new_id
from app.projects.service import bootstrap
from tests.benchmarks.grown_databases import SERVER, database_url
from workers.curate import curate
from workers.reconcile import reconcile
from workers.training.assemble import assemble

BATCH_SIZE = 96
INSERT_OLD_ROWS = (
    # All rows of turns that have been trained on, CHUNK_SIZE turns at a time.
    """
    INSERT INTO turns (id, project_id, policy_id, version_id, completion_id, choice_index, conversation_id, engine,
        state, stream, messages, sampling, request_params, request_metadata,
        prompt_ids, output_ids, logprobs, reply, finish_reason, num_prompt_tokens, num_output_tokens, finished_at,
        created_at, processed)
    SELECT 'old-' || n, :project, :policy, :version, 'old-' || n, 0, 'talk-' || n / 3, 'engine-0', 'done', false,
        '[{"role": "user", "content": "hi"}]', '{"temperature": 1.0}', '{}', '{}',
        decode(repeat('01000000', 64), 'hex'), decode(repeat('02000000', 40), 'hex'),
        decode(repeat('000000bf', 40), 'hex'), '{"role": "assistant", "content": "hello"}', 'stop', 64, 40, n, n, true
    FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) AS n
    """,
    """
    INSERT INTO feedback (id, project_id, turn_id, target, kind, name, value, raw_value, source_kind, source_id,
        request_metadata, idempotency_key, fingerprint, processed, created_at)
    SELECT 'fb-' || n, :project, 'old-' || n, 'old-' || n, 'binary', 'default', 1, 'true', 'HUMAN', 'user-' || n % 5000,
        '{}', 'key-' || n, 'f', true, n
    FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) AS n
    """,
    """
    INSERT INTO rewards (id, turn_id, source, reward_source, rater, value, weight, created_at)
    SELECT 'rew-' || n, 'old-' || n, 'default/HUMAN/user-' || n % 5000, 'explicit', 'HUMAN/user-' || n % 5000, 1, 1, n
    FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) AS n
    """,
    """
    INSERT INTO samples (turn_id, policy_id, version_id, reward, state, ready_at, conversation_id, rater, group_id,
        batch_id, created_at)
    SELECT 'old-' || n, :policy, :version, 1, 'trained', n, 'talk-' || n / 3, 'HUMAN/user-' || n % 5000, 'old-' || n,
        'bat-' || n / 96, n
    FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) AS n
    """,
)
INSERT_OLD_BATCHES = """
    INSERT INTO batches (id, policy_id, parent_id, state, num_samples, metrics, settled_at, attempt, fence, created_at)
    SELECT 'bat-' || n, :policy, :version, 'trained', 96, '{}', n, 1, 1, n
    FROM generate_series(0, CAST(:last AS integer)) AS n
"""
CHUNK_SIZE = 50_000


async def insert_history(db: Database, turns: int) -> None:
    async with db.write() as session:
        policy = (await session.scalars(select(Policy))).one()
        names = {"project": policy.project_id, "policy": policy.id, "version": policy.head_version_id}
        await session.execute(text(INSERT_OLD_BATCHES), {**names, "last": turns // BATCH_SIZE + 1})
    for first in range(1, turns + 1, CHUNK_SIZE):
        async with db.write() as session:
            values = {**names, "first": first, "last": min(first + CHUNK_SIZE - 1, turns)}
            for statement in INSERT_OLD_ROWS:
                parameters = {name: value for name, value in values.items() if f":{name}" in statement}
                await session.execute(text(statement), parameters)
    async with db.engine.connect() as connection:
        await (await connection.execution_options(isolation_level="AUTOCOMMIT")).execute(text("VACUUM ANALYZE"))


async def insert_feedback(session: AsyncSession, policy: Policy, count: int, rng: Random) -> None:
    """Insert new turns with feedback: random replies and raters, so that no rater is quarantined and no cap applies."""
    for user in rng.sample(range(5000), count):
        id, up = new_id("chatcmpl"), rng.random() < 0.5
        session.add(
            Turn(
                id=id,
                completion_id=id,
                project_id=policy.project_id,
                policy_id=policy.id,
                version_id=policy.head_version_id,
                conversation_id=f"fresh-{id}",
                engine="engine-0",
                state=TurnState.DONE,
                stream=False,
                own_messages=[{"role": "user", "content": "hi"}],
                sampling={"temperature": 1.0},
                own_prompt_ids=[rng.randrange(1000) for _ in range(64)],
                output_ids=[rng.randrange(1000) for _ in range(40)],
                logprobs=[-0.5] * 40,
                reply={"role": "assistant", "content": "hello"},
                finish_reason="stop",
                finished_at=now(),
            )
        )
        await session.flush()
        session.add(
            Feedback(
                id=new_id("fb"),
                project_id=policy.project_id,
                turn_id=id,
                target=id,
                kind="binary",
                name="default",
                value=1.0 if up else -1.0,
                raw_value=up,
                source_kind="HUMAN",
                source_id=f"user-{user}",
                idempotency_key=new_id("key"),
                fingerprint="f",
            )
        )


async def measure(settings: Settings, turns: int, rounds: int) -> tuple[float, float, float]:
    """Return the median milliseconds to curate and to assemble one batch, and of a reconciler run without work."""
    db = Database(settings.database_url)
    async with db.write() as session:
        await bootstrap(session, settings.policy, settings.model)
    await insert_history(db, turns)
    curate_times, assemble_times, reconcile_times, rng = [], [], [], Random(turns)
    for _ in range(rounds):
        async with db.write() as session:
            await insert_feedback(session, (await session.scalars(select(Policy))).one(), BATCH_SIZE, rng)
        started = time.perf_counter()
        num_processed = await curate(db, settings)
        processed = time.perf_counter()
        num_batches = await assemble(db, settings)
        assembled = time.perf_counter()
        assert (num_processed, num_batches) == (BATCH_SIZE, 1), (num_processed, num_batches)
        curate_times.append(1000 * (processed - started))
        assemble_times.append(1000 * (assembled - processed))
        async with db.write() as session:
            await session.execute(update(Batch).where(Batch.state == BatchState.OPEN).values(state=BatchState.TRAINED))
            await session.execute(
                update(Sample).where(Sample.state == SampleState.BATCHED).values(state=SampleState.TRAINED)
            )
        started = time.perf_counter()
        await reconcile(db, settings)
        reconcile_times.append(1000 * (time.perf_counter() - started))
    async with db.read() as session:
        assert await session.scalar(select(func.count()).select_from(Turn)) == turns + rounds * BATCH_SIZE
    await db.close()
    return median(curate_times), median(assemble_times), median(reconcile_times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; "
        f"medians of {args.rounds} batches of {BATCH_SIZE}\n"
    )
    print(
        "| old turns | curate, ms per batch | assemble, ms per batch | turns/s "
        "| relative to the first row | reconcile, ms |",
        flush=True,
    )
    print("|---|---|---|---|---|---|", flush=True)
    first = None
    for turns in args.turns:
        name = f"attune_{uuid4().hex[:12]}"
        with psycopg.connect(SERVER, autocommit=True) as server:
            server.execute(f"CREATE DATABASE {name}")
            try:
                url = database_url(name)
                upgrade(url)
                settings = Settings(database={"url": url}, policy="shop", trainer={"batch_size": BATCH_SIZE})
                curate_ms, assemble_ms, reconcile_ms = asyncio.run(measure(settings, turns, args.rounds))
            finally:
                server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        total_ms = curate_ms + assemble_ms
        first = first or total_ms
        rate = 1000 * BATCH_SIZE / total_ms
        cells = f"{curate_ms:.0f} | {assemble_ms:.0f} | {rate:,.0f} | {total_ms / first:.2f} | {reconcile_ms:.0f}"
        print(f"| {turns:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
