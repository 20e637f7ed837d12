"""Shadow deployments: a proven version answers people's prompts beside what serves, and nobody hears it.

    proven ──▶ shadow ──▶ passed its shadow deployment ──▶ canary or live, as publishing says
                   └──▶ rejected

No pointer moves meanwhile. The caller of what moves a version has the policy's lock.
"""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.release.shadow import ShadowConfig
from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Policy, Version, VersionState, record_audit
from app.policies.service import label


def config_of(policy: Policy, settings: Settings) -> ShadowConfig | None:
    """How new versions run in shadow: the policy's own way, or the deployment's. None: they do not. Engines are everybody's:
    a policy's own may take as many tokens as the deployment's, or as the default where that has none."""
    if policy.shadow is None:
        return settings.shadow
    own, most = ShadowConfig.model_validate(policy.shadow), settings.shadow or ShadowConfig()
    return own.model_copy(update={"tokens_per_hour": min(own.tokens_per_hour, most.tokens_per_hour)})


def kept(policy: Policy, settings: Settings) -> ShadowConfig:
    """Of a shadow deployment that has begun: it goes on though new versions have none any more."""
    return config_of(policy, settings) or ShadowConfig()


async def under_way(session: AsyncSession, policy_id: str) -> Version | None:
    rows = select(Version).where(Version.policy_id == policy_id, Version.state == VersionState.SHADOW)
    return await session.scalar(rows.order_by(Version.number.desc()).limit(1))


def begin(session: AsyncSession, policy: Policy, version: Version, share: float, *, actor: str, reason: str) -> None:
    version.state, version.shadow_since = VersionState.SHADOW, now()
    record_audit(session, actor, "shadow", label(policy, version), reason, project_id=policy.project_id, share=share)


def passed(session: AsyncSession, policy: Policy, version: Version, *, actor: str, reason: str | None) -> None:
    """It goes out as one that was proven just now and need not run in shadow."""
    version.state = VersionState.SHADOW_PASSED
    record_audit(session, actor, "shadow_passed", label(policy, version), reason, project_id=policy.project_id)
    enqueue_after_commit(session, "publish")
