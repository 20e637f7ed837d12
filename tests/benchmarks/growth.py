"""Measure whether pages slow down as the tables grow: `make bench-growth`.

Each size has a new PostgreSQL database with a history of that many turns: half of them rated and trained on, a version
for 192 turns, rollouts, audit entries and browser tokens. The pages are requested from the application in this process,
one request at a time. `--turns 10000 10000000` measures ten million: 21 GB, and a quarter of an hour to insert them.
Beside the times there is the processor time of a request, of the application and the database's processes, which must
be on the same machine (Linux): other work on the machine does not change it much.
`--keep` and then `--existing NAME …` measure the same databases again, with the schema of this code.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import httpx2
import psycopg
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.settings import Settings
from app.main import create_app
from app.models import Engine, EngineState, Policy, Turn, Version
from app.projects.service import bootstrap, create_key
from tests.benchmarks.grown_databases import SERVER, add_arguments, iterate_databases

BATCH_SIZE = 96
TURNS_PER_VERSION = 2 * BATCH_SIZE  # half of the turns are rated
CHUNK_SIZE = 50_000
UNCOUNTED = 2000  # the newest turns, whose votes and rollouts are in no total yet
TABLES = ("turns", "turn_metadata", "feedback", "rewards", "samples", "batch_turns", "rollouts", "audit")
SECONDS_PER_TURN = 3.0
AGE = "extract(epoch from clock_timestamp()) - :seconds * (:turns - n)"  # the last turn is of now
METRICS = (
    '{"critic/score/mean": 0.1, "reference_kl": 0.01, "guard/kl": 0.01, "actor/step_scale": 1, "actor/lr_scale": 1}'
)
INSERT_VERSIONS = (
    f"""
    INSERT INTO versions (id, policy_id, number, parent_id, batch_id, state, adapter_name, adapter_path,
        manifest_sha256, metrics, timings, live_at, attempt, fence, created_at)
    SELECT 'ver-' || n, :policy, n, CASE WHEN n = 1 THEN :base ELSE 'ver-' || n - 1 END, 'bat-' || n,
        CASE WHEN n = :versions THEN 'live' WHEN n % 20 = 0 THEN 'rejected' ELSE 'superseded' END, 'shop-v' || n,
        '/nowhere/v' || n, repeat('0', 64), '{METRICS}', '{{"export": 0.1}}', n, 1, 1, n
    FROM generate_series(1, CAST(:versions AS integer)) AS n
    """,
    f"""
    INSERT INTO batches (id, policy_id, parent_id, state, num_samples, num_raters, version_id, metrics, settled_at,
        attempt, fence, created_at)
    SELECT 'bat-' || n, :policy, CASE WHEN n = 1 THEN :base ELSE 'ver-' || n - 1 END, 'trained', 96, 90, 'ver-' || n,
        '{METRICS}', n, 1, 1, extract(epoch from clock_timestamp()) - :seconds * 192 * (:versions - n)
    FROM generate_series(1, CAST(:versions AS integer)) AS n
    """,
    """
    INSERT INTO audit (project_id, actor, action, subject, reason, details, created_at)
    SELECT :project, 'publish', 'deployment.deployed', 'shop@v' || n, 'gates passed', '{}', n
    FROM generate_series(1, CAST(:versions AS integer)) AS n
    """,
    "UPDATE versions SET state = 'superseded' WHERE id = :base",
    "UPDATE deployments SET version_id = 'ver-' || CAST(:versions AS integer), previous_version_id = :base",
    "UPDATE policies SET head_version_id = 'ver-' || CAST(:versions AS integer)",
)
SERIES = "FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) AS n"
VERSION_OF_TURN = "'ver-' || least(n / 192 + 1, :versions)"
INSERT_TURNS = (
    f"""
    INSERT INTO turns (id, project_id, policy_id, version_id, completion_id, choice_index, conversation_id, engine,
        origin, state, stream, messages, sampling, request_params, request_metadata, prompt_ids, output_ids, logprobs,
        reply, finish_reason, num_prompt_tokens, num_output_tokens, end_user, finished_at, created_at, processed)
    SELECT 'chatcmpl-' || n, :project, :policy, {VERSION_OF_TURN}, 'chatcmpl-' || n, 0, 'talk-' || n / 3, 'engine-0',
        CASE WHEN n % 20 = 0 THEN 'group_sample' ELSE 'chat' END, CASE WHEN n % 50 = 1 THEN 'aborted' ELSE 'done' END,
        false, '[{{"role": "user", "content": "When are you open?"}}]', '{{"temperature": 1.0}}', '{{}}', '{{}}',
        decode(repeat('01000000', 64), 'hex'), decode(repeat('02000000', 40), 'hex'),
        decode(repeat('000000bf', 40), 'hex'), '{{"role": "assistant", "content": "From nine to five, every day."}}',
        'stop', 64, 40, 'user-' || n % 5000, {AGE}, {AGE}, true
    {SERIES}
    """,
    f"""
    INSERT INTO turn_metadata (turn_id, key, value, project_id)
    SELECT 'chatcmpl-' || n, 'order', 'order-' || n, :project {SERIES} WHERE n % 10 = 0
    """,
    f"""
    INSERT INTO feedback (id, project_id, turn_id, target, kind, name, value, raw_value, source_kind, source_id,
        request_metadata, idempotency_key, fingerprint, processed, batch_id, vote_total_id, created_at)
    SELECT 'fb-' || n, :project, 'chatcmpl-' || n, 'chatcmpl-' || n, 'binary', 'default', 1, 'true', 'HUMAN',
        'user-' || n % 5000, '{{}}', 'key-' || n, 'f', true,
        CASE WHEN n % 100 = 1 THEN NULL ELSE 'bat-' || least(n / 192 + 1, :versions) END,
        CASE WHEN n > :turns - {UNCOUNTED} THEN NULL
            WHEN n % 100 = 1 THEN CAST(:too_old AS integer)
            WHEN (n / 192 + 1) % 20 = 0 AND n / 192 + 1 < :versions THEN CAST(:rejected AS integer)
            ELSE CAST(:learned AS integer) END, {AGE}
    {SERIES} WHERE n % 2 = 1
    """,
    f"""
    INSERT INTO rewards (id, turn_id, source, reward_source, feedback_seq, rater, value, weight, created_at)
    SELECT 'rew-' || n, 'chatcmpl-' || n, 'default/HUMAN/user-' || n % 5000, 'explicit',
        (SELECT seq FROM feedback WHERE id = 'fb-' || n), 'HUMAN/user-' || n % 5000, 1, 1, {AGE}
    {SERIES} WHERE n % 2 = 1
    """,
    f"""
    INSERT INTO samples (turn_id, policy_id, version_id, reward, state, rule, reason, ready_at, conversation_id, rater,
        group_id, batch_id, created_at)
    SELECT 'chatcmpl-' || n, :policy, {VERSION_OF_TURN}, 1, CASE WHEN n % 100 = 1 THEN 'dropped' ELSE 'trained' END,
        CASE WHEN n % 100 = 1 THEN 'too_old' END, CASE WHEN n % 100 = 1 THEN 'it is too old' END, n, 'talk-' || n / 3,
        'HUMAN/user-' || n % 5000, 'chatcmpl-' || n,
        CASE WHEN n % 100 = 1 THEN NULL ELSE 'bat-' || least(n / 192 + 1, :versions) END, {AGE}
    {SERIES} WHERE n % 2 = 1
    """,
    f"""
    INSERT INTO batch_turns (batch_id, turn_id)
    SELECT 'bat-' || least(n / 192 + 1, :versions), 'chatcmpl-' || n {SERIES} WHERE n % 2 = 1 AND n % 100 <> 1
    """,
    f"""
    INSERT INTO rollouts (id, policy_id, origin, choice_index, state, due_at, expires_at, tokens, settled_at, attempt,
        fence, created_at, counted)
    SELECT 'chatcmpl-' || n, :policy, 'group_sample', 0, 'done', n, n, 40, {AGE}, 1, 1, {AGE},
        n <= :turns - {UNCOUNTED}
    {SERIES} WHERE n % 20 = 0
    """,
    f"""
    INSERT INTO audit (project_id, actor, action, subject, details, created_at)
    SELECT :project, 'sk-attune-1', 'token.created', 'chatcmpl-' || n, '{{}}', n {SERIES} WHERE n % 10 = 0
    """,
)

SELECT_INDEXES = """
    SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index
    WHERE indrelid::regclass::text = ANY(:tables)
    AND NOT EXISTS (SELECT 1 FROM pg_constraint WHERE conindid = indexrelid)
"""
INSERT_TOTAL = "INSERT INTO vote_totals (policy_id, reason, is_person) VALUES (:policy, :reason, true) RETURNING id"
COUNT_TOTALS = (
    "UPDATE vote_totals SET num_votes = (SELECT count(*) FROM feedback WHERE vote_total_id = vote_totals.id)",
    "INSERT INTO rollout_totals SELECT policy_id, origin, state, count(*), sum(tokens) FROM rollouts WHERE counted "
    "GROUP BY 1, 2, 3",
)


def list_pages(turns: int, versions: int) -> dict[str, str]:
    """Return the measured pages by name."""
    policy, rated = "/v1/policies/shop", turns - 1 if (turns - 1) % 100 != 1 else turns - 3
    return {
        "status": "/v1/status",
        "versions of a policy": f"{policy}/versions",
        "models": "/v1/models",
        "metrics": "/metrics",
        "completions, newest": "/v1/chat/completions?limit=20&order=desc",
        "completions, oldest": "/v1/chat/completions?limit=20",
        "completions by metadata": "/v1/chat/completions?metadata[order]=order-5000",
        "completions of an old version": "/v1/chat/completions?model=shop@v3&order=desc",
        "lineage of a version": f"{policy}/versions/{versions}/lineage",
        "lineage of new feedback": f"/v1/feedback/fb-{rated}/lineage",
        "lineage of old feedback": "/v1/feedback/fb-3/lineage",
        "lineage of an old completion": "/v1/chat/completions/chatcmpl-3/lineage",
        "votes": f"{policy}/votes",
        "training": f"{policy}/training",
        "updates": f"{policy}/updates",
        "audit": "/v1/audit",
        "raters": "/v1/raters",
    }


async def insert_history(db: Database, turns: int) -> int:
    """Insert the rows, and return the number of versions."""
    versions = max(1, turns // TURNS_PER_VERSION)
    async with db.write() as session:
        policy = (await session.scalars(select(Policy))).one()
        base = (await session.scalars(select(Version.id))).one()
        values = {"project": policy.project_id, "policy": policy.id, "base": base, "versions": versions}
        values |= {"turns": turns, "seconds": SECONDS_PER_TURN}
        loaded = [f"shop-v{number}" for number in range(max(1, versions - 5), versions + 1)]
        session.add(Engine(name="engine-0", url="http://127.0.0.1:9", state=EngineState.READY, loaded=loaded))
        await _execute(session, INSERT_VERSIONS, values)
        for name, reason in (("learned", "learned"), ("rejected", "version_rejected"), ("too_old", "too_old")):
            values[name] = await session.scalar(text(INSERT_TOTAL), {"policy": policy.id, "reason": reason})
        indexes = (await session.execute(text(SELECT_INDEXES), {"tables": list(TABLES)})).all()
        for name, _ in indexes:
            await session.execute(text(f"DROP INDEX {name}"))
    for first in range(1, turns + 1, CHUNK_SIZE):
        async with db.write() as session:
            chunk = values | {"first": first, "last": min(first + CHUNK_SIZE - 1, turns)}
            await _execute(session, INSERT_TURNS, chunk)
    async with db.write() as session:
        await _execute(session, (*(definition for _, definition in indexes), *COUNT_TOTALS), {})
    async with db.engine.connect() as connection:
        await (await connection.execution_options(isolation_level="AUTOCOMMIT")).execute(text("VACUUM ANALYZE"))
    return versions


async def _execute(session: AsyncSession, statements: Sequence[str], values: Mapping[str, Any]) -> None:
    """Execute the statements without the triggers of foreign keys, as `pg_restore --disable-triggers` does."""
    await session.execute(text("SET LOCAL session_replication_role = replica"))
    for statement in statements:
        used = {name: value for name, value in values.items() if f":{name}" in statement}
        await session.execute(text(statement), used)


async def prepare(settings: Settings, turns: int) -> None:
    """Insert a history of so many turns."""
    async with Database(settings.database_url, seconds=None) as db:
        async with db.write() as session:
            await bootstrap(session, settings.policy, settings.model)
        started = time.perf_counter()
        versions = await insert_history(db, turns)
        print(f"{turns:,} turns, {versions:,} versions: inserted in {time.perf_counter() - started:.0f} s", flush=True)


class Figures(NamedTuple):
    """Milliseconds of a page: the median, the 99th percentile, and the processor time, the mean of the requests."""

    median: float
    p99: float
    processor: float


def read_processor_ms(database: str) -> float:
    """Return the processor time that this process and the database's processes have used."""
    with psycopg.connect(SERVER) as server:
        rows = server.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s", [database]).fetchall()
    ticks = 0
    for (pid,) in rows:
        with suppress(FileNotFoundError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return 1000 * (time.process_time() + ticks / os.sysconf("SC_CLK_TCK"))


async def measure(settings: Settings, database: str, rounds: int) -> tuple[int, dict[str, Figures]]:
    """Return the number of turns, and the figures of each page."""
    async with Database(settings.database_url, seconds=None) as db, db.write() as session:
        project_id = (await session.scalars(select(Policy.project_id))).one()
        _, key = await create_key(session, project_id)
        newest = await session.scalar(select(Turn.id).order_by(Turn.created_at.desc()).limit(1))
        turns = int((newest or "").removeprefix("chatcmpl-"))
        versions = await session.scalar(select(func.max(Version.number))) or 0
    app = create_app(settings)
    result: dict[str, Figures] = {}
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app),
            base_url="http://attune",
            headers={"authorization": f"Bearer {key}"},
            timeout=600.0,
        ) as api,
    ):
        for name, path in list_pages(turns, versions).items():
            times: list[float] = []
            before = 0.0
            for number in range(rounds + 2):
                if number == 2:  # the first ones fill caches
                    before = read_processor_ms(database)
                started = time.perf_counter()
                answer = await api.get(path)
                times.append(1000 * (time.perf_counter() - started))
                assert answer.status_code in (200, 503), (path, answer.text)
                if sum(times) > 20_000 and len(times) > 4:
                    break
            times = times[2:]
            processor = (read_processor_ms(database) - before) / len(times)
            p99 = quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else times[0]
            result[name] = Figures(median(times), p99, processor)
    return turns, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, [10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    results: dict[int, dict[str, Figures]] = {}
    for name, settings in iterate_databases(args, "attune_growth", prepare):
        number, pages = asyncio.run(measure(settings, name, args.rounds))
        results[number] = pages
        print(f"{name}: load average {os.getloadavg()[0]:.1f}", flush=True)
    load = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    print(f"{load}; {args.rounds} requests a page, p50 / p99 ms (processor time)\n")
    print(f"| page | {' | '.join(f'{turns:,} turns' for turns in results)} |")
    print(f"|---|{'---|' * len(results)}")
    for page in next(iter(results.values())):
        figures = (result[page] for result in results.values())
        cells = (f"{one.median:.1f} / {one.p99:.1f} ({one.processor:.1f})" for one in figures)
        print(f"| {page} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
