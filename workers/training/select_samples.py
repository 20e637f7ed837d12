"""Which ripe samples make the next batch: whole groups, the ripest first, and nobody with more than a fair share."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Subquery, and_, func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.core.settings import Settings
from app.models import Origin, Policy, Rater, Sample, SampleState, Turn
from app.training import batch_caps
from app.training.batch_caps import cap
from app.training.rollouts.config import rollouts_of
from workers.feedback import rater_trust

LARGEST_GROUP = 64


async def choose(
    session: AsyncSession, policy_id: str, version_ids: Sequence[str], size: int, settings: Settings
) -> list[Sample]:
    """At most `size`, oldest first. What is beyond somebody's share stays open, for a later batch."""
    ripe = _ripe(policy_id, version_ids)
    raters = int(await session.scalar(select(func.count(ripe.c.rater.distinct()))) or 0)
    fair = _fair(policy_id, version_ids, size, raters, settings)
    policy = await session.get_one(Policy, policy_id)
    planned = cap(rollouts_of(policy, settings).max_plan_share, settings.batch_size)
    chosen = _fill(await _groups(session, fair, size, planned), size, planned)
    # Under their locks now: somebody may have thought again, or been held, since they were looked at.
    locked = await session.scalars(
        select(Sample)
        .where(Sample.turn_id.in_(chosen), Sample.state == SampleState.OPEN)
        .order_by(Sample.turn_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    return list(locked)


class Group(NamedTuple):
    """Samples of replies to one prompt. `planned`: of a prompt set, and not of somebody's chat."""

    since: float
    name: str
    members: list[str]
    planned: bool


async def _groups(session: AsyncSession, fair: Subquery, size: int, planned: int) -> list[Group]:
    """The ripest first, of chats and of prompt sets as many as there may be, so that neither hides the other."""
    found: dict[str, Group] = {}
    for origin, most in ((fair.c.origin != Origin.PROMPT_SET, size), (fair.c.origin == Origin.PROMPT_SET, planned)):
        rows = await session.execute(
            select(fair.c.turn_id, fair.c.together, fair.c.since, fair.c.origin)
            .where(origin)
            .order_by(fair.c.since, fair.c.together, fair.c.turn_id)
            .limit(most + LARGEST_GROUP)
        )
        for turn_id, name, since, whose in rows:
            found.setdefault(name, Group(since, name, [], whose == Origin.PROMPT_SET)).members.append(turn_id)
    return sorted(found.values())


def _fair(policy_id: str, version_ids: Sequence[str], size: int, raters: int, settings: Settings) -> Subquery:
    """Ripe samples within everybody's share. One share after the other, so that what is beyond a rater's takes no
    place from the others of its conversation and cluster. Replies to one prompt count once: they come together."""
    kept = _ripe(policy_id, version_ids)
    even = batch_caps.even(size, raters)
    for name, share in (
        ("rater", settings.max_rater_share),
        ("conversation_id", settings.max_conversation_share),
        ("cluster", settings.max_cluster_share),
    ):
        place = func.dense_rank().over(partition_by=kept.c[name], order_by=(kept.c.since, kept.c.together))
        placed = select(kept, place.label("place")).subquery()
        columns = [one for one in placed.c if one.name != "place"]
        statement = select(*columns)
        within: ColumnElement[bool] = placed.c.place <= cap(share, size)
        if name == "rater":
            project_id = select(Policy.project_id).where(Policy.id == policy_id).scalar_subquery()
            statement = statement.outerjoin(Rater, and_(Rater.project_id == project_id, Rater.name == placed.c.rater))
            within = _within(placed.c.place, cap(share, size), even, settings)
        kept = statement.where(or_(placed.c[name].is_(None), within)).subquery()
    return kept


def _ripe(policy_id: str, version_ids: Sequence[str]) -> Subquery:
    together = func.coalesce(Sample.group_id, Sample.turn_id)
    return (
        select(
            Sample.turn_id,
            Sample.rater,
            Sample.conversation_id,
            Sample.cluster,
            together.label("together"),
            func.min(Sample.ready_at).over(partition_by=together).label("since"),
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


def _within(place: ColumnElement[int], most: int, even: int, settings: Settings) -> ColumnElement[bool]:
    """A newcomer, or a rater whom others often contradict, has less than a full share; but where there are few raters
    an even share is everybody's, and where shares are off there is no limit."""
    if settings.max_rater_share >= 1.0:
        return true()
    return or_(place <= even, rater_trust.within(place, most) if settings.trust else place <= most)


def _fill(groups: Sequence[Group], size: int, planned: int) -> list[str]:
    """Replies to one prompt are compared with each other: none is left behind, unless the group alone is too large.
    Prompt sets have `planned` places at most, or one group."""
    chosen: list[str] = []
    theirs = 0
    for group in groups:
        if group.planned and theirs and theirs + len(group.members) > planned:
            continue
        if len(chosen) + len(group.members) <= size:
            chosen += group.members
            theirs += len(group.members) if group.planned else 0
        elif not chosen:
            return group.members[:size]
    return chosen
