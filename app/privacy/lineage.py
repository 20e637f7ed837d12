"""Queries between feedback and versions. They follow the rows of batches and their turns.

A batch keeps the turns that its version learned from, also when the samples have returned and are used again.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field
from sqlalchemy import Executable, and_, exists, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased, load_only

from alignment.config.rewards import EXPLICIT, ExplicitSource
from app.core.database import chunked
from app.core.pagination import apply_keyset
from app.core.planner import prefer_indexes
from app.core.rows import AnySelect
from app.core.settings import Settings
from app.feedback.effective import is_effective
from app.models import (
    NUMERIC_KINDS,
    RANKING_KINDS,
    Batch,
    BatchState,
    BatchTurn,
    Episode,
    Feedback,
    FeedbackRank,
    Policy,
    Sample,
    Turn,
    Version,
)
from app.policies.overrides import effective_settings
from app.policies.references import format_reference
from app.policies.repository import select_descendants
from app.training.policy_config import effective_rewards

MAX_VERSIONS = 500  # in one answer: every later version descends from an early one
MAX_SEQS = 500  # sequence numbers in one statement, which names them several times
Kinds = tuple[str, ...]


class TrainedVersionView(BaseModel):
    object: Literal["trained_version"] = "trained_version"
    version: str
    state: str
    direct: bool = Field(description="through its own batch; else through an ancestor")
    tainted_at: float | None


async def list_reward_kinds(session: AsyncSession, project_id: str, settings: Settings) -> Kinds:
    """Return the kinds of feedback that become rewards under the reward settings of the project's policies."""
    kinds = {*NUMERIC_KINDS, *RANKING_KINDS}
    for policy in await session.scalars(select(Policy).where(Policy.project_id == project_id)):
        source = effective_rewards(policy, settings).source(EXPLICIT)
        if isinstance(source, ExplicitSource):
            kinds |= {"correction"} if source.correction is not None else set()
            kinds |= {"categorical"} if source.labels else set()
    return tuple(sorted(kinds))


def select_training_feedback(batch_id: str, kinds: Kinds, after: tuple[str, str], limit: int) -> Executable:
    """Return a query for the turns that a version learned from, with the feedback effective when its batch was frozen.

    The columns of the feedback are null for a sample without any; `number` is that of the turn's version. Up to
    `limit + 1` rows come after the (turn id, feedback id) `after`.
    """
    effective = union_all(*[query.where(Batch.id == batch_id) for query in _trained_feedback(kinds)]).cte("effective")
    turn_version = aliased(Version)
    turn = (Turn.id.label("turn_id"), Turn.completion_id, Turn.choice_index, Turn.origin, Turn.end_user)
    feedback = (Feedback.id.label("feedback_id"), Feedback.seq, Feedback.kind, Feedback.value)
    source = (Feedback.source_kind, Feedback.source_id, Feedback.created_at.label("feedback_at"))
    query = (
        select(*turn, Turn.deleted_at, turn_version.number, Sample.reward, *feedback, *source)
        .select_from(BatchTurn)
        .join(Batch, Batch.id == BatchTurn.batch_id)
        .join(Sample, Sample.turn_id == BatchTurn.turn_id)
        .join(Turn, Turn.id == BatchTurn.turn_id)
        .join(turn_version, turn_version.id == Turn.version_id)
        .outerjoin(effective, effective.c.turn_id == Turn.id)
        .outerjoin(Feedback, Feedback.seq == effective.c.seq)
        .where(Batch.id == batch_id, Batch.state == BatchState.TRAINED)
    )
    return apply_keyset(query, (Turn.id, func.coalesce(Feedback.id, "")), after, limit)


def _rated_turns() -> list[AnySelect]:
    """Return queries for (turn id, feedback seq, time of the feedback) of all turns that feedback is about.

    There is one for feedback on a single turn, one for rankings, and one each for whole conversations and episodes.
    """
    rated: Any = select(Turn.id.label("turn_id"), Feedback.seq, Feedback.created_at).select_from(Turn)
    rank = FeedbackRank.turn_id == Turn.id
    same_conversation = and_(Feedback.project_id == Turn.project_id, Feedback.conversation_id == Turn.conversation_id)
    same_episode = and_(Feedback.project_id == Turn.project_id, Feedback.episode_id == Turn.episode_id)
    return [
        rated.join(Feedback, Feedback.turn_id == Turn.id),
        rated.join(FeedbackRank, rank).join(Feedback, Feedback.seq == FeedbackRank.feedback_seq),
        rated.join(Feedback, and_(same_conversation, Feedback.turn_id.is_(None))),
        rated.join(Feedback, same_episode),
    ]


def _trained_feedback(kinds: Kinds) -> list[AnySelect]:
    """Return the queries of `_rated_turns` for turns of trained batches with the feedback used, and the version id."""
    return [
        query.add_columns(Batch.version_id)
        .join(BatchTurn, BatchTurn.turn_id == Turn.id)
        .join(Batch, Batch.id == BatchTurn.batch_id)
        .where(Batch.state == BatchState.TRAINED, is_effective(kinds, as_of=Batch.created_at))
        for query in _rated_turns()
    ]


async def versions_trained_on_turns(session: AsyncSession, turns: Mapping[str, float]) -> set[str]:
    """Return the ids of the versions whose own batch had one of these turns.

    Args:
        turns: For each turn id, when the feedback on it was given. A batch that was frozen before does not count.
    """
    rows = await session.execute(
        select(BatchTurn.turn_id, Batch.version_id, Batch.created_at)
        .join(Batch, Batch.id == BatchTurn.batch_id)
        .where(BatchTurn.turn_id.in_(turns), Batch.version_id.is_not(None))
    )
    return {str(version_id) for turn_id, version_id, frozen_at in rows if turns[turn_id] <= frozen_at}


async def versions_trained_on_feedback(session: AsyncSession, kinds: Kinds, seqs: Sequence[int]) -> set[str]:
    """Return the ids of the versions whose own batch had a sample that used this feedback."""
    version_ids: set[str] = set()
    for chunk in chunked(seqs, MAX_SEQS):
        used = union_all(*[query.where(Feedback.seq.in_(chunk)) for query in _trained_feedback(kinds)]).subquery()
        query = select(used.c.version_id).where(used.c.version_id.is_not(None)).distinct()
        version_ids |= set(await session.scalars(query))
    return version_ids


async def find_discounted_turns(session: AsyncSession, turn_ids: Collection[str], settings: Settings) -> set[str]:
    """Return the other turns that get a part of these turns' rewards, where the policy's settings say so.

    Those are earlier turns of the same conversations or episodes, with a discount, and all turns of an episode that is
    compared with others.
    """
    of_turns = select(Policy).join(Turn, Turn.policy_id == Policy.id).where(Turn.id.in_(turn_ids))
    policies = list(await session.scalars(of_turns.distinct()))
    configs = {policy.id: effective_rewards(policy, settings) for policy in policies}
    comparing = [one.id for one in policies if effective_settings(one, settings).algorithm.compares_episodes]
    earlier = aliased(Turn)
    in_conversation = and_(
        earlier.conversation_id == Turn.conversation_id,
        earlier.created_at < Turn.created_at,
        earlier.policy_id.in_([id for id, config in configs.items() if config.discount > 0]),
    )
    in_episode = and_(
        earlier.episode_id == Turn.episode_id,
        earlier.episode_step < Turn.episode_step,
        earlier.policy_id.in_([id for id, config in configs.items() if config.episode_credit != "outcome"]),
    )
    in_attempt = and_(
        earlier.episode_id == Turn.episode_id,
        earlier.id != Turn.id,
        earlier.policy_id.in_(comparing),
        exists().where(Episode.id == Turn.episode_id, Episode.group_id.is_not(None)),
    )
    found: set[str] = set()
    for is_concerned in (in_conversation, in_episode, in_attempt):
        query = select(earlier.id).join(Turn, and_(earlier.project_id == Turn.project_id, is_concerned))
        found.update(await session.scalars(query.where(Turn.id.in_(turn_ids))))
    return found


async def list_trained_versions(session: AsyncSession, ids: Collection[str]) -> list[TrainedVersionView]:
    """Return these versions and their nearest MAX_VERSIONS descendants, by policy and number."""
    await prefer_indexes(session)
    descendants = select_descendants(ids, MAX_VERSIONS)
    rows = await session.execute(
        select(Version, Policy.name)
        .options(load_only(Version.id, Version.number, Version.state, Version.tainted_at))
        .join(Policy, Policy.id == Version.policy_id)
        .where(Version.id.in_(select(descendants.c.id)))
        .order_by(Policy.name, Policy.id, Version.number)
    )
    return [
        TrainedVersionView(
            version=format_reference(name, row.number), state=row.state, direct=row.id in ids, tainted_at=row.tainted_at
        )
        for row, name in rows
    ]


async def find_feedback_turns(session: AsyncSession, seqs: Sequence[int]) -> dict[str, float]:
    """Return the ids of the turns that this feedback is about, each with the time of its earliest feedback.

    Feedback may be about one turn, about the turns that it ranks, or about every turn of a conversation or episode.
    """
    feedback = select(Feedback.seq).where(Feedback.seq.in_(seqs)).cte("feedback_seqs")
    in_feedback = Feedback.seq.in_(select(feedback.c.seq))
    rated = union_all(*[query.where(in_feedback) for query in _rated_turns()]).subquery()
    rows = await session.execute(select(rated.c.turn_id, func.min(rated.c.created_at)).group_by(rated.c.turn_id))
    return {turn_id: since for turn_id, since in rows}


async def count_feedback_turns(session: AsyncSession, seqs: Sequence[int]) -> dict[int, int]:
    """Return the number of turns that each of these feedback events is about, by sequence number."""
    counts: dict[int, int] = {}
    for chunk in chunked(seqs, MAX_SEQS):
        rated = union_all(*[query.where(Feedback.seq.in_(chunk)) for query in _rated_turns()]).subquery()
        rows = await session.execute(select(rated.c.seq, func.count()).group_by(rated.c.seq))
        counts |= {seq: count for seq, count in rows}
    return counts
