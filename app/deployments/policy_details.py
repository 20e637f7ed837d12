"""A policy with its settings, those in effect and its own, as the API and the console show it."""

from typing import Any

from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.settings import Settings
from app.models import Policy
from app.policies.overrides import SECTIONS, effective_settings, find_shared, leaf_paths, own_values
from app.policies.views import PolicyView, view_policy
from app.training.policy_config import redact_rewards


class PolicyDetails(PolicyView):
    settings: dict[str, Any] = Field(description="what is in effect, by the sections and names of attune.toml")
    own: list[str] = Field(description="the settings that are the policy's own; the others are the deployment's")


async def view_details(session: AsyncSession, policy: Policy, settings: Settings) -> PolicyDetails:
    """Return the policy with its settings. Secrets of its rewards are left out."""
    effective = effective_settings(policy, settings)
    view = await view_policy(session, policy)
    values: dict[str, Any] = {
        name: adapter.dump_python(getattr(effective, name), mode="json") for name, adapter in SECTIONS.items()
    }
    values["rewards"] = redact_rewards(effective.rewards)
    shown = {name: _without_shared(table, name) for name, table in values.items()}
    return PolicyDetails(**view.model_dump(), settings=shown, own=sorted(leaf_paths(own_values(policy))))


def _without_shared(table: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the settings of a table that may differ between policies."""
    values = {}
    for name, value in table.items():
        if find_shared(f"{path}.{name}") is None:
            is_table = isinstance(value, dict) and value
            values[name] = _without_shared(value, f"{path}.{name}") if is_table else value
    return values
