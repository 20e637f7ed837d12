"""What became of a version in shadow and of what serves beside it: both replies to a prompt, judged by the policy's
own sources; the counts that its end is judged by."""

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment.config.rewards import RewardsConfig
from alignment.release.canary import GRAIN, Arm, Verdict
from alignment.release.shadow import Pairs, ShadowConfig, compare, judge, rate
from app.core.database import database_time
from app.deployments import canary_metrics
from app.models import Judgement, JudgementState, Origin, Reward, Rollout, Turn, TurnState, Version
from app.projects.consent import NO_CONSENT

CHAT, OURS = aliased(Turn), aliased(Turn)  # the reply that somebody was given, and the candidate's beside it
SPEAKER = func.coalesce(CHAT.end_user, CHAT.conversation_id, CHAT.id)


async def judged(
    session: AsyncSession, version: Version, serving_id: str, config: ShadowConfig, rewards: RewardsConfig
) -> tuple[Arm, Arm, Pairs, Verdict]:
    """The figures of a version in shadow, those of what serves (`serving_id`), and what follows from them."""
    assert version.shadow_since is not None
    candidate, stable = await _arms(session, version.id, serving_id)
    pairs, good = await _rated(session, version.id, serving_id, rewards)
    served = await canary_metrics.arm(session, serving_id, version.shadow_since)
    # Only replies that did not fail have one beside them: how many fail is to be seen in all of them.
    stable = replace(stable, turns=served.turns, failed=served.failed, rated=pairs.rated, good=good[1])
    candidate = replace(candidate, rated=pairs.rated, good=good[0])
    age = await database_time(session) - version.shadow_since
    return candidate, stable, pairs, judge(config, candidate, stable, pairs, age)


async def _arms(session: AsyncSession, version_id: str, serving_id: str) -> tuple[Arm, Arm]:
    """Each speaker counts once, however often. The candidate's time is that of asking, from the engine's door."""
    done = case((OURS.state == TurnState.DONE, 1))
    speakers = (
        select(
            func.max(case((OURS.state == TurnState.FAILED, 1), else_=0)).label("failed"),
            func.avg(done * OURS.num_output_tokens).label("length"),
            func.avg(done * CHAT.num_output_tokens).label("beside_length"),
            func.sum(done * Rollout.duration_seconds).label("seconds"),
            func.sum(done * (CHAT.finished_at - CHAT.created_at)).label("beside_seconds"),
            func.sum(done * OURS.num_output_tokens).label("tokens"),
            func.sum(done * CHAT.num_output_tokens).label("beside_tokens"),
        )
        .join_from(OURS, CHAT, CHAT.id == OURS.shadow_of_id)
        .join(Rollout, Rollout.id == OURS.id)
        .where(*_pair(version_id, serving_id))
        .group_by(SPEAKER)
        .subquery()
    )
    of = speakers.c
    sums = (of.failed, of.seconds, of.tokens, of.beside_seconds, of.beside_tokens)
    figures = select(func.count(), func.avg(of.length), func.avg(of.beside_length), *(func.sum(one) for one in sums))
    row = (await session.execute(figures.select_from(speakers))).one()
    count, length, beside_length, failed, seconds, tokens, beside_seconds, beside_tokens = row
    candidate = Arm(count, failed or 0, mean_length=_float(length), seconds_per_token=_pace(seconds, tokens))
    beside = Arm(mean_length=_float(beside_length), seconds_per_token=_pace(beside_seconds, beside_tokens))
    return candidate, beside


async def _rated(
    session: AsyncSession, version_id: str, serving_id: str, rewards: RewardsConfig
) -> tuple[Pairs, tuple[int, int]]:
    """Pairs by speaker, and how many of either side's are good. A pair counts when no source has yet to speak, and by
    the sources that have spoken of both."""
    names, comparing = rate(rewards), compare(rewards)
    if not names:
        return Pairs(), (0, 0)
    speakers = _worths(version_id, serving_id, rewards, names, comparing).subquery()
    ours, theirs = speakers.c.ours, speakers.c.theirs
    counts = select(
        func.count(case((ours > theirs + GRAIN, 1))),
        func.count(case((ours < theirs - GRAIN, 1))),
        func.count(),
        func.count(case((ours > 0, 1))),
        func.count(case((theirs > 0, 1))),
    ).select_from(speakers)
    better, worse, rated, good, beside_good = (await session.execute(counts)).one()
    return Pairs(better, rated - better - worse, worse), (good, beside_good)


def _worths(
    version_id: str, serving_id: str, rewards: RewardsConfig, names: Sequence[str], comparing: Sequence[str]
) -> Select[tuple[float, float]]:
    """Of each speaker's pairs, by the sources' weights. What compares has seen both: the one's gain is the other's
    loss."""
    mine, other = aliased(Reward), aliased(Reward)
    compared = mine.source.in_(comparing)
    weight = case({source.name: source.weight for source in rewards.sources}, value=mine.source, else_=0.0)
    unspoken = exists().where(
        Judgement.turn_id.in_((OURS.id, CHAT.id)),
        Judgement.source.in_(names),
        Judgement.state == JudgementState.OPEN,
    )
    return (
        select(
            func.sum(weight * mine.value).label("ours"),
            func.sum(weight * case((compared, -mine.value), else_=other.value)).label("theirs"),
        )
        .join_from(OURS, CHAT, CHAT.id == OURS.shadow_of_id)
        .join(mine, and_(mine.turn_id == OURS.id, mine.source.in_(names)))
        .outerjoin(other, and_(other.turn_id == CHAT.id, other.source == mine.source))
        .where(*_pair(version_id, serving_id), or_(compared, other.id.is_not(None)), ~unspoken)
        .group_by(SPEAKER)
    )


def _pair(version_id: str, serving_id: str) -> tuple[ColumnElement[bool], ...]:
    """Those that have ended, and that nobody has taken back."""
    return (
        OURS.version_id == version_id,
        OURS.origin == Origin.SHADOW,
        OURS.state.in_((TurnState.DONE, TurnState.FAILED)),
        OURS.deleted_at.is_(None),
        or_(OURS.exclusion_reason.is_(None), OURS.exclusion_reason != NO_CONSENT),
        CHAT.version_id == serving_id,
    )


def _pace(seconds: float | None, tokens: float | None) -> float | None:
    return float(seconds) / float(tokens) if seconds is not None and tokens else None


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)
