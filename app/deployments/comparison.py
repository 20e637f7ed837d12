"""How a canary, or a version in shadow, compares with the version that serves: statistics, and what follows from them.

A version in shadow answers live prompts beside the version that serves, and users never see its replies.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, Select, Subquery, and_, case, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment.config.rewards import RewardsConfig
from alignment.release import canary, shadow
from alignment.release.canary import Arm, CanaryConfig, Decision
from alignment.release.shadow import PairCounts, ShadowConfig, comparing_sources, scoring_sources
from alignment.tolerance import TOLERANCE
from app.core.database import database_time
from app.core.planner import prefer_indexes
from app.core.settings import Settings
from app.models import (
    Deployment,
    Judgement,
    JudgementState,
    Origin,
    Policy,
    Reward,
    Rollout,
    RouteReason,
    Turn,
    TurnState,
    Version,
)
from app.policies.overrides import effective_settings
from app.projects.service import NO_CONSENT
from app.raters.approval import is_up, is_vote

# Turns that the deployment or the share routed. A request that names a version, or is pinned, was not randomized.
COMPARED_ROUTES = (RouteReason.STABLE, RouteReason.CANARY, RouteReason.STICKY)
MAX_ARM_TURNS = 50_000
MAX_READ_TURNS = 200_000  # of a version, to find these in: others were requested, pinned, or sampled off the hot path


def effective_canary(policy: Policy, settings: Settings) -> CanaryConfig | None:
    """Return how new versions go through a canary, by the policy or the deployment; None if they go live at once."""
    return effective_settings(policy, settings).release.canary


def effective_shadow(policy: Policy, settings: Settings) -> ShadowConfig | None:
    """Return how new versions run in shadow, by the policy or the deployment; None if they do not."""
    return effective_settings(policy, settings).release.shadow


def active_shadow_config(policy: Policy, settings: Settings) -> ShadowConfig:
    """Return the setting of a shadow deployment that has begun; it goes on even if new versions skip the stage."""
    return effective_shadow(policy, settings) or ShadowConfig()


async def evaluate_canary(
    session: AsyncSession, deployment: Deployment, config: CanaryConfig
) -> tuple[Arm, Arm, Decision]:
    """Return the statistics of the canary and of the version that serves, and the decision. There must be a canary."""
    assert deployment.canary_version_id is not None and deployment.canary_since is not None
    candidate = await read_arm(session, deployment.canary_version_id, deployment.canary_since)
    stable = await read_arm(session, deployment.version_id, deployment.canary_since)
    age = await database_time(session) - deployment.canary_since
    return candidate, stable, canary.decide(config, candidate, stable, age)


async def evaluate_shadow(
    session: AsyncSession, version: Version, serving_id: str, config: ShadowConfig, rewards: RewardsConfig
) -> tuple[Arm, Arm, PairCounts, Decision]:
    """Return the statistics of a version in shadow and of the one that serves, their pairs, and the decision."""
    assert version.shadow_since is not None
    await prefer_indexes(session)
    newest_pairs = await _find_newest_pairs(session, version.id, serving_id)
    pairs, good, served_good = await _count_pairs(session, newest_pairs, rewards)
    replies = await _compare_replies(session, newest_pairs)
    length_and_speed = _length_and_speed(replies.length, replies.seconds, replies.tokens)
    candidate = Arm(replies.users, replies.failed or 0, pairs.rated, good, *length_and_speed)
    # Only replies that did not fail have a shadow reply, so the failures are counted over all served replies.
    served = await read_arm(session, serving_id, version.shadow_since)
    length_and_speed = _length_and_speed(replies.served_length, replies.served_seconds, replies.served_tokens)
    stable = Arm(served.turns, served.failed, pairs.rated, served_good, *length_and_speed)
    age = await database_time(session) - version.shadow_since
    return candidate, stable, pairs, shadow.decide(config, candidate, stable, pairs, age)


async def read_arm(session: AsyncSession, version_id: str, since: float) -> Arm:
    """Return the statistics of a version since a time (Unix seconds).

    - Each end user counts once, however many turns they have; where requests name no end user, each conversation does.
    - The newest MAX_ARM_TURNS turns count that are among the newest MAX_READ_TURNS of the version, so that the duration
      of the query has a bound. The approval of so many turns is known to a few tenths of a percent, and a canary has
      ended long before, unless nearly nobody votes.
    - A request that the engine refused counts for nothing: no version is to blame for it.
    - Each person who voted counts once, by the sum of their votes (`app.raters.approval`): the test for canaries needs
      independent ratings. Programs, judges and the policy's own reward sources have no vote.
    """
    await prefer_indexes(session)  # the votes on these turns, not all there are
    routed = (
        Turn.version_id == version_id,
        Turn.created_at >= await _find_oldest(session, version_id, since),
        Turn.origin == Origin.CHAT,
        Turn.route_reason.in_(COMPARED_ROUTES),
    )
    columns = (Turn.id, Turn.state, Turn.num_output_tokens, Turn.created_at, Turn.finished_at)
    end_user = func.coalesce(Turn.end_user, Turn.conversation_id, Turn.id).label("end_user")
    newest = select(*columns, end_user).where(*routed).order_by(Turn.created_at.desc(), Turn.id.desc())
    newest_turns = newest.limit(MAX_ARM_TURNS).subquery()
    turns = newest_turns.c
    done = case((turns.state == TurnState.DONE, 1))
    users = (
        select(
            func.max(case((turns.state == TurnState.FAILED, 1), else_=0)).label("failed"),
            func.avg(done * turns.num_output_tokens).label("length"),
            func.sum(done * (turns.finished_at - turns.created_at)).label("seconds"),
            func.sum(done * turns.num_output_tokens).label("tokens"),
        )
        .where(turns.state.not_in((TurnState.OPEN, TurnState.REFUSED)))
        .group_by(turns.end_user)
        .subquery()
    ).c
    totals = select(
        func.count(), func.sum(users.failed), func.avg(users.length), func.sum(users.seconds), func.sum(users.tokens)
    )
    count, failed, length, seconds, tokens = (await session.execute(totals)).one()
    raters = (
        select(func.sum(2 * is_up() - 1).label("votes"))
        .join(newest_turns, turns.id == Reward.turn_id)
        .where(is_vote())
        .group_by(Reward.rater)
        .subquery()
    ).c
    counts = select(func.count(), func.count(case((raters.votes > 0, 1)))).where(raters.votes != 0)
    rated, good = (await session.execute(counts)).one()
    return Arm(count, failed or 0, rated, good, *_length_and_speed(length, seconds, tokens))


async def _find_oldest(session: AsyncSession, version_id: str, since: float) -> float:
    """Return the time (Unix seconds) since which turns of a version are read: its newest MAX_READ_TURNS."""
    of_version = (Turn.version_id == version_id, Turn.created_at >= since)
    newest_first = select(Turn.created_at).where(*of_version).order_by(Turn.created_at.desc())
    oldest = await session.scalar(newest_first.offset(MAX_READ_TURNS).limit(1))
    return since if oldest is None else oldest


async def _find_newest_pairs(session: AsyncSession, version_id: str, serving_id: str) -> Subquery:
    """Return a query for shadow replies and the replies that users received to the same prompts.

    The newest MAX_ARM_TURNS finished shadow replies count that are neither deleted nor without consent, among the
    newest MAX_READ_TURNS turns of the version, so that the duration of the comparison has a bound.
    """
    compared = (
        Turn.version_id == version_id,
        Turn.created_at >= await _find_oldest(session, version_id, 0.0),
        Turn.origin == Origin.SHADOW,
        Turn.state.in_((TurnState.DONE, TurnState.FAILED)),
        Turn.deleted_at.is_(None),
        or_(Turn.exclusion_reason.is_(None), Turn.exclusion_reason != NO_CONSENT),
    )
    columns = (Turn.id, Turn.shadow_of_id, Turn.state, Turn.num_output_tokens)
    # Limited before the served replies are joined: the planner then reads no more shadow replies than these.
    newest = select(*columns).where(*compared).order_by(Turn.created_at.desc(), Turn.id.desc()).limit(MAX_ARM_TURNS)
    newest_replies, served = newest.subquery(), aliased(Turn)
    shadow = newest_replies.c
    return (
        select(
            shadow.id.label("shadow_id"),
            served.id.label("served_id"),
            func.coalesce(served.end_user, served.conversation_id, served.id).label("end_user"),
            shadow.state,
            shadow.num_output_tokens.label("tokens"),
            served.num_output_tokens.label("served_tokens"),
            (served.finished_at - served.created_at).label("served_seconds"),
        )
        .join_from(newest_replies, served, served.id == shadow.shadow_of_id)
        .where(served.version_id == serving_id)
        .subquery()
    )


async def _compare_replies(session: AsyncSession, newest_pairs: Subquery) -> Row[Any]:
    """Return lengths and speeds of the paired replies; each end user counts once.

    The candidate's time is that of its request to the engine, without the gateway.
    """
    pairs = newest_pairs.c
    done = case((pairs.state == TurnState.DONE, 1))
    users = (
        select(
            func.max(case((pairs.state == TurnState.FAILED, 1), else_=0)).label("failed"),
            func.avg(done * pairs.tokens).label("length"),
            func.avg(done * pairs.served_tokens).label("served_length"),
            func.sum(done * Rollout.duration_seconds).label("seconds"),
            func.sum(done * pairs.served_seconds).label("served_seconds"),
            func.sum(done * pairs.tokens).label("tokens"),
            func.sum(done * pairs.served_tokens).label("served_tokens"),
        )
        .join_from(newest_pairs, Rollout, Rollout.id == pairs.shadow_id)
        .group_by(pairs.end_user)
        .subquery()
    ).c
    means = (func.avg(users[name]).label(name) for name in ("length", "served_length"))
    sums = (
        func.sum(users[name]).label(name) for name in ("failed", "seconds", "tokens", "served_seconds", "served_tokens")
    )
    return (await session.execute(select(func.count().label("users"), *means, *sums))).one()


async def _count_pairs(
    session: AsyncSession, newest_pairs: Subquery, rewards: RewardsConfig
) -> tuple[PairCounts, int, int]:
    """Return the pairs by end user, and how many replies of the candidate and of the served version are good.

    A pair counts once all of its judgements are made, by the reward sources that have judged both replies.
    """
    names, comparing = scoring_sources(rewards), comparing_sources(rewards)
    if not names:
        return PairCounts(), 0, 0
    users = _select_pair_rewards(newest_pairs, rewards, names, comparing).subquery().c
    counts = select(
        func.count(case((users.candidate > users.served + TOLERANCE, 1))),
        func.count(case((users.candidate < users.served - TOLERANCE, 1))),
        func.count(),
        func.count(case((users.candidate > TOLERANCE, 1))),
        func.count(case((users.served > TOLERANCE, 1))),
    )
    better, worse, rated, good, served_good = (await session.execute(counts)).one()
    return PairCounts(better, rated - better - worse, worse), good, served_good


def _select_pair_rewards(
    newest_pairs: Subquery, rewards: RewardsConfig, names: Sequence[str], comparing: Sequence[str]
) -> Select[tuple[float, float]]:
    """Return a query for the weighted rewards of both replies by end user: columns `candidate` and `served`.

    A source that compares replies (`comparing`) has seen both, so the gain of one is the loss of the other.
    """
    pairs, candidate, served = newest_pairs.c, aliased(Reward), aliased(Reward)
    compared = candidate.source.in_(comparing)
    weight = case({source.name: source.weight for source in rewards.sources}, value=candidate.source, else_=0.0)
    unfinished = [
        exists().where(
            Judgement.turn_id == turn_id, Judgement.source.in_(names), Judgement.state == JudgementState.OPEN
        )
        for turn_id in (pairs.shadow_id, pairs.served_id)
    ]
    return (
        select(
            func.sum(weight * candidate.value).label("candidate"),
            func.sum(weight * case((compared, -candidate.value), else_=served.value)).label("served"),
        )
        .join_from(newest_pairs, candidate, and_(candidate.turn_id == pairs.shadow_id, candidate.source.in_(names)))
        .outerjoin(served, and_(served.turn_id == pairs.served_id, served.source == candidate.source))
        .where(or_(compared, served.id.is_not(None)), *(~one for one in unfinished))
        .group_by(pairs.end_user)
    )


def _length_and_speed(length: Any, seconds: Any, tokens: Any) -> tuple[float | None, float | None]:
    """Return the mean length and the seconds per token as floats; PostgreSQL's averages and sums are decimals."""
    speed = float(seconds) / float(tokens) if seconds is not None and tokens else None
    return None if length is None else float(length), speed
