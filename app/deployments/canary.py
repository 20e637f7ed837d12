"""The statistics of a canary and of the version that serves, and the decision that follows from them."""

from sqlalchemy import ColumnElement, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import Arm, CanaryConfig, Decision, decide
from app.core.database import database_time
from app.core.settings import Settings
from app.models import Deployment, Origin, Policy, Reward, RouteReason, Turn, TurnState
from app.policies.overrides import effective_config
from app.raters.names import PROGRAM_PREFIXES

# Turns that the deployment or the share routed. A request that names a version, or is pinned, was not randomized.
COMPARED_ROUTES = (RouteReason.STABLE, RouteReason.CANARY, RouteReason.STICKY)


def effective_canary(policy: Policy, settings: Settings) -> CanaryConfig | None:
    """Return how new versions go through a canary, by the policy or the deployment; None if they go live at once."""
    return effective_config(policy.canary, settings.canary, CanaryConfig)


async def evaluate_canary(
    session: AsyncSession, deployment: Deployment, config: CanaryConfig
) -> tuple[Arm, Arm, Decision]:
    """Return the statistics of the canary and of the version that serves, and the decision. There must be a canary."""
    assert deployment.canary_version_id is not None and deployment.canary_since is not None
    candidate = await read_arm(session, deployment.canary_version_id, deployment.canary_since)
    stable = await read_arm(session, deployment.version_id, deployment.canary_since)
    age = await database_time(session) - deployment.canary_since
    return candidate, stable, decide(config, candidate, stable, age)


async def read_arm(session: AsyncSession, version_id: str, since: float) -> Arm:
    """Return the statistics of a version since a time (Unix seconds).

    - Each end user counts once, however many turns they have; where requests name no end user, each conversation does.
    - Each rater has one vote. Programs and LLM judges that give feedback have one vote per turn. The policy's own
      reward sources have none.
    """
    routed = _routed_turns(version_id, since)
    done = case((Turn.state == TurnState.DONE, 1))
    users = (
        select(
            func.max(case((Turn.state == TurnState.FAILED, 1), else_=0)).label("failed"),
            func.avg(done * Turn.num_output_tokens).label("length"),
            func.sum(done * (Turn.finished_at - Turn.created_at)).label("seconds"),
            func.sum(done * Turn.num_output_tokens).label("tokens"),
        )
        .where(*routed, Turn.state != TurnState.OPEN)
        .group_by(func.coalesce(Turn.end_user, Turn.conversation_id, Turn.id))
        .subquery()
    ).c
    totals = select(
        func.count(), func.sum(users.failed), func.avg(users.length), func.sum(users.seconds), func.sum(users.tokens)
    )
    count, failed, length, seconds, tokens = (await session.execute(totals)).one()
    is_program = or_(*(Reward.rater.startswith(prefix) for prefix in PROGRAM_PREFIXES))
    votes = (
        select(func.sum(Reward.value * Reward.weight).label("vote"))
        .join(Turn, Turn.id == Reward.turn_id)
        .where(*routed, Reward.rater.is_not(None), Reward.weight > 0)
        .group_by(case((is_program, Turn.id), else_=Reward.rater))
        .subquery()
    ).c
    counts = select(func.count(), func.count(case((votes.vote > 0, 1)))).where(votes.vote != 0)
    rated, good = (await session.execute(counts)).one()
    return Arm(
        turns=count,
        failed=failed or 0,
        rated=rated,
        good=good,
        mean_length=None if length is None else float(length),
        seconds_per_token=float(seconds) / float(tokens) if tokens else None,
    )


def _routed_turns(version_id: str, since: float) -> tuple[ColumnElement[bool], ...]:
    return (
        Turn.version_id == version_id,
        Turn.created_at >= since,
        Turn.origin == Origin.CHAT,
        Turn.route_reason.in_(COMPARED_ROUTES),
    )
