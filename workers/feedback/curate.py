"""Feedback → Rewards and Samples, and turns → Judgements: the questions to sources that need no feedback."""

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import delete, exists, select
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import EXPLICIT, LEARNED, RewardsConfig
from alignment.signals.rater_trust import RaterSignal
from app.core.database import Database
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Policy, Reward, Turn, new_id
from app.raters.names import is_person
from app.training.policy_rewards import rewards_of
from workers.feedback import group_samples, inbox, rater_trust, samples, signals
from workers.feedback.rater_trust import Trusted
from workers.feedback.signals import Judged, Spoken
from workers.judging import enqueue

log = logging.getLogger("attune.curate")
PAGE = 500
ECHOING = 64  # feedback on a page where each piece may concern a whole conversation
SECONDS = 5.0  # of one run
TROUBLE = (OperationalError, InterfaceError, InternalError, PoolTimeout)  # the database's, not the feedback's
News = tuple[Judged, str, Spoken]  # a word that has not been heard before, of which source, about which turn


async def curate(db: Database, settings: Settings) -> int:
    """Turn feedback that has not been looked at into rewards and samples, and ask the other sources about every turn
    that has ended; for a while, so that what waits for the same worker gets its turn. Returns how much was read."""
    total, began = 0, time.monotonic()
    while True:
        try:
            read, last = await _page(db, settings, PAGE)
        except TROUBLE:
            raise
        except Exception:
            log.exception("a page of feedback failed; it is read again one by one")
            read, last = await _one_by_one(db, settings), False
        async with db.write() as session:  # apart: what fails here is no fault of the feedback's
            asked = await enqueue.ask(session, PAGE, settings)
        total += read
        if last and asked < PAGE:
            return total
        if time.monotonic() - began > SECONDS:
            async with db.write() as session:
                enqueue_after_commit(session, "curate")
            return total


async def _page(db: Database, settings: Settings, limit: int) -> tuple[int, bool]:
    """How much feedback was read, and whether that was the last of it."""

    async def read(session: AsyncSession) -> tuple[int, bool]:
        echoes = settings.rewards.discount > 0 or await session.scalar(
            select(exists().where(Policy.rewards.is_not(None)))
        )
        found = await inbox.page(session, min(limit, ECHOING) if echoes else limit)
        if found.seqs:
            await _judge(session, found.turns, settings)
            await inbox.looked_at(session, found.seqs)
            enqueue_after_commit(session, "assemble")
        return len(found.seqs), found.last

    return await db.retry_on_deadlock(read)


async def _one_by_one(db: Database, settings: Settings) -> int:
    """What cannot be read is set aside with the reason; the rest is read."""
    total = 0
    for _ in range(PAGE):
        try:
            read, _ = await _page(db, settings, 1)
        except TROUBLE:
            raise
        except Exception as error:
            async with db.write() as session:
                await inbox.set_aside(session, f"{type(error).__name__}: {error}")
            read = 1
        total += read
        if read == 0:
            break
    return total


async def _judge(session: AsyncSession, judged: Sequence[Judged], settings: Settings) -> None:
    """Rewards kept apart by source; then the samples follow."""
    # A thumb and a judgement of the same turn come one after the other: each would miss the other's word.
    await group_samples.lock(session, [turn.id for turn in judged])
    judged = await signals.turns(session, [turn.id for turn in judged])  # as they are now that nobody may change them
    configs = await configs_of(session, judged, settings)
    said = await signals.spoken(session, judged, configs)
    known: dict[str, dict[str, Reward]] = defaultdict(dict)
    theirs = select(Reward).where(Reward.turn_id.in_(said)).order_by(Reward.turn_id, Reward.source)
    for row in await session.scalars(theirs.with_for_update()):
        known[row.turn_id][row.source] = row
    news = [
        (turn, source, word)
        for turn in judged
        for source, word in said[turn.id].items()
        if source not in known[turn.id] or known[turn.id][source].value != word.value
    ]
    trusted = await _weigh(session, news, settings)
    for turn, source, word in news:
        row = known[turn.id].get(source) or Reward(
            id=new_id("rew"), turn_id=turn.id, source=source, reward_source=EXPLICIT
        )
        row.value, row.rater = word.value, word.rater
        row.weight = trusted[turn.project_id, word.rater].weight
        session.add(row)
        known[turn.id][source] = row
    for turn in judged:
        for source in [name for name, row in known[turn.id].items() if row.reward_source == EXPLICIT]:
            if source not in said[turn.id]:
                await session.delete(known[turn.id].pop(source))
    await session.flush()
    if settings.trust:
        await _compare(session, {turn.id: turn.project_id for turn, _, _ in news}, known, news)
    held = {key: one.held for key, one in trusted.items() if one.held is not None}
    await samples.follow(session, judged, configs, settings, held)


async def _weigh(session: AsyncSession, news: Sequence[News], settings: Settings) -> dict[tuple[str, str], Trusted]:
    """By project and rater. Only what is new is counted, a word about a whole conversation or a ranking once."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    wide: set[tuple[str | None, str]] = set()
    for turn, source, word in news:
        told = (turn.conversation_id if source.startswith("conversation/") else turn.id, source)
        if source.startswith(("comparison/", "ranking/")):
            told = (None, source)
        if told not in wide:
            wide.add(told)
            values[turn.project_id][word.rater].append(word.value)
        else:
            values[turn.project_id].setdefault(word.rater, [])
    trusted: dict[tuple[str, str], Trusted] = {}
    for project_id, raters in sorted(values.items()):
        believed = await rater_trust.weigh(session, project_id, raters, settings)
        trusted |= {(project_id, name): one for name, one in believed.items()}
    return trusted


async def _compare(
    session: AsyncSession,
    projects: Mapping[str, str],
    known: Mapping[str, Mapping[str, Reward]],
    news: Collection[News],
) -> None:
    """Whoever has spoken about a turn that somebody else has spoken about agrees with them, or does not."""
    fresh = {(turn.id, source) for turn, source, _ in news}
    heard: dict[str, list[list[RaterSignal]]] = defaultdict(list)
    for turn_id, project_id in projects.items():
        heard_of = [row for row in known[turn_id].values() if row.reward_source != LEARNED]  # it repeats what they say
        spoken = [row for row in heard_of if row.reward_source == EXPLICIT or not is_person(row.rater)]
        if len(spoken) > 1:
            heard[project_id].append(
                [RaterSignal(row.rater, row.value, row.weight, (turn_id, row.source) in fresh) for row in spoken]
            )
    for project_id, turns in sorted(heard.items()):
        await rater_trust.agree(session, project_id, turns)


async def note(
    session: AsyncSession,
    turn_id: str,
    origin: str,
    value: float | None,
    *,
    rater: str | None = None,
    weight: float = 1.0,
) -> None:
    """The word of a source that is no feedback; None takes it back. `reconsider` lets the sample follow."""
    await session.execute(delete(Reward).where(Reward.turn_id == turn_id, Reward.source == origin))
    if value is not None:
        others = await session.scalars(select(Reward).where(Reward.turn_id == turn_id, Reward.reward_source != LEARNED))
        spoken = [RaterSignal(row.rater, row.value, row.weight, fresh=False) for row in others]
        project_id = await session.scalar(select(Turn.project_id).where(Turn.id == turn_id))
        if spoken and project_id is not None and not is_person(rater):  # nobody vouches for themselves
            await rater_trust.agree(session, project_id, [[*spoken, RaterSignal(rater, value, weight)]])
        session.add(
            Reward(
                id=new_id("rew"),
                turn_id=turn_id,
                source=origin,
                reward_source=origin,
                rater=rater,
                value=value,
                weight=weight,
            )
        )
    await session.flush()


async def reconsider(session: AsyncSession, turn_ids: Collection[str], settings: Settings) -> None:
    """The rewards of these turns have changed: their samples follow, and earlier ones where credit flows back."""
    await group_samples.lock(session, turn_ids)
    judged = await signals.turns(session, turn_ids)
    await samples.follow(session, judged, await configs_of(session, judged, settings), settings, {})


async def configs_of(session: AsyncSession, judged: Sequence[Judged], settings: Settings) -> dict[str, RewardsConfig]:
    """By policy."""
    ids = {turn.policy_id for turn in judged}
    rows = await session.scalars(select(Policy).where(Policy.id.in_(ids)))
    return {policy.id: rewards_of(policy, settings) for policy in rows}
