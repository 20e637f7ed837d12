"""Measure what an assembly costs as the samples that wait become more: `make bench-waiting`.

One process, a new database for each case and number of samples, each sample with a turn and a rater of its own. On
SQLite the work is that of its virtual machine, in steps of 20 operations: it does not depend on other work of the
machine. On PostgreSQL there are the times alone. A line of JSON for each result is appended to `--out`, and results
that are there are not measured again: a run that was ended continues.
"""

import argparse
import asyncio
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import select, text

from alignment.config.policy_gradient_algorithms import GRPOConfig
from app.core.database import Database
from app.core.migrate import upgrade
from app.core.settings import Settings
from app.models import Deployment, Policy
from app.projects.service import bootstrap
from tests.benchmarks.deployment import database
from tests.support.many_rows import NUMBERS
from tests.support.statement_work import count_work
from workers.training import assemble as assemble_module
from workers.training.assemble import assemble

CASES = {
    "a batch": "every second reward is -1: the next batch is frozen",
    "equal": "all rewards are 1: there is no batch",
    "groups": "GRPO, and no two replies to one prompt: there is no batch",
    "consent": "the project has withdrawn its consent: there is no batch",
    "automated": "all rewards are 1 and come from no person: there is no batch",
    "returned": "a batch, and all samples have returned from one before: the next batch is frozen",
    "new head": "GRPO, no two replies to one prompt, and the second look is at another head: there is no batch",
}
WITH_BATCH, WITH_GROUPS = ("a batch", "returned"), ("groups", "new head")
INSERTS = (
    f"""
    INSERT INTO turns (id, project_id, policy_id, version_id, completion_id, choice_index, engine, state, stream,
        messages, sampling, created_at, finished_at, processed)
    {NUMBERS} SELECT 'turn-' || n, :project, :policy, :version, 'turn-' || n, 0, 'engine-0', 'done', :no,
        '[]', '{{}}', :time, :time, :yes FROM series
    """,
    f"""
    INSERT INTO samples (turn_id, policy_id, version_id, reward, state, ready_at, rater, group_id, created_at)
    {NUMBERS} SELECT 'turn-' || n, :policy, :version, CASE WHEN :equal = 1 OR n % 2 = 0 THEN 1.0 ELSE -1.0 END, 'open',
        :time - n, 'HUMAN/p-' || n, 'turn-' || n, :time FROM series
    """,
)
INSERT_REWARDS = (
    f"""
    INSERT INTO rewards (id, turn_id, source, reward_source, rater, value, weight, created_at)
    {NUMBERS} SELECT 'rew-' || n, 'turn-' || n, 'default/HUMAN/p-' || n, 'explicit', 'HUMAN/p-' || n, 1, 1, :time
    FROM series
    """,
)
INSERT_RETURNED = (
    """
    INSERT INTO batches (id, policy_id, parent_id, state, num_samples, metrics, attempt, fence, created_at)
    VALUES ('bat-0', :policy, :version, 'trained', :count, '{}', 1, 1, :time)
    """,
    "INSERT INTO batch_turns (batch_id, turn_id) SELECT 'bat-0', turn_id FROM samples WHERE policy_id = :policy",
    "UPDATE samples SET num_returns = 1",
)


async def measure(url: str, folder: str, case: str, count: int) -> list[dict[str, Any]]:
    """Return the work and the time of the first look at the samples and of a second one a minute later."""
    settings = Settings(home=Path(folder), database={"url": url})
    if case in WITH_GROUPS:
        settings = settings.replace({"algorithm": GRPOConfig()})
    looks = []
    async with Database(url, seconds=None) as db:
        async with db.write() as session:
            await bootstrap(session, settings.policy, settings.model)
        async with db.write() as session:
            policy = (await session.scalars(select(Policy))).one()
            deployment = (await session.scalars(select(Deployment))).one()
            ids = {"project": policy.project_id, "policy": policy.id, "version": deployment.version_id}
            values = {
                **ids,
                "count": count,
                "time": time.time(),
                "equal": int(case in ("equal", "automated")),
                "no": False,
                "yes": True,
            }
            statements = list(INSERTS)
            statements += ["UPDATE samples SET rater = NULL"] if case == "automated" else INSERT_REWARDS
            statements += INSERT_RETURNED if case == "returned" else ()
            for statement in statements:
                await session.execute(text(statement), {k: v for k, v in values.items() if f":{k}" in statement})
            if case == "consent":
                await session.execute(text("UPDATE projects SET train = false"))
            await session.execute(text("ANALYZE"))
        for look in ("first", "second"):
            # PostgreSQL's work is not counted: each statement would be run a second time, to explain it.
            async with count_work(db) if db.embedded else nullcontext() as work:
                began = time.perf_counter()
                found = await assemble(db, settings)
                seconds = time.perf_counter() - began
            assert found == (1 if case in WITH_BATCH else 0)
            looks.append({"look": look, "work": work.amount if work else None, "ms": round(1000 * seconds, 1)})
            async with db.write() as session:
                await session.execute(text("UPDATE batches SET state = 'trained'"))
                if case == "new head":
                    await session.execute(text("UPDATE assembly_looks SET conditions = '', next_at = 0"))
    return looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--out", type=Path, default=Path("waiting.jsonl"))
    options = parser.parse_args()
    assemble_module.RUN_SECONDS = math.inf  # the first look is one run, however slow the machine is
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {(row["database"], row["case"], row["samples"]) for row in map(json.loads, lines)}
    for kind in options.databases:
        for case in CASES:
            for count in options.samples:
                if (kind, case, count) in done:
                    continue
                with TemporaryDirectory() as folder, database(kind, Path(folder)) as url:
                    upgrade(url)
                    looks = asyncio.run(measure(url, folder, case, count))
                with options.out.open("a") as file:
                    for look in looks:
                        row = {"database": kind, "case": case, "samples": count, **look}
                        print(json.dumps(row), file=file)
                        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
