"""A policy's deployment and its pins as the API and the console show them."""

from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.canary import Arm, CanaryConfig, Decision
from alignment.release.shadow import disabled_reason
from app.core.pagination import Page
from app.core.settings import Settings
from app.deployments import comparison, pins
from app.deployments.schemas import ArmView, CanaryView, DeploymentView, PinView, ShadowView
from app.engines import fleet
from app.models import ConversationRouting, Deployment, Engine, Pin, PinKind, Policy, Version
from app.policies import repository
from app.policies.references import version_name
from app.raters.approval import approval_fields
from app.training.policy_config import effective_rewards


async def view_deployment(session: AsyncSession, policy: Policy, settings: Settings) -> DeploymentView:
    """Return which version serves, and the statistics of the canary and of the shadow deployment."""
    deployment = await repository.get_deployment(session, policy.id)
    serving = version_name(policy, await repository.get_version(session, deployment.version_id))
    return DeploymentView.from_row(
        deployment,
        policy=policy.name,
        serving=serving,
        previous=await repository.find_version_name(session, policy, deployment.previous_version_id),
        canary=await _view_canary(session, policy, deployment, settings, serving),
        shadow=await _view_shadow(session, policy, deployment, settings, serving),
        conversations=ConversationRouting(policy.conversations),
        canary_overridden=policy.canary is not None,
        canary_config=comparison.effective_canary(policy, settings),
        shadow_overridden=policy.shadow is not None,
        shadow_config=comparison.effective_shadow(policy, settings),
    )


async def view_pins(
    session: AsyncSession, policy: Policy, limit: int, kind: PinKind | None = None, after: str | None = None
) -> Page[PinView]:
    """Return the policy's pins, by id, after the pin with the id `after`."""
    rows = await pins.list_pins(session, policy.id, kind, after, limit)
    engines = await fleet.list_ready_engines(session)
    return Page.from_rows([view_pin(policy, pin, version, engines) for pin, version in rows], limit)


def view_pin(policy: Policy, pin: Pin, version: Version, engines: list[Engine]) -> PinView:
    """Return one pin. `engines` are the ready ones."""
    return PinView.from_row(
        pin,
        policy=policy.name,
        version=version_name(policy, version),
        loaded=any(fleet.is_loaded(engine, version) for engine in engines),
        created_by=pin.actor,
    )


async def _view_canary(
    session: AsyncSession, policy: Policy, deployment: Deployment, settings: Settings, serving: str
) -> CanaryView | None:
    if deployment.canary_version_id is None or deployment.canary_since is None:
        return None
    config = comparison.effective_canary(policy, settings) or CanaryConfig()
    version = await repository.get_version(session, deployment.canary_version_id)
    candidate, stable, decision = await comparison.evaluate_canary(session, deployment, config)
    return CanaryView(
        share=deployment.canary_share,
        since=deployment.canary_since,
        until=deployment.canary_since + config.patience_seconds,
        watched=deployment.canary_watched,
        **_view_comparison(version_name(policy, version), candidate, serving, stable, decision),
    )


async def _view_shadow(
    session: AsyncSession, policy: Policy, deployment: Deployment, settings: Settings, serving: str
) -> ShadowView | None:
    version = await repository.find_shadow_version(session, policy.id)
    if version is None or version.shadow_since is None:
        return None
    config, rewards = comparison.active_shadow_config(policy, settings), effective_rewards(policy, settings)
    candidate, stable, pairs, decision = await comparison.evaluate_shadow(
        session, version, deployment.version_id, config, rewards
    )
    return ShadowView(
        share=config.share,
        since=version.shadow_since,
        disabled_reason=disabled_reason(config, rewards),
        **vars(pairs),
        **_view_comparison(version_name(policy, version), candidate, serving, stable, decision),
    )


def _view_comparison(version: str, candidate: Arm, serving: str, stable: Arm, decision: Decision) -> dict[str, object]:
    """Return the fields that a CanaryView and a ShadowView share."""
    return {
        "version": version,
        "candidate": _view_arm(version, candidate),
        "stable": _view_arm(serving, stable),
        "verdict": decision.action,
        "reason": decision.reason,
        "figures": dict(decision.figures),
    }


def _view_arm(version: str, arm: Arm) -> ArmView:
    fields = vars(arm) | approval_fields(arm.approval)._asdict()
    return ArmView(version=version, **fields)
