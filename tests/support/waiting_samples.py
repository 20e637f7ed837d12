"""Turns and samples in numbers, for tests and benchmarks of what they cost."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import insert, text, update

from app.core.database import now
from app.models import Sample, Turn
from tests.support.deployment import Harness
from tests.support.turns import make_turn


async def analyze(harness: Harness, table: str = "samples") -> None:
    """Give the planner its statistics, and remove what earlier versions of rows have left in PostgreSQL's indexes."""
    async with harness.db.engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text("ANALYZE" if harness.db.embedded else "VACUUM ANALYZE"))
        if not harness.db.embedded:  # the pages of the rows of other tests make an index more expensive than others
            await connection.execute(text(f"REINDEX TABLE {table}"))


async def forget_statistics(harness: Harness) -> None:
    """Let SQLite plan without statistics, as it does where nobody has run ANALYZE. PostgreSQL keeps its own."""
    if harness.db.embedded:
        async with harness.db.write() as session:
            await session.execute(text("DELETE FROM sqlite_stat1"))
        await harness.db.engine.dispose()  # connections have read them


async def add_turns(harness: Harness, count: int, prefix: str = "t") -> list[Turn]:
    """Insert finished turns of the policy that serves, the oldest first."""
    policy, version = await harness.policy(), await harness.serving()
    turns = [make_turn(policy, version, f"chatcmpl-{prefix}-{number:06}") for number in range(count)]
    async with harness.db.write() as session:
        session.add_all(turns)
    return turns


async def add_samples(
    harness: Harness, count: int, reward: Callable[[int], float], prefix: str = "t", **values: object
) -> None:
    """Insert open samples, one for each new turn, of a rater each. `values` override their columns."""
    turns = await add_turns(harness, count, prefix)
    rows: list[dict[str, Any]] = [
        {
            "turn_id": turn.id,
            "policy_id": turn.policy_id,
            "version_id": turn.version_id,
            "reward": reward(number),
            "ready_at": float(number),
            "rater": f"HUMAN/{prefix}-{number}",
            **values,
        }
        for number, turn in enumerate(turns)
    ]
    async with harness.db.write() as session:
        for start in range(0, count, 500):
            await session.execute(insert(Sample), rows[start : start + 500])
        await session.execute(update(Turn).values(created_at=now()))
        await session.execute(text("ANALYZE"))
