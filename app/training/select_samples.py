"""Select the ready samples of the next batch: whole groups, oldest first, within the caps on what one source gives.

Episodes whose turns are rewarded by their returns are groups, too.

A batch has at least two different rewards, and where the algorithm learns from groups alone, a group that has them.
Where there are none, it consists of corrected replies alone, whose texts need no contrast.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from sqlalchemy import ColumnElement, CompoundSelect, Select, Subquery, and_, case, func, or_, select, true, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.algorithm import UpdateConfig
from alignment.tolerance import TOLERANCE, exceeds
from app.core.database import now
from app.core.planner import prefer_indexes, read_by
from app.core.settings import Settings
from app.models import Origin, Policy, Rater, Sample, SampleState
from app.raters.allowance import is_trusted, is_within_allowance
from app.training import sample_conditions
from app.training.caps import even_share, max_samples
from app.training.episode_groups import MAX_ATTEMPTS, MAX_SERIES_TURNS, PREFIX, PREFIX_OF_ONE, is_of_one_episode
from app.training.fill_batch import AUTOMATED, FIRST, NORMAL, WAITS_FOR_NEW, ReadyGroup, fill_batch
from app.training.policy_config import effective_rollouts
from app.training.sample_columns import is_open

MAX_GROUP_SIZE = 64  # replies to one prompt
MAX_EPISODE_GROUP_SIZE = MAX_ATTEMPTS * MAX_SERIES_TURNS  # turns of the episodes of a group
MAX_EPISODE_SIZES = (
    2 * MAX_SERIES_TURNS
)  # turns of the large episodes of a batch, of which each takes half of the places
MIN_FIRST_SAMPLES, MAX_FIRST_SAMPLES = 512, 8192  # that are read before all of them are


@dataclass(frozen=True)
class SamplePool:
    """The ready samples that a batch is selected from, and their priority. A group has that of its first sample.

    `is_usable` is the condition of `sample_conditions.usable_samples`.

    Samples with automated rewards come after those with feedback, and the newest of them first: there may be many more
    of them than updates can use. Samples from a batch without contrast, and those of a version that was undone before
    anybody judged it, are selected last, and are at most half of the next batch. So they are tried again only with new
    samples. The group with the key `first_key` comes before all others.

    With `splits_episodes` an episode of no group is cut where it is larger than the batch, else a batch has all of it.
    The samples that are selected are locked, unless `lock` is false.
    """

    policy_id: str
    is_usable: ColumnElement[bool]
    condition: ColumnElement[bool] = field(default_factory=true)
    has_usual_order: bool = True
    needs_contrast: bool = True
    first_key: str | None = None
    splits_episodes: bool = False
    lock: bool = True
    priority: ColumnElement[int] = field(
        default_factory=lambda: case(
            (sample_conditions.waits_for_new(), WAITS_FOR_NEW),
            (Sample.is_automated.is_(True), AUTOMATED),
            else_=NORMAL,
        )
    )

    def failed_first(self) -> "SamplePool":
        """Select the samples first that were in the most quarantined batches. Episodes are cut, to isolate one."""
        is_new = ~sample_conditions.waits_for_new()
        priority = -Sample.num_failures
        return replace(self, condition=is_new, priority=priority, has_usual_order=False, splits_episodes=True)

    def without_failed(self) -> "SamplePool":
        """Leave out the samples of quarantined batches."""
        return replace(self, condition=Sample.num_failures == 0)

    def corrected_alone(self) -> "SamplePool":
        """Leave out the samples that have no corrected texts. Those need no contrast."""
        condition = and_(self.condition, Sample.is_corrected)
        return replace(self, condition=condition, has_usual_order=False, needs_contrast=False)

    def with_first(self, key: str) -> "SamplePool":
        """Select the group with this key before all others."""
        priority = case((sample_conditions.group_key() == key, FIRST), else_=self.priority)
        return replace(self, priority=priority, first_key=key)


async def select_samples(session: AsyncSession, pool: SamplePool, size: int, settings: Settings) -> list[Sample]:
    """Return at most `size` samples with contrast (`_has_contrast`), or [].

    The oldest come first, within the priorities of SamplePool. If there is no contrast, the oldest group that has or
    gives it takes the place of the last ones; if there is none, the batch consists of corrected replies. Samples beyond
    a cap stay open for a later batch.
    """
    policy = await session.get_one(Policy, pool.policy_id)
    max_planned = max_samples(effective_rollouts(policy, settings).max_plan_share, settings.trainer.batch_size)
    algorithm = settings.algorithm
    groups = await _read_groups(session, pool, size, max_planned, settings)
    chosen = fill_batch(groups, size, max_planned, pool.splits_episodes)
    rewards = [(group.key, chosen[id]) for group in groups for id in group.rewards if id in chosen]
    if rewards and pool.needs_contrast and not _has_contrast(rewards, algorithm):
        first_key = await _find_contrast(session, pool, rewards[0][1], algorithm)
        if first_key is None:
            return await select_samples(session, pool.corrected_alone(), size, settings)
        groups = await _read_groups(session, pool.with_first(first_key), size, max_planned, settings)
        chosen = fill_batch(groups, size, max_planned, pool.splits_episodes)
    # Feedback may have withdrawn or quarantined a sample since it was read, so its state is read again under its lock.
    query = select(Sample).where(Sample.turn_id.in_(chosen), Sample.state == SampleState.OPEN).order_by(Sample.turn_id)
    query = query.execution_options(populate_existing=True)
    selected = list(await session.scalars(query.with_for_update() if pool.lock else query))
    rewards = [(sample.group_id or sample.turn_id, _compared_reward(sample)) for sample in selected]
    return selected if not pool.needs_contrast or _has_contrast(rewards, algorithm) else []


def _compared_reward(sample: Sample) -> float:
    return sample.reward if sample.episode_reward is None else sample.episode_reward


def _has_contrast(rewards: Iterable[tuple[str, float]], algorithm: UpdateConfig) -> bool:
    """Whether two rewards differ enough; for an algorithm that needs groups, two of one group.

    `rewards` are pairs (group key, reward).
    """
    by_group: dict[str, list[float]] = defaultdict(list)
    for key, reward in rewards:
        by_group[key if algorithm.needs_groups else ""].append(reward)
    return any(exceeds(max(values), min(values), algorithm.min_contrast) for values in by_group.values())


async def _find_contrast(session: AsyncSession, pool: SamplePool, reward: float, algorithm: UpdateConfig) -> str | None:
    """Return the key of the first group with another reward than this one; None if there is none.

    For an algorithm that needs groups, that is the first group with different rewards. Samples are read until there is
    one, and not ranked.
    """
    gives_contrast = func.abs(Sample.reward - reward) > algorithm.min_contrast + TOLERANCE
    if algorithm.needs_groups:
        condition = and_(pool.is_usable, pool.condition)
        rewards_differ = sample_conditions.rewards_differ(algorithm.min_contrast)
        gives_contrast = sample_conditions.is_in_group(pool.policy_id, condition, rewards_differ)
    keys = await _read_keys(session, pool, gives_contrast, 1)
    return keys[0] if keys else None


async def _read_groups(
    session: AsyncSession, pool: SamplePool, size: int, max_planned: int, settings: Settings
) -> list[ReadyGroup]:
    """Return the first groups of chats and of prompt sets, each up to a limit, so that neither hides the other.

    Only the first samples are read, and more of them where the caps leave too few: a backlog costs nothing.
    """
    num_raters = await _count_raters(session, pool, size)
    await prefer_indexes(session)  # the first samples are few, whatever the statistics of the others
    num_first = max(MIN_FIRST_SAMPLES, 4 * size)
    while True:
        keys = await _first_group_keys(session, pool, num_first)
        ready = _ready_samples(pool, keys)
        size_in_groups = await _count_groups(session, ready, size) if _has_whole_episodes(settings) else size
        samples = _samples_within_caps(ready, pool.policy_id, size_in_groups, num_raters, settings)
        max_group_size = MAX_EPISODE_GROUP_SIZE if settings.algorithm.compares_episodes else MAX_GROUP_SIZE
        max_group_size = MAX_EPISODE_SIZES if _has_whole_episodes(settings) else max_group_size
        groups = await _read_groups_of(session, samples, size, max_planned, max_group_size)
        num_chats = sum(len(group.rewards) for group in groups if not group.is_planned)
        if keys is None or num_chats >= size + MAX_GROUP_SIZE:
            return groups
        num_first *= 4


def _has_whole_episodes(settings: Settings) -> bool:
    """Return whether episodes of no group are in a batch as a whole: curation has given their samples such keys."""
    return settings.rewards.episode_credit == "return" and not settings.algorithm.needs_groups


async def _count_groups(session: AsyncSession, samples: Subquery, size: int) -> int:
    """Return how many groups, of as many samples as these have in the mean, a batch of `size` samples has."""
    query = select(func.count(), func.count(samples.c.group_key.distinct())).select_from(samples)
    num_samples, num_groups = (await session.execute(query)).one()
    return max(1, size * num_groups // max(1, num_samples))


async def _first_group_keys(session: AsyncSession, pool: SamplePool, num_first: int) -> set[str] | None:
    """Return the keys of the groups of the first samples; None where there are no others, or too many keys."""
    if not pool.has_usual_order or num_first > MAX_FIRST_SAMPLES:
        return None
    keys = await _read_keys(session, pool, true(), num_first)
    if len(keys) < num_first:
        return None
    return {*keys, *([] if pool.first_key is None else [pool.first_key])}


async def _read_keys(
    session: AsyncSession, pool: SamplePool, condition: ColumnElement[bool], num_first: int
) -> list[str]:
    """Return the group keys of the first samples that meet the condition, in the order of the priorities.

    Each of the priorities of SamplePool is read in the order of an index.
    """
    waits, is_automated = sample_conditions.waits_for_new(), Sample.is_automated
    keys: list[str] = []
    for has_priority, order in (
        (is_automated.is_(False) & ~waits, Sample.ready_at.asc()),
        (is_automated.is_(True) & ~waits, Sample.ready_at.desc()),
        (waits, case((is_automated, -Sample.ready_at), else_=Sample.ready_at).asc()),
    ):
        first = select(sample_conditions.group_key()).where(*_is_ready(pool), has_priority, condition)
        keys += await session.scalars(first.order_by(order, Sample.turn_id).limit(num_first - len(keys)))
        if len(keys) == num_first:
            break
    return keys


async def _count_raters(session: AsyncSession, pool: SamplePool, size: int) -> int:
    """Return the number of raters of the ready samples, at most `size`: more of them change no cap.

    Each is found by one look into an index.
    """

    def first_rater(after: ColumnElement[bool]) -> Select[str | None]:
        return select(Sample.rater).where(*_is_ready(pool), after).order_by(Sample.rater).limit(1)

    raters = select(first_rater(Sample.rater.is_not(None)).scalar_subquery().label("rater")).cte(recursive=True)
    following = first_rater(Sample.rater > raters.c.rater).correlate(raters).scalar_subquery()
    raters = raters.union_all(select(following).where(raters.c.rater.is_not(None)))
    found = select(raters.c.rater).limit(size).subquery().c
    return int(await session.scalar(select(func.count(found.rater))) or 0)


async def _read_groups_of(
    session: AsyncSession, samples: Subquery, size: int, max_planned: int, max_group_size: int
) -> list[ReadyGroup]:
    groups: dict[str, ReadyGroup] = {}
    is_planned = samples.c.origin == Origin.PROMPT_SET
    order = (samples.c.group_priority, samples.c.group_order, samples.c.group_key)
    for condition, limit in ((samples.c.origin != Origin.PROMPT_SET, size), (is_planned, max_planned)):
        query = (
            select(*order, samples.c.turn_id, samples.c.reward, samples.c.origin)
            .where(condition)
            .order_by(*order, samples.c.turn_id)
            .limit(limit + max_group_size)
        )
        rows = (await session.execute(query)).all()
        if len(rows) == limit + max_group_size and is_of_one_episode(rows[-1].group_key):
            whole = [row for row in rows if row.group_key != rows[-1].group_key]  # the last may have further samples
            rows = whole or rows  # one alone has as many as only those have that were kept whole by earlier settings
        for priority, position, key, turn_id, reward, origin in rows:
            group = ReadyGroup(priority, position, key, {}, origin == Origin.PROMPT_SET)
            groups.setdefault(key, group).rewards[turn_id] = reward
    return sorted(groups.values(), key=lambda group: group[:3])


def _samples_within_caps(samples: Subquery, policy_id: str, size: int, num_raters: int, settings: Settings) -> Subquery:
    """Ready samples within the caps on raters, conversations and clusters.

    The caps apply one after the other, so that a sample beyond its rater's cap takes no place from the others of its
    conversation and cluster. Replies to one prompt count once, since they are selected together. A group of episodes
    is within the caps as a whole or not at all: without some of its turns it would be compared by the others alone. So
    is an episode whose turns are rewarded by their returns, and `size` is then the number of episodes of a batch.
    """
    place_of_each = even_share(size, num_raters)
    for name, share in (
        ("rater", settings.raters.max_rater_share),
        ("conversation_id", settings.raters.max_conversation_share),
        ("cluster", settings.raters.max_cluster_share),
    ):
        order = (samples.c.group_priority, samples.c.group_order, samples.c.group_key)
        position = func.dense_rank().over(partition_by=samples.c[name], order_by=order)
        ranked = select(samples, position.label("position")).subquery()
        columns = [column for column in ranked.c if column.name != "position"]
        statement = select(*columns)
        is_within_cap: ColumnElement[bool] = ranked.c.position <= max_samples(share, size)
        if name == "rater":
            project_id = select(Policy.project_id).where(Policy.id == policy_id).scalar_subquery()
            statement = statement.outerjoin(Rater, and_(Rater.project_id == project_id, Rater.name == ranked.c.rater))
            is_within_cap = _is_within_rater_cap(ranked.c.position, max_samples(share, size), place_of_each, settings)
        is_within_cap = or_(ranked.c[name].is_(None), is_within_cap)
        if not settings.algorithm.compares_episodes and not _has_whole_episodes(settings):
            samples = statement.where(is_within_cap).subquery()
            continue
        is_whole = or_(ranked.c.group_key.startswith(PREFIX), ranked.c.group_key.startswith(PREFIX_OF_ONE))
        unit = case((is_whole, ranked.c.group_key), else_=ranked.c.turn_id)
        num_beyond = func.sum(case((is_within_cap, 0), else_=1)).over(partition_by=unit).label("num_beyond")
        capped = statement.add_columns(num_beyond).subquery()
        samples = select(*[capped.c[column.name] for column in columns]).where(capped.c.num_beyond == 0).subquery()
    return samples


def _is_ready(pool: SamplePool) -> tuple[ColumnElement[bool], ...]:
    return (Sample.policy_id == pool.policy_id, is_open(), Sample.ready_at <= now(), pool.is_usable, pool.condition)


def _ready_samples(pool: SamplePool, keys: Collection[str] | None) -> Subquery:
    """Return the ready samples of the groups with these keys; of all groups for None."""
    order = case((Sample.is_automated, -Sample.ready_at), else_=Sample.ready_at)
    is_chosen = true() if keys is None else Sample.turn_id.in_(_turns_of_groups(pool, keys))
    return (
        select(
            Sample.turn_id,
            Sample.rater,
            Sample.conversation_id,
            Sample.cluster,
            sample_conditions.compared_reward().label("reward"),
            sample_conditions.group_key().label("group_key"),
            func.min(pool.priority).over(partition_by=sample_conditions.group_key()).label("group_priority"),
            func.min(order).over(partition_by=sample_conditions.group_key()).label("group_order"),
            Sample.origin,
        )
        .where(*_is_ready(pool), is_chosen)
        .subquery()
    )


def _turns_of_groups(pool: SamplePool, keys: Collection[str]) -> CompoundSelect[str]:
    """Return the turns of the groups with these keys. Each half reads by an index, which SQLite would not do for OR."""
    is_own_open = (Sample.policy_id == pool.policy_id, is_open())
    in_group = select(Sample.turn_id).where(*is_own_open, Sample.group_id.in_(keys))
    alone = select(Sample.turn_id).where(Sample.turn_id.in_(keys), Sample.group_id.is_(None))
    return union_all(read_by(in_group, Sample, "ix_samples_in_groups"), alone)


def _is_within_rater_cap(
    position: ColumnElement[int], limit: int, place_of_each: int, settings: Settings
) -> ColumnElement[bool]:
    """Return the condition that a rater's sample is within the rater's cap.

    New raters, and raters whom others often contradict, have a lower cap. With few raters each may give an even share.
    Raters whom an admin trusts have no cap, and a cap of 1.0 is none.
    """
    if settings.raters.max_rater_share >= 1.0:
        return true()
    is_within_limit = is_within_allowance(position, limit) if settings.raters.trust else position <= limit
    return or_(position <= place_of_each, is_within_limit, is_trusted())
