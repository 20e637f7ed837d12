"""Nobody's share of a batch is more than fair: the numbers, for those who choose and those who tell what is missing."""

import math

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.settings import Settings
from app.models import Policy, Sample, SampleState

FEW = 5  # raters: fewer than that are nobody's crowd, and each keeps to a rater's share


def cap(share: float, size: int) -> int:
    """How many samples of a batch of `size` may be one rater's, conversation's or cluster's. One always may."""
    return max(1, int(share * size))


def even(size: int, raters: int) -> int:
    """An even share, which is everybody's; 1 where there are too few raters to speak of a crowd."""
    return math.ceil(size / raters) if raters >= FEW else 1


async def fitting(
    session: AsyncSession, policy: Policy, version_ids: list[str], size: int, raters: int, settings: Settings
) -> tuple[int, str]:
    """At most so many of the ripe samples go into one batch of `size`, and whose share it is that bounds them most.

    Each share by itself: all of them together, and raters who are not fully believed yet, may leave room for fewer.
    Replies to one prompt count once, as they come together.
    """
    together = func.coalesce(Sample.group_id, Sample.turn_id)
    least, whose = size, ""
    for name, column, most in (
        ("rater", Sample.rater, max(cap(settings.max_rater_share, size), even(size, raters))),
        ("conversation", Sample.conversation_id, cap(settings.max_conversation_share, size)),
        ("cluster", Sample.cluster, cap(settings.max_cluster_share, size)),
    ):
        if name == "rater" and settings.max_rater_share >= 1.0:
            continue
        place = func.dense_rank().over(partition_by=column, order_by=together)
        ripe = (
            select(column.label("whose"), place.label("place"))
            .where(
                Sample.policy_id == policy.id,
                Sample.state == SampleState.OPEN,
                Sample.ready_at <= now(),
                Sample.version_id.in_(version_ids),
            )
            .subquery()
        )
        fits = await session.scalar(
            select(func.count()).where(ripe.c.whose.is_(None) | (ripe.c.place <= most)).select_from(ripe)
        )
        if (fits or 0) < least:
            least, whose = int(fits or 0), name
    return least, whose
