"""Measure the totals that canaries and shadow deployments are decided by, as the turns of their versions grow.

Each size has a new PostgreSQL database: half of the turns are of the version that serves, half of its canary, all since
the canary began, and a vote on each fifth; a tenth as many replies of a third version in shadow, each judged beside the
reply that it copies. The statements run as in a request (`database.request_timeout_seconds`) and one at a time:
`python -m tests.benchmarks.canary_totals --turns 100000 1000000 10000000` (ten million: 14 GB, ten minutes to insert).
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from statistics import median
from typing import Any

import httpx2
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from alignment.release.canary import CanaryConfig
from alignment.release.shadow import ShadowConfig
from app.core.database import Database
from app.core.settings import Settings
from app.deployments import comparison
from app.main import create_app
from app.models import Deployment, Policy, Version
from app.projects.service import bootstrap, create_key
from tests.benchmarks.grown_databases import add_arguments, iterate_databases
from tests.benchmarks.growth import SELECT_INDEXES

CHUNK_SIZE = 250_000
TABLES = ("turns", "rewards", "rollouts", "judgements")
REWARDS = RewardsConfig.model_validate(
    {"sources": [{"type": "explicit"}, {"type": "rule", "name": "ended", "function": "ended"}]}
)
SERIES = "FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) AS n"
AGE = "extract(epoch from clock_timestamp()) - 0.01 * (:turns - n)"
COLUMNS = """
    id, project_id, policy_id, version_id, completion_id, choice_index, conversation_id, engine, origin, state, stream,
    messages, sampling, request_params, request_metadata, num_prompt_tokens, num_output_tokens, end_user, shadow_of_id,
    finished_at, created_at, processed, output_ids
"""
VALUES = """
    'engine-0', :origin, CASE WHEN n % 50 = 1 THEN 'failed' ELSE 'done' END, false,
    '[{"role": "user", "content": "When are you open?"}]', '{"temperature": 1.0}', '{}', '{}', 64, 40 + n % 7
"""
TURNS = f"""
    INSERT INTO turns ({COLUMNS})
    SELECT 'chatcmpl-' || n, :project, :policy, CASE WHEN n % 2 = 0 THEN :serving ELSE 'ver-canary' END,
        'chatcmpl-' || n, 0, 'talk-' || n / 3, {VALUES}, 'user-' || n % 50000, NULL, {AGE} + 1, {AGE}, true,
        decode(repeat('02000000', 40), 'hex')
    {SERIES}
"""
VOTES = f"""
    INSERT INTO rewards (id, turn_id, source, reward_source, feedback_seq, rater, value, weight, created_at)
    SELECT 'rew-' || n, 'chatcmpl-' || n, 'default/HUMAN/user-' || n % 50000, 'explicit', n,
        'HUMAN/user-' || n % 50000, CASE WHEN n % 3 = 0 THEN -1 ELSE 1 END, 1, {AGE}
    {SERIES} WHERE n % 5 = 0
"""
SHADOWS = f"""
    INSERT INTO turns ({COLUMNS})
    SELECT 'shadow-' || n, :project, :policy, 'ver-shadow', 'shadow-' || n, 0, 'talk-' || n / 3, {VALUES},
        'user-' || n % 50000, 'chatcmpl-' || n, {AGE} + 2, {AGE} + 1, true, decode(repeat('02000000', 40), 'hex')
    {SERIES} WHERE n % 10 = 0
"""
ROLLOUTS = f"""
    INSERT INTO rollouts (id, policy_id, origin, choice_index, state, due_at, expires_at, tokens, settled_at, attempt,
        fence, created_at, counted, duration_seconds)
    SELECT 'shadow-' || n, :policy, 'shadow', 0, 'done', n, n, 40, {AGE}, 1, 1, {AGE}, true, 1.0
    {SERIES} WHERE n % 10 = 0
"""
JUDGED = f"""
    INSERT INTO rewards (id, turn_id, source, reward_source, value, weight, created_at)
    SELECT 'rew-' || turn || n, turn || n, 'ended', 'ended', CASE WHEN n % 4 = 0 THEN 1 ELSE 0 END, 1, {AGE}
    {SERIES}, (VALUES ('chatcmpl-'), ('shadow-')) AS pair (turn) WHERE n % 10 = 0
"""
JUDGEMENTS = f"""
    INSERT INTO judgements (id, turn_id, policy_id, source, state, due_at, details, settled_at, attempt, fence,
        created_at)
    SELECT 'jud-' || turn || n, turn || n, :policy, 'ended', CASE WHEN n % 700 = 0 THEN 'open' ELSE 'done' END, 1,
        '{{}}', 1, 1, 1, {AGE}
    {SERIES}, (VALUES ('chatcmpl-'), ('shadow-')) AS pair (turn) WHERE n % 10 = 0
"""
VERSIONS = """
    INSERT INTO versions (id, policy_id, number, parent_id, state, adapter_name, metrics, timings, live_at,
        shadow_since, attempt, fence, created_at)
    VALUES ('ver-canary', :policy, 1, :serving, 'canary', 'shop-v1', '{}', '{}', NULL, NULL, 1, 1, 1),
        ('ver-shadow', :policy, 2, 'ver-canary', 'shadow', 'shop-v2', '{}', '{}', NULL, 1, 1, 1, 1)
"""
CANARY = """
    UPDATE deployments SET canary_version_id = 'ver-canary', canary_since = 1, canary_share = 0.5, canary_watched = true
"""


async def insert_history(db: Database, turns: int) -> None:
    async with db.write() as session:
        policy = (await session.scalars(select(Policy))).one()
        values: dict[str, Any] = {"project": policy.project_id, "policy": policy.id, "turns": turns}
        values["serving"] = (await session.scalars(select(Version.id))).one()
        for statement in (VERSIONS, CANARY):
            await _execute(session, statement, values)
        indexes = (await session.execute(text(SELECT_INDEXES), {"tables": list(TABLES)})).all()
        for name, _ in indexes:
            await session.execute(text(f"DROP INDEX {name}"))
    for first in range(1, turns + 1, CHUNK_SIZE):
        async with db.write() as session:
            chunk = values | {"first": first, "last": min(first + CHUNK_SIZE - 1, turns)}
            for statement in (TURNS, VOTES, SHADOWS, ROLLOUTS, JUDGED, JUDGEMENTS):
                origin = "shadow" if statement is SHADOWS else "chat"
                await _execute(session, statement, chunk | {"origin": origin})
    for _, definition in indexes:
        async with db.write() as session:
            await session.execute(text("SET LOCAL maintenance_work_mem = '512MB'"))
            await session.execute(text(definition))
    async with db.engine.connect() as connection:
        await (await connection.execution_options(isolation_level="AUTOCOMMIT")).execute(text("VACUUM ANALYZE"))


async def _execute(session: AsyncSession, statement: str, values: Mapping[str, Any]) -> None:
    """Execute a statement without the triggers of foreign keys, as `pg_restore --disable-triggers` does."""
    await session.execute(text("SET LOCAL session_replication_role = replica"))
    await session.execute(text("SET LOCAL synchronous_commit = off"))
    await session.execute(text(statement), {name: one for name, one in values.items() if f":{name}" in statement})


async def prepare(settings: Settings, turns: int) -> None:
    async with Database(settings.database_url, seconds=None) as db:
        async with db.write() as session:
            await bootstrap(session, settings.policy, settings.model)
        started = time.perf_counter()
        await insert_history(db, turns)
        async with db.read() as session:
            size = await session.scalar(text("SELECT pg_size_pretty(pg_database_size(current_database()))"))
        print(f"{turns:,} turns, {size}: inserted in {time.perf_counter() - started:.0f} s", flush=True)


async def time_of(act: Callable[[], Awaitable[object]], rounds: int) -> str:
    """Return the first time, and the median of the later ones, in milliseconds; or what went wrong."""
    times: list[float] = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        try:
            await act()
        except Exception as error:
            return f"{type(error).__name__} after {time.perf_counter() - started:.1f} s"
        times.append(1000 * (time.perf_counter() - started))
    return f"{times[0]:,.0f} / {median(times[1:]):,.0f}"


async def measure(settings: Settings, rounds: int) -> dict[str, str]:
    async with Database(settings.database_url, seconds=None) as db, db.write() as session:
        policy = (await session.scalars(select(Policy))).one()
        _, key = await create_key(session, policy.project_id)
    app, results = create_app(settings), dict[str, str]()
    async with Database(settings.database_url, seconds=settings.database.request_timeout_seconds) as db:

        async def decide_canary() -> None:
            async with db.read() as session:
                deployment = await session.get_one(Deployment, policy.id)
                await comparison.evaluate_canary(session, deployment, CanaryConfig())

        async def decide_shadow() -> None:
            async with db.read() as session:
                serving = (await session.get_one(Deployment, policy.id)).version_id
                version = await session.get_one(Version, "ver-shadow")
                await comparison.evaluate_shadow(session, version, serving, ShadowConfig(), REWARDS)

        results["decision about a canary"] = await time_of(decide_canary, rounds)
        results["decision about a version in shadow"] = await time_of(decide_shadow, rounds)
    transport = httpx2.ASGITransport(app)
    headers = {"authorization": f"Bearer {key}"}
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://attune", headers=headers, timeout=600.0) as api,
    ):
        for path in (
            "/v1/status",
            "/v1/policies/shop/versions",
            "/v1/versions/compare?version=shop@v0&version=shop@v1",
        ):

            async def get(path: str = path) -> None:
                (await api.get(path)).raise_for_status()

            results[f"`{path.partition('?')[0]}`"] = await time_of(get, rounds)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, [100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results: dict[str, dict[str, str]] = {}
    for name, settings in iterate_databases(args, "attune_canary", prepare):
        results[name] = asyncio.run(measure(settings, args.rounds))
        print(name, results[name], f"load average {os.getloadavg()[0]:.1f}", flush=True)
    print(f"| milliseconds, first / later | {' | '.join(results)} |")
    print(f"|---|{'---|' * len(results)}")
    for act in next(iter(results.values())):
        print(f"| {act} | {' | '.join(result[act] for result in results.values())} |")


if __name__ == "__main__":
    main()
