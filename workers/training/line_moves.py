"""Finish the moves of samples after rollbacks and returns, step after step. A run that ends early is continued."""

import time

from sqlalchemy import select

from app.core.database import Database
from app.core.run_each import run_each, take_turns
from app.models import LineMove, Policy
from app.policies.locks import lock_policy
from app.training.line_moves import make_step, plan_step


async def finish_moves(db: Database, end: float) -> bool:
    """Make the steps of all policies, the projects taking turns, until `end` on the monotonic clock.

    Returns whether no move is left. Each step is planned before its transaction, in which others wait.
    """
    is_moving = Policy.id.in_(select(LineMove.policy_id))
    async with db.read() as session:
        query = select(Policy.project_id, Policy.id).where(is_moving).order_by(Policy.id)
        policies = take_turns((await session.execute(query)).tuples())

    async def finish(policy_id: str) -> int:
        while time.monotonic() <= end:
            async with db.read_snapshot() as session:
                step = await plan_step(session, policy_id)
            if step is None:
                return 0
            async with db.write() as session:
                await make_step(await lock_policy(session, policy_id), step)
            await db.let_others_write()
        return 1

    return await run_each(policies, finish, "the moves of") == 0
