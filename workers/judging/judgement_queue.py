"""Judgements that wait: created for finished turns, and claimed when due, with a limit for each source.

The trainer claims the judgements of reward models, see `workers.judging.sources.reward_model`.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED, EndpointConfig, JudgeSource, RewardsConfig
from alignment.signals.eligibility import is_in_share
from app.core.database import Database, dialect_insert, now
from app.core.jobs import enqueue_after_commit
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Origin, Policy, Turn, new_id
from app.projects.consent import NO_CONSENT
from app.training.reward_config import effective_rewards
from workers.queue.leased_job import Lease, claim_row

MAX_RUNNING = 16
MAX_RUNNING_PER_SOURCE = 4  # so that a slow source leaves room for the others
SourceKey = tuple[str, str]  # (policy id, source name)


@dataclass(frozen=True)
class JudgementLease(Lease):
    """A claimed judgement. `num_requests` counts the requests of earlier attempts."""

    turn_id: str
    policy_id: str
    source: str
    num_requests: int = 0


async def create_judgements(session: AsyncSession, turns: Sequence[Any], configs: Mapping[str, RewardsConfig]) -> None:
    """Create the judgements of finished turns. `turns` are rows of turn columns, `configs` is by policy."""
    rows = [row for turn in turns for row in _judgement_rows(turn, configs[turn.policy_id])]
    if not rows:
        return
    await _insert(session, rows)
    enqueue_after_commit(session, "judge")
    if any(row["source"] == LEARNED for row in rows):
        enqueue_after_commit(session, "train")  # the trainer runs the reward model


def _judgement_rows(turn: Any, config: RewardsConfig) -> list[dict[str, Any]]:
    """Return the judgements of the turn itself, and of the turn before it, for which its prompt is evidence."""
    rows: list[dict[str, Any]] = []
    if turn.exclusion_reason == NO_CONSENT or turn.deleted_at is not None or turn.origin == Origin.PROMPT_SET:
        return rows
    for source in config.sources:
        if source.type == "next_turn":
            turn_id = turn.parent_id
        elif source.type == "explicit":
            turn_id = None
        else:
            share = source.share if isinstance(source, EndpointConfig) else 1.0
            # The replies to one prompt are judged together or not at all.
            is_chosen = is_in_share(turn.shadow_of_id or turn.completion_id, source.name, share)
            turn_id = turn.id if is_chosen else None
        if turn_id is not None:
            rows.append({"turn_id": turn_id, "policy_id": turn.policy_id, "source": source.name})
    return rows


async def _insert(session: AsyncSession, rows: list[dict[str, Any]]) -> None:
    """Insert the judgements that do not exist yet."""
    defaults = {"state": JudgementState.OPEN, "details": {}, "attempt": 0, "fence": 0}
    statement = dialect_insert(session, Judgement.__table__).values({"due_at": now(), "created_at": now()})
    await session.execute(
        statement.on_conflict_do_nothing(index_elements=["turn_id", "source"]),
        [row | defaults | {"id": new_id("jdg")} for row in rows],
    )


async def claim_judgements(
    db: Database, settings: Settings, owner: str, running: Counter[SourceKey], paused: Collection[SourceKey]
) -> list[tuple[JudgementLease, ...]]:
    """Claim due judgements up to the limits. Replies that are compared with each other are claimed together.

    `running` counts the jobs of each source; sources in `paused` are left out.
    """
    claimed: list[tuple[JudgementLease, ...]] = []
    running = running.copy()
    async with db.write() as session:
        while (capacity := MAX_RUNNING - running.total()) > 0:
            full = {key for key, count in running.items() if count >= MAX_RUNNING_PER_SOURCE}
            rows = await _read_due(session, capacity, full | set(paused))
            for row in rows:
                if running[row.policy_id, row.source] >= MAX_RUNNING_PER_SOURCE:
                    continue
                leases = await _claim(session, settings, owner, row)
                if leases:
                    running[row.policy_id, row.source] += 1
                    claimed.append(leases)
            if len(rows) < capacity:
                break
    return claimed


async def _read_due(session: AsyncSession, limit: int, excluded: Collection[SourceKey]) -> list[Judgement]:
    conditions: list[ColumnElement[bool]] = [Judgement.source != LEARNED]
    if excluded:
        conditions.append(tuple_(Judgement.policy_id, Judgement.source).not_in(sorted(excluded)))
    rows = await session.scalars(
        select(Judgement)
        .where(Judgement.state == JudgementState.OPEN, Judgement.due_at <= now(), lease_is_free(Judgement), *conditions)
        .order_by(Judgement.due_at, Judgement.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return list(rows)


async def _claim(session: AsyncSession, settings: Settings, owner: str, row: Judgement) -> tuple[JudgementLease, ...]:
    leases = [await _claim_one(session, settings, owner, row)]
    if leases[0] is not None and await _is_comparison(session, settings, row):
        others = await _read_other_choices(session, row)
        leases += [await _claim_one(session, settings, owner, other) for other in others]
    return tuple(lease for lease in leases if lease is not None)


async def _claim_one(session: AsyncSession, settings: Settings, owner: str, row: Judgement) -> JudgementLease | None:
    lease = await claim_row(session, Judgement, row, owner=owner, settings=settings)
    if lease is None:
        return None
    num_requests = row.details.get("requests", 0)
    return JudgementLease(
        lease.id, lease.fence, lease.attempt, row.turn_id, row.policy_id, row.source, num_requests=num_requests
    )


async def _is_comparison(session: AsyncSession, settings: Settings, row: Judgement) -> bool:
    policy = await session.get_one(Policy, row.policy_id)
    source = effective_rewards(policy, settings).source(row.source)
    return isinstance(source, JudgeSource) and source.compare


async def _read_other_choices(session: AsyncSession, row: Judgement) -> list[Judgement]:
    """Return the free judgements by the same source of the other replies of the completion."""
    completion_id = select(Turn.completion_id).where(Turn.id == row.turn_id).scalar_subquery()
    rows = await session.scalars(
        select(Judgement)
        .join(Turn, Turn.id == Judgement.turn_id)
        .where(
            Turn.completion_id == completion_id,
            Judgement.source == row.source,
            Judgement.id != row.id,
            Judgement.state == JudgementState.OPEN,
            lease_is_free(Judgement),
        )
        .order_by(Judgement.id)
        .with_for_update(of=Judgement, skip_locked=True)
    )
    return list(rows)
