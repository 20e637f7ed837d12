"""What people made of a canary and of what serves beside it, since it is out: the counts that its end is judged by."""

from sqlalchemy import ColumnElement, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import Arm, CanaryConfig, Verdict, judge
from app.core.database import database_time
from app.core.settings import Settings
from app.models import Deployment, Origin, Policy, Reward, RouteReason, Turn, TurnState
from app.raters.names import PROGRAMS

# Sent by the pointer or the share. Whoever asked for a version, or is pinned to one, is nobody to compare by.
SENT = (RouteReason.STABLE, RouteReason.CANARY, RouteReason.STICKY)


def config_of(policy: Policy, settings: Settings) -> CanaryConfig | None:
    """How new versions go out to a few first: the policy's own, or the deployment's. None: they go live at once."""
    return settings.canary if policy.canary is None else CanaryConfig.model_validate(policy.canary)


async def judged(session: AsyncSession, deployment: Deployment, config: CanaryConfig) -> tuple[Arm, Arm, Verdict]:
    """The canary's figures, those of what serves, and what follows from them. There must be a canary."""
    assert deployment.canary_version_id is not None and deployment.canary_since is not None
    candidate = await arm(session, deployment.canary_version_id, deployment.canary_since)
    stable = await arm(session, deployment.version_id, deployment.canary_since)
    age = await database_time(session) - deployment.canary_since
    return candidate, stable, judge(config, candidate, stable, age)


async def arm(session: AsyncSession, version_id: str, since: float) -> Arm:
    """Whoever speaks counts once, however often: a user, or a conversation where requests name no user; and so does
    whoever judges. Programs and judges that give feedback have a vote for each reply; what the policy's own sources
    make of replies is no vote."""
    mine = _sent(version_id, since)
    done = case((Turn.state == TurnState.DONE, 1))
    speakers = (
        select(
            func.max(case((Turn.state == TurnState.FAILED, 1), else_=0)).label("failed"),
            func.avg(done * Turn.num_output_tokens).label("length"),
            func.sum(done * (Turn.finished_at - Turn.created_at)).label("seconds"),
            func.sum(done * Turn.num_output_tokens).label("tokens"),
        )
        .where(*mine, Turn.state != TurnState.OPEN)
        .group_by(func.coalesce(Turn.end_user, Turn.conversation_id, Turn.id))
        .subquery()
    )
    of = speakers.c
    figures = select(
        func.count(), func.sum(of.failed), func.avg(of.length), func.sum(of.seconds), func.sum(of.tokens)
    ).select_from(speakers)
    count, failed, length, seconds, tokens = (await session.execute(figures)).one()
    machines = or_(*(Reward.rater.startswith(kind) for kind in PROGRAMS))
    votes = (
        select(func.sum(Reward.value * Reward.weight).label("vote"))
        .join(Turn, Turn.id == Reward.turn_id)
        .where(*mine, Reward.rater.is_not(None), Reward.weight > 0)
        .group_by(case((machines, Turn.id), else_=Reward.rater))
        .subquery()
    )
    rated, good = (
        await session.execute(select(func.count(), func.count(case((votes.c.vote > 0, 1)))).where(votes.c.vote != 0))
    ).one()
    return Arm(
        turns=count,
        failed=failed or 0,
        rated=rated,
        good=good,
        mean_length=None if length is None else float(length),
        seconds_per_token=float(seconds) / float(tokens) if tokens else None,
    )


def _sent(version_id: str, since: float) -> tuple[ColumnElement[bool], ...]:
    return (
        Turn.version_id == version_id,
        Turn.created_at >= since,
        Turn.origin == Origin.CHAT,
        Turn.route_reason.in_(SENT),
    )
