"""Turns → Judgements: what the sources that need no feedback will be asked about a turn that has ended."""

from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED, EndpointConfig, RewardsConfig
from alignment.signals.rules import asked_about
from app.core.database import dialect_insert, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Origin, Policy, Turn, TurnState, new_id
from app.projects.consent import NO_CONSENT
from app.training.policy_rewards import rewards_of
from workers.rollouts import group_sampling, shadow_replies


async def ask(session: AsyncSession, most: int, settings: Settings) -> int:
    """Write down the questions about at most so many turns. Returns how many turns were looked at."""
    ended = list(
        await session.execute(
            select(
                *(Turn.id, Turn.policy_id, Turn.parent_id, Turn.exclusion_reason, Turn.deleted_at, Turn.completion_id),
                *(Turn.origin, Turn.state, Turn.choice_index, Turn.finished_at, Turn.shadow_of_id),
            )
            .where(~Turn.processed, Turn.state != TurnState.OPEN)
            .order_by(Turn.finished_at)
            .limit(most)
            .with_for_update(skip_locked=True, key_share=True)  # what is said of them meanwhile need not wait
        )
    )
    if not ended:
        return 0
    policies = list(await session.scalars(select(Policy).where(Policy.id.in_({row.policy_id for row in ended}))))
    configs = {policy.id: rewards_of(policy, settings) for policy in policies}
    questions = [question for row in ended for question in _questions(row, configs[row.policy_id])]
    if questions:
        await _write(session, questions)
        enqueue_after_commit(session, "judge")
        if any(question["source"] == LEARNED for question in questions):
            enqueue_after_commit(session, "train")  # the trainer has the reward model
    await group_sampling.cast(session, ended, policies, settings)
    await shadow_replies.cast(session, ended, policies, settings)
    await session.execute(
        update(Turn)
        .where(Turn.id.in_([row.id for row in ended]))
        .values(processed=True)
        .execution_options(synchronize_session=False)
    )
    return len(ended)


def _questions(turn: Any, config: RewardsConfig) -> list[dict[str, Any]]:
    """About the turn itself; and about the one before it, for which this one's prompt is evidence."""
    asked: list[dict[str, Any]] = []
    if turn.exclusion_reason == NO_CONSENT or turn.deleted_at is not None or turn.origin == Origin.PROMPT_SET:
        return asked
    for source in config.sources:
        if source.type == "next_turn":
            about = turn.parent_id
        elif source.type == "explicit":
            about = None
        else:
            share = source.share if isinstance(source, EndpointConfig) else 1.0
            # Replies to one prompt are asked about together, or not at all.
            about = turn.id if asked_about(turn.shadow_of_id or turn.completion_id, source.name, share) else None
        if about is not None:
            asked.append({"turn_id": about, "policy_id": turn.policy_id, "source": source.name})
    return asked


async def _write(session: AsyncSession, questions: list[dict[str, Any]]) -> None:
    """A question that was asked before is not asked again."""
    rows = [
        question | {"id": new_id("jdg"), "state": JudgementState.OPEN, "details": {}, "attempt": 0, "fence": 0}
        for question in questions
    ]
    statement = dialect_insert(session, Judgement.__table__).values({"due_at": now(), "created_at": now()})
    await session.execute(statement.on_conflict_do_nothing(index_elements=["turn_id", "source"]), rows)
