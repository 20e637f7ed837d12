"""Select the ready samples of the next batch: whole groups, oldest first, within the caps on what one source gives."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Subquery, and_, func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.settings import Settings
from app.models import Origin, Policy, Rater, Sample, SampleState, Turn
from app.training import service
from app.training.policy_config import effective_rollouts
from app.training.service import max_samples
from workers.feedback import rater_trust

MAX_GROUP_SIZE = 64


async def select_samples(
    session: AsyncSession, policy_id: str, version_ids: Sequence[str], size: int, settings: Settings
) -> list[Sample]:
    """Lock and return at most `size` samples. Samples beyond a cap stay open for a later batch."""
    ready = _ready_samples(policy_id, version_ids)
    num_raters = int(await session.scalar(select(func.count(ready.c.rater.distinct()))) or 0)
    within_caps = _samples_within_caps(policy_id, version_ids, size, num_raters, settings)
    policy = await session.get_one(Policy, policy_id)
    max_planned = max_samples(effective_rollouts(policy, settings).max_plan_share, settings.batch_size)
    groups = await _read_groups(session, within_caps, size, max_planned)
    turn_ids = _fill_batch(groups, size, max_planned)
    # Feedback may have withdrawn or quarantined a sample since it was read, so its state is read again under its lock.
    locked = await session.scalars(
        select(Sample)
        .where(Sample.turn_id.in_(turn_ids), Sample.state == SampleState.OPEN)
        .order_by(Sample.turn_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    return list(locked)


class ReadyGroup(NamedTuple):
    """Samples of replies to one prompt. `is_planned` is true if the prompt comes from a prompt set, not from a chat.

    Groups sort by `ready_at`, the time at which the first of the samples became ready.
    """

    ready_at: float
    key: str
    turn_ids: list[str]
    is_planned: bool


async def _read_groups(session: AsyncSession, samples: Subquery, size: int, max_planned: int) -> list[ReadyGroup]:
    """Return the oldest groups of chats and of prompt sets, each up to a limit, so that neither hides the other."""
    groups: dict[str, ReadyGroup] = {}
    is_planned = samples.c.origin == Origin.PROMPT_SET
    for condition, limit in ((samples.c.origin != Origin.PROMPT_SET, size), (is_planned, max_planned)):
        rows = await session.execute(
            select(samples.c.turn_id, samples.c.group_key, samples.c.group_ready_at, samples.c.origin)
            .where(condition)
            .order_by(samples.c.group_ready_at, samples.c.group_key, samples.c.turn_id)
            .limit(limit + MAX_GROUP_SIZE)
        )
        for turn_id, key, ready_at, origin in rows:
            group = ReadyGroup(ready_at, key, [], origin == Origin.PROMPT_SET)
            groups.setdefault(key, group).turn_ids.append(turn_id)
    return sorted(groups.values())


def _samples_within_caps(
    policy_id: str, version_ids: Sequence[str], size: int, num_raters: int, settings: Settings
) -> Subquery:
    """Ready samples within the caps on raters, conversations and clusters.

    The caps apply one after the other, so that a sample beyond its rater's cap takes no place from the others of its
    conversation and cluster. Replies to one prompt count once, since they are selected together.
    """
    samples = _ready_samples(policy_id, version_ids)
    even_share = service.even_share(size, num_raters)
    for name, share in (
        ("rater", settings.max_rater_share),
        ("conversation_id", settings.max_conversation_share),
        ("cluster", settings.max_cluster_share),
    ):
        order = (samples.c.group_ready_at, samples.c.group_key)
        position = func.dense_rank().over(partition_by=samples.c[name], order_by=order)
        ranked = select(samples, position.label("position")).subquery()
        columns = [column for column in ranked.c if column.name != "position"]
        statement = select(*columns)
        is_within_cap: ColumnElement[bool] = ranked.c.position <= max_samples(share, size)
        if name == "rater":
            project_id = select(Policy.project_id).where(Policy.id == policy_id).scalar_subquery()
            statement = statement.outerjoin(Rater, and_(Rater.project_id == project_id, Rater.name == ranked.c.rater))
            is_within_cap = _is_within_rater_cap(ranked.c.position, max_samples(share, size), even_share, settings)
        samples = statement.where(or_(ranked.c[name].is_(None), is_within_cap)).subquery()
    return samples


def _ready_samples(policy_id: str, version_ids: Sequence[str]) -> Subquery:
    group_key = func.coalesce(Sample.group_id, Sample.turn_id)
    return (
        select(
            Sample.turn_id,
            Sample.rater,
            Sample.conversation_id,
            Sample.cluster,
            group_key.label("group_key"),
            func.min(Sample.ready_at).over(partition_by=group_key).label("group_ready_at"),
            Turn.origin,
        )
        .join(Turn, Turn.id == Sample.turn_id)
        .where(
            Sample.policy_id == policy_id,
            Sample.state == SampleState.OPEN,
            Sample.ready_at <= now(),
            Sample.version_id.in_(version_ids),
        )
        .subquery()
    )


def _is_within_rater_cap(
    position: ColumnElement[int], limit: int, even_share: int, settings: Settings
) -> ColumnElement[bool]:
    """Return the condition that a rater's sample is within the rater's cap.

    New raters, and raters whom others often contradict, have a lower cap. With few raters each may give an even share.
    A cap of 1.0 is no cap.
    """
    if settings.max_rater_share >= 1.0:
        return true()
    is_within_limit = rater_trust.is_within_allowance(position, limit) if settings.trust else position <= limit
    return or_(position <= even_share, is_within_limit)


def _fill_batch(groups: Sequence[ReadyGroup], size: int, max_planned: int) -> list[str]:
    """Return the turn ids of the groups that fit.

    Replies to one prompt are compared with each other, so a group is split only if it alone exceeds the batch. Groups
    of prompt sets get at most `max_planned` places, or one group.
    """
    turn_ids: list[str] = []
    num_planned = 0
    for group in groups:
        if group.is_planned and num_planned and num_planned + len(group.turn_ids) > max_planned:
            continue
        if len(turn_ids) + len(group.turn_ids) <= size:
            turn_ids += group.turn_ids
            num_planned += len(group.turn_ids) if group.is_planned else 0
        elif not turn_ids:
            return group.turn_ids[:size]
    return turn_ids
