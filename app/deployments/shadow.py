"""Shadow deployments: a verified version answers live prompts beside the version that serves; users never see it.

    verified ──▶ shadow ──▶ shadow_passed ──▶ canary or live, as publishing decides
                    └──▶ rejected

The deployment does not change meanwhile. Callers that change a version hold the policy's lock.
"""

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment.config.rewards import RewardsConfig
from alignment.release.canary import ROUNDING, Arm, Decision
from alignment.release.shadow import PairCounts, ShadowConfig, comparing_sources, decide, scoring_sources
from app.core.database import database_time, now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.deployments import canary
from app.models import (
    AuditAction,
    Judgement,
    JudgementState,
    Origin,
    Policy,
    Reward,
    Rollout,
    Turn,
    TurnState,
    Version,
    VersionState,
    record_audit,
)
from app.policies.overrides import effective_config
from app.policies.references import version_name
from app.projects.consent import NO_CONSENT

SERVED, SHADOW = aliased(Turn), aliased(Turn)  # a reply that a user received, and the candidate's to the same prompt
END_USER = func.coalesce(SERVED.end_user, SERVED.conversation_id, SERVED.id)


def effective_shadow(policy: Policy, settings: Settings) -> ShadowConfig | None:
    """Return how new versions run in shadow, by the policy or the deployment; None if they do not.

    All policies share the engines, so the policy's token budget is capped by the deployment's (or by the default, where
    the deployment has no setting).
    """
    config = effective_config(policy.shadow, settings.shadow, ShadowConfig)
    if policy.shadow is None or config is None:
        return config
    limit = settings.shadow or ShadowConfig()
    return config.model_copy(update={"tokens_per_hour": min(config.tokens_per_hour, limit.tokens_per_hour)})


def active_shadow_config(policy: Policy, settings: Settings) -> ShadowConfig:
    """Return the setting of a shadow deployment that has begun; it goes on even if new versions skip the stage."""
    return effective_shadow(policy, settings) or ShadowConfig()


def start_shadow(
    session: AsyncSession, policy: Policy, version: Version, share: float, *, actor: str, reason: str
) -> None:
    """Let the version answer a `share` of the replies' prompts in shadow."""
    version.state, version.shadow_since = VersionState.SHADOW, now()
    record_audit(
        session,
        actor,
        AuditAction.SHADOW_BEGAN,
        version_name(policy, version),
        reason,
        project_id=policy.project_id,
        share=share,
    )


def pass_shadow(session: AsyncSession, policy: Policy, version: Version, *, actor: str, reason: str | None) -> None:
    """Let the version go on to publishing."""
    version.state = VersionState.SHADOW_PASSED
    record_audit(
        session, actor, AuditAction.SHADOW_PASSED, version_name(policy, version), reason, project_id=policy.project_id
    )
    enqueue_after_commit(session, "publish")


async def evaluate_shadow(
    session: AsyncSession, version: Version, serving_id: str, config: ShadowConfig, rewards: RewardsConfig
) -> tuple[Arm, Arm, PairCounts, Decision]:
    """Return the statistics of a version in shadow and of the one that serves, their pairs, and the decision."""
    assert version.shadow_since is not None
    candidate, stable = await _read_arms(session, version.id, serving_id)
    pairs, good = await _count_pairs(session, version.id, serving_id, rewards)
    served = await canary.read_arm(session, serving_id, version.shadow_since)
    # Only replies that did not fail have a shadow reply, so the failures are counted over all served replies.
    stable = replace(stable, turns=served.turns, failed=served.failed, rated=pairs.rated, good=good[1])
    candidate = replace(candidate, rated=pairs.rated, good=good[0])
    age = await database_time(session) - version.shadow_since
    return candidate, stable, pairs, decide(config, candidate, stable, pairs, age)


async def _read_arms(session: AsyncSession, version_id: str, serving_id: str) -> tuple[Arm, Arm]:
    """Return lengths and speeds of the paired replies; each end user counts once.

    The candidate's time is that of its request to the engine, without the gateway.
    """
    done = case((SHADOW.state == TurnState.DONE, 1))
    users = (
        select(
            func.max(case((SHADOW.state == TurnState.FAILED, 1), else_=0)).label("failed"),
            func.avg(done * SHADOW.num_output_tokens).label("length"),
            func.avg(done * SERVED.num_output_tokens).label("served_length"),
            func.sum(done * Rollout.duration_seconds).label("seconds"),
            func.sum(done * (SERVED.finished_at - SERVED.created_at)).label("served_seconds"),
            func.sum(done * SHADOW.num_output_tokens).label("tokens"),
            func.sum(done * SERVED.num_output_tokens).label("served_tokens"),
        )
        .join_from(SHADOW, SERVED, SERVED.id == SHADOW.shadow_of_id)
        .join(Rollout, Rollout.id == SHADOW.id)
        .where(*_paired_turns(version_id, serving_id))
        .group_by(END_USER)
        .subquery()
    ).c
    summed = (users.failed, users.seconds, users.tokens, users.served_seconds, users.served_tokens)
    totals = select(
        func.count(), func.avg(users.length), func.avg(users.served_length), *(func.sum(column) for column in summed)
    )
    row = (await session.execute(totals)).one()
    count, length, served_length, failed, seconds, tokens, served_seconds, served_tokens = row
    candidate = Arm(
        count, failed or 0, mean_length=_to_float(length), seconds_per_token=_seconds_per_token(seconds, tokens)
    )
    served = Arm(
        mean_length=_to_float(served_length), seconds_per_token=_seconds_per_token(served_seconds, served_tokens)
    )
    return candidate, served


async def _count_pairs(
    session: AsyncSession, version_id: str, serving_id: str, rewards: RewardsConfig
) -> tuple[PairCounts, tuple[int, int]]:
    """Return the pairs by end user, and how many replies of the candidate and of the served version are good.

    A pair counts once all of its judgements are made, by the reward sources that have judged both replies.
    """
    names, comparing = scoring_sources(rewards), comparing_sources(rewards)
    if not names:
        return PairCounts(), (0, 0)
    users = _select_pair_rewards(version_id, serving_id, rewards, names, comparing).subquery().c
    counts = select(
        func.count(case((users.candidate > users.served + ROUNDING, 1))),
        func.count(case((users.candidate < users.served - ROUNDING, 1))),
        func.count(),
        func.count(case((users.candidate > 0, 1))),
        func.count(case((users.served > 0, 1))),
    )
    better, worse, rated, good, served_good = (await session.execute(counts)).one()
    return PairCounts(better, rated - better - worse, worse), (good, served_good)


def _select_pair_rewards(
    version_id: str, serving_id: str, rewards: RewardsConfig, names: Sequence[str], comparing: Sequence[str]
) -> Select[tuple[float, float]]:
    """Return a query for the weighted rewards of both replies by end user: columns `candidate` and `served`.

    A source that compares replies (`comparing`) has seen both, so the gain of one is the loss of the other.
    """
    candidate, served = aliased(Reward), aliased(Reward)
    compared = candidate.source.in_(comparing)
    weight = case({source.name: source.weight for source in rewards.sources}, value=candidate.source, else_=0.0)
    unfinished = exists().where(
        Judgement.turn_id.in_((SHADOW.id, SERVED.id)),
        Judgement.source.in_(names),
        Judgement.state == JudgementState.OPEN,
    )
    return (
        select(
            func.sum(weight * candidate.value).label("candidate"),
            func.sum(weight * case((compared, -candidate.value), else_=served.value)).label("served"),
        )
        .join_from(SHADOW, SERVED, SERVED.id == SHADOW.shadow_of_id)
        .join(candidate, and_(candidate.turn_id == SHADOW.id, candidate.source.in_(names)))
        .outerjoin(served, and_(served.turn_id == SERVED.id, served.source == candidate.source))
        .where(*_paired_turns(version_id, serving_id), or_(compared, served.id.is_not(None)), ~unfinished)
        .group_by(END_USER)
    )


def _paired_turns(version_id: str, serving_id: str) -> tuple[ColumnElement[bool], ...]:
    """Finished shadow replies that are neither deleted nor without consent."""
    return (
        SHADOW.version_id == version_id,
        SHADOW.origin == Origin.SHADOW,
        SHADOW.state.in_((TurnState.DONE, TurnState.FAILED)),
        SHADOW.deleted_at.is_(None),
        or_(SHADOW.exclusion_reason.is_(None), SHADOW.exclusion_reason != NO_CONSENT),
        SERVED.version_id == serving_id,
    )


def _seconds_per_token(seconds: float | None, tokens: float | None) -> float | None:
    return float(seconds) / float(tokens) if seconds is not None and tokens else None


def _to_float(value: float | None) -> float | None:
    return None if value is None else float(value)
