"""Settings that a policy may override: its own value, or the deployment's default."""

from functools import lru_cache
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel
from sqlalchemy import null
from sqlalchemy.ext.asyncio import AsyncSession

from app.models import AuditAction, Policy, record_audit

M = TypeVar("M", bound=BaseModel)
Default = TypeVar("Default")


def effective_config(override: dict[str, Any] | None, default: Default, model: type[M]) -> M | Default:
    """Return the policy's own value as a `model`, or `default` (the deployment's setting) where the policy has none.

    Args:
        override: The JSON column of the policy, such as `policy.rewards`.
    """
    if override is None:
        return default
    config = _parse(model, orjson.dumps(override))
    assert isinstance(config, model)
    return config


@lru_cache(maxsize=1024)
def _parse(model: type[BaseModel], raw: bytes) -> BaseModel:
    return model.model_validate_json(raw)


async def reset_override(session: AsyncSession, policy: Policy, column: str, *, actor: str) -> None:
    """Clear the override in `column` (such as "rewards"), so that the deployment's setting applies again."""
    if getattr(policy, column) is None:
        return
    setattr(policy, column, null())  # None would be stored as JSON null
    await session.flush()
    await session.refresh(policy)
    record_audit(session, actor, AuditAction(f"{column}.reset"), policy.name, project_id=policy.project_id)
