"""What a policy has set for itself, in place of the deployment's."""

from sqlalchemy import null
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import Policy, record_audit


async def reset(session: AsyncSession, policy: Policy, what: str, *, actor: str) -> None:
    """`what`: the column, such as "rewards". The deployment's again; on record if that changes anything."""
    if getattr(policy, what) is None:
        return
    setattr(policy, what, null())  # None would be kept as JSON's
    await session.flush()
    await session.refresh(policy)
    record_audit(session, actor, f"reset {what}", policy.name, project_id=policy.project_id)
