"""Queries between feedback and versions. They follow the rows of batches and samples; no lineage is stored."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import CTE, Executable, Select, and_, func, select, tuple_, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment.config.rewards import EXPLICIT, ExplicitSource
from app.core.pagination import apply_keyset
from app.core.settings import Settings
from app.feedback.effective import is_effective
from app.feedback.schemas import WITHDRAWAL
from app.models import (
    NUMERIC_KINDS,
    RANKING_KINDS,
    Batch,
    Feedback,
    FeedbackRank,
    Policy,
    Sample,
    SampleState,
    Turn,
    Version,
)
from app.policies.ancestry import select_descendants
from app.training.reward_config import effective_rewards

MAX_PARAMETERS = 500  # sequence numbers in one statement
Kinds = tuple[str, ...]


class TrainedVersion(NamedTuple):
    """A version that learned from something: `direct` through its own batch, else through an ancestor."""

    version: Version
    policy: str
    direct: bool


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
    """Return a query for the trained samples of a batch, with the feedback that was effective when it was frozen.

    The rows are (Sample, Turn, number of the turn's version, Feedback); Feedback is None for a sample without any. Up
    to `limit + 1` rows come after the (turn id, feedback id) `after`.
    """
    effective = _effective_feedback(batch_id, kinds)
    turn_version = aliased(Version)
    feedback_id = func.coalesce(Feedback.id, "")
    query = (
        select(Sample, Turn, turn_version.number, Feedback)
        .join(Batch, Batch.id == Sample.batch_id)
        .join(Turn, Turn.id == Sample.turn_id)
        .join(turn_version, turn_version.id == Turn.version_id)
        .outerjoin(effective, effective.c.turn_id == Turn.id)
        .outerjoin(Feedback, Feedback.seq == effective.c.seq)
        .where(Batch.id == batch_id, Sample.state == SampleState.TRAINED)
    )
    return apply_keyset(query, (Turn.id, feedback_id), after, limit)


def _effective_feedback(batch_id: str, kinds: Kinds) -> CTE:
    return union_all(*[query.where(Batch.id == batch_id) for query in _trained_feedback(kinds)]).cte("effective")


def _trained_feedback(kinds: Kinds) -> list[Select[Any]]:
    """Return queries for (turn id, feedback seq, version id) of trained samples with the feedback that they used.

    There is one for feedback on a single turn, one for rankings, and one for feedback on whole conversations.
    """
    samples = select(Sample.turn_id, Feedback.seq, Batch.version_id).join(Batch, Batch.id == Sample.batch_id)
    on_turn = samples.join(Feedback, Feedback.turn_id == Sample.turn_id)
    on_ranking = samples.join(FeedbackRank, FeedbackRank.turn_id == Sample.turn_id).join(
        Feedback, Feedback.seq == FeedbackRank.feedback_seq
    )
    same_conversation = and_(Feedback.project_id == Turn.project_id, Feedback.conversation_id == Turn.conversation_id)
    on_conversation = (
        samples.join(Turn, Turn.id == Sample.turn_id)
        .join(Feedback, same_conversation)
        .where(Feedback.turn_id.is_(None))
    )
    queries: list[Any] = [on_turn, on_ranking, on_conversation]
    return [
        query.where(Sample.state == SampleState.TRAINED, is_effective(kinds, as_of=Batch.created_at))
        for query in queries
    ]


async def versions_trained_on_turns(session: AsyncSession, turns: Mapping[str, float]) -> set[str]:
    """Return the ids of the versions whose own batch had one of these turns.

    Args:
        turns: For each turn id, when the feedback on it was given. A batch that was frozen before does not count.
    """
    rows = await session.execute(
        select(Sample.turn_id, Batch.version_id, Batch.created_at)
        .join(Batch, Batch.id == Sample.batch_id)
        .where(Sample.turn_id.in_(turns), Sample.state == SampleState.TRAINED, Batch.version_id.is_not(None))
    )
    return {str(version_id) for turn_id, version_id, frozen_at in rows if turns[turn_id] <= frozen_at}


async def versions_trained_on_feedback(session: AsyncSession, kinds: Kinds, seqs: Sequence[int]) -> set[str]:
    """Return the ids of the versions whose own batch had a sample that used this feedback."""
    version_ids: set[str] = set()
    for start in range(0, len(seqs), MAX_PARAMETERS):
        chunk = seqs[start : start + MAX_PARAMETERS]
        used = union_all(*[query.where(Feedback.seq.in_(chunk)) for query in _trained_feedback(kinds)]).subquery()
        query = select(used.c.version_id).where(used.c.version_id.is_not(None)).distinct()
        version_ids |= set(await session.scalars(query))
    return version_ids


async def find_discounted_turns(session: AsyncSession, turn_ids: Collection[str], settings: Settings) -> set[str]:
    """Return the earlier turns of the same conversations, which get a discounted part of these turns' rewards.

    Turns of policies whose rewards have no discount are left out.
    """
    policies = await session.scalars(
        select(Policy).join(Turn, Turn.policy_id == Policy.id).where(Turn.id.in_(turn_ids)).distinct()
    )
    discounting = [policy.id for policy in policies if effective_rewards(policy, settings).discount > 0]
    earlier = aliased(Turn)
    query = select(earlier.id).join(
        Turn,
        and_(
            earlier.project_id == Turn.project_id,
            earlier.conversation_id == Turn.conversation_id,
            earlier.created_at < Turn.created_at,
        ),
    )
    return set(await session.scalars(query.where(Turn.id.in_(turn_ids), earlier.policy_id.in_(discounting))))


async def list_trained_versions(session: AsyncSession, ids: Collection[str]) -> list[TrainedVersion]:
    """Return these versions and their descendants, by policy and number."""
    descendants = select_descendants(ids)
    rows = await session.execute(
        select(Version, Policy.name)
        .join(Policy, Policy.id == Version.policy_id)
        .where(Version.id.in_(select(descendants.c.id)))
        .order_by(Policy.name, Version.number)
    )
    return [TrainedVersion(version, name, version.id in ids) for version, name in rows]


async def find_feedback_turns(session: AsyncSession, rows: Sequence[Feedback]) -> dict[str, float]:
    """Return the ids of the turns that this feedback is about, each with the time of its earliest feedback.

    Feedback may be about one turn, about the turns that it ranks, or about every turn of a conversation.
    """
    created_at = {row.seq: row.created_at for row in rows}
    rated = [(row.turn_id, row.created_at) for row in rows if row.turn_id is not None]
    ranked = select(FeedbackRank.turn_id, FeedbackRank.feedback_seq).where(FeedbackRank.feedback_seq.in_(created_at))
    rated += [(turn_id, created_at[seq]) for turn_id, seq in await session.execute(ranked)]
    latest_first = reversed([row for row in rows if row.turn_id is None])
    conversations = {(row.project_id, row.conversation_id): row.created_at for row in latest_first}
    in_conversations = select(Turn.id, Turn.project_id, Turn.conversation_id).where(
        tuple_(Turn.project_id, Turn.conversation_id).in_([pair for pair in conversations if pair[1] is not None])
    )
    rated += [
        (turn_id, conversations[project_id, conversation_id])
        for turn_id, project_id, conversation_id in await session.execute(in_conversations)
    ]
    since: dict[str, float] = {}
    for turn_id, time in rated:
        since[turn_id] = min(time, since.get(turn_id, time))
    return since


async def find_feedback(session: AsyncSession, project_id: str, feedback_id: str) -> Feedback | None:
    """Return the feedback; withdrawals are left out."""
    query = select(Feedback).where(Feedback.id == feedback_id, Feedback.project_id == project_id)
    return await session.scalar(query.where(Feedback.kind != WITHDRAWAL))


async def find_choices(session: AsyncSession, project_id: str, completion_id: str) -> list[str]:
    """Return the ids of a completion's turns."""
    query = select(Turn.id).where(Turn.completion_id == completion_id, Turn.project_id == project_id)
    return list(await session.scalars(query))
