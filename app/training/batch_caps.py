"""Caps on the share of a batch that one rater, conversation or prompt cluster may have."""

import math

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.settings import Settings
from app.models import Policy, Sample, SampleState

MIN_RATERS_FOR_EVEN_SHARE = 5


def max_samples(share: float, size: int) -> int:
    """Return how many samples of a batch of `size` one rater, conversation or cluster may have; at least one."""
    return max(1, int(share * size))


def even_share(size: int, raters: int) -> int:
    """Return a batch's size divided by the number of raters, rounded up; 1 where there are too few raters."""
    return math.ceil(size / raters) if raters >= MIN_RATERS_FOR_EVEN_SHARE else 1


async def count_selectable(
    session: AsyncSession, policy: Policy, version_ids: list[str], size: int, raters: int, settings: Settings
) -> tuple[int, str]:
    """Return an upper bound of the ready samples that fit into one batch of `size`, and the cap that sets it.

    The cap is "rater", "conversation", "cluster", or "" if none of them limits the batch. Each cap is applied by
    itself: all of them together, and raters of reduced trust, may leave fewer. Replies to one prompt count once, since
    they are selected together.
    """
    group = func.coalesce(Sample.group_id, Sample.turn_id)
    fewest, limiting = size, ""
    for name, column, limit in (
        ("rater", Sample.rater, max(max_samples(settings.max_rater_share, size), even_share(size, raters))),
        ("conversation", Sample.conversation_id, max_samples(settings.max_conversation_share, size)),
        ("cluster", Sample.cluster, max_samples(settings.max_cluster_share, size)),
    ):
        if name == "rater" and settings.max_rater_share >= 1.0:
            continue
        rank = func.dense_rank().over(partition_by=column, order_by=group)
        ready = (
            select(column.label("owner"), rank.label("rank"))
            .where(
                Sample.policy_id == policy.id,
                Sample.state == SampleState.OPEN,
                Sample.ready_at <= now(),
                Sample.version_id.in_(version_ids),
            )
            .subquery()
        )
        count = await session.scalar(
            select(func.count()).where(ready.c.owner.is_(None) | (ready.c.rank <= limit)).select_from(ready)
        )
        if (count or 0) < fewest:
            fewest, limiting = int(count or 0), name
    return fewest, limiting
