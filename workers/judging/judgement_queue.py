"""Judgements that wait: created for finished turns, and claimed when due, with a limit for each source.

The trainer claims the judgements of reward models, see `workers.judging.reward_model_source`.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED, EndpointConfig, JudgeSource, RewardsConfig
from alignment.signals.combine_rewards import is_in_share
from app.core.database import Database, dialect_insert, now
from app.core.jobs import enqueue_after_commit
from app.core.leases import lease_is_free
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Origin, Policy, Turn, new_id
from app.projects.service import NO_CONSENT
from app.training.policy_config import effective_rewards
from workers.queue.leased_job import claim_row, is_due

MAX_RUNNING = 16
MAX_RUNNING_PER_SOURCE = 4  # so that a slow source leaves room for the others
SourceKey = tuple[str, str]  # (policy id, source name)


async def create_judgements(session: AsyncSession, turns: Sequence[Any], configs: Mapping[str, RewardsConfig]) -> None:
    """Create the judgements of finished turns. `turns` are rows of turn columns, `configs` is by policy."""
    defaults = {"state": JudgementState.OPEN, "details": {}, "attempt": 0, "fence": 0}
    rows = [
        {"id": new_id("jdg"), "turn_id": turn_id, "policy_id": turn.policy_id, "source": source, **defaults}
        for turn in turns
        for turn_id, source in _sources_to_ask(turn, configs[turn.policy_id])
    ]
    if not rows:
        return
    statement = dialect_insert(session, Judgement.__table__).values({"due_at": now(), "created_at": now()})
    await session.execute(statement.on_conflict_do_nothing(index_elements=["turn_id", "source"]), rows)
    enqueue_after_commit(session, "judge")
    if any(row["source"] == LEARNED for row in rows):
        enqueue_after_commit(session, "train")  # the trainer runs the reward model


def _sources_to_ask(turn: Any, config: RewardsConfig) -> list[tuple[str, str]]:
    """Return (turn id, source) for the turn itself, and for the turn before it, for which its prompt is evidence."""
    if turn.exclusion_reason == NO_CONSENT or turn.deleted_at is not None or turn.origin == Origin.PROMPT_SET:
        return []
    pairs: list[tuple[str, str]] = []
    for source in config.sources:
        if source.type == "next_turn":
            if turn.parent_id is not None:
                pairs.append((turn.parent_id, source.name))
        elif source.type != "explicit":
            share = source.share if isinstance(source, EndpointConfig) else 1.0
            # The replies to one prompt are judged together or not at all.
            if is_in_share(turn.shadow_of_id or turn.completion_id, source.name, share):
                pairs.append((turn.id, source.name))
    return pairs


async def claim_judgements(
    db: Database, settings: Settings, owner: str, running: Counter[SourceKey], paused: Collection[SourceKey]
) -> list[tuple[Judgement, ...]]:
    """Claim due judgements up to the limits. Replies that are compared with each other are claimed together.

    `running` counts the jobs of each source; sources in `paused` are left out.
    """
    claimed: list[tuple[Judgement, ...]] = []
    running = running.copy()
    async with db.write() as session:
        while (capacity := MAX_RUNNING - running.total()) > 0:
            full = {key for key, count in running.items() if count >= MAX_RUNNING_PER_SOURCE}
            due = await _read_due(session, capacity, full | set(paused))
            for judgement in due:
                key = judgement.policy_id, judgement.source
                if running[key] < MAX_RUNNING_PER_SOURCE and await claim_row(session, judgement, owner, settings):
                    running[key] += 1
                    others = await _claim_compared(session, settings, owner, judgement)
                    claimed.append((judgement, *others))
            if len(due) < capacity:
                break
    return claimed


async def _read_due(session: AsyncSession, limit: int, excluded: Collection[SourceKey]) -> list[Judgement]:
    query = select(Judgement).where(is_due(Judgement), Judgement.source != LEARNED)
    if excluded:
        query = query.where(tuple_(Judgement.policy_id, Judgement.source).not_in(sorted(excluded)))
    query = query.order_by(Judgement.due_at, Judgement.id).limit(limit)
    return list(await session.scalars(query.with_for_update(skip_locked=True)))


async def _claim_compared(
    session: AsyncSession, settings: Settings, owner: str, judgement: Judgement
) -> list[Judgement]:
    """Claim the judgements by the same source of the other replies of the completion, if the source compares them."""
    policy = await session.get_one(Policy, judgement.policy_id)
    source = effective_rewards(policy, settings).source(judgement.source)
    if not isinstance(source, JudgeSource) or not source.compare:
        return []
    completion_id = select(Turn.completion_id).where(Turn.id == judgement.turn_id).scalar_subquery()
    others = await session.scalars(
        select(Judgement)
        .join(Turn, Turn.id == Judgement.turn_id)
        .where(
            Turn.completion_id == completion_id,
            Judgement.source == judgement.source,
            Judgement.id != judgement.id,
            Judgement.state == JudgementState.OPEN,
            lease_is_free(Judgement),
        )
        .order_by(Judgement.id)
        .with_for_update(of=Judgement, skip_locked=True)
    )
    return [other for other in others if await claim_row(session, other, owner, settings)]
