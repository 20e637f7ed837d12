"""What the samples of some turns depend on besides their feedback: the rewards and the algorithms of their policies."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from app.core.settings import Settings
from app.models import Policy
from app.policies.overrides import effective_settings
from app.training.policy_config import effective_rewards
from workers.feedback.signals import FinishedTurn


class PolicyConfigs(NamedTuple):
    """By policy: the rewards. And the policies whose algorithms learn from groups alone."""

    rewards: Mapping[str, RewardsConfig]
    need_groups: frozenset[str]


async def read_policy_configs(
    session: AsyncSession, turns: Sequence[FinishedTurn], settings: Settings
) -> PolicyConfigs:
    """Return the configurations of the policies of these turns."""
    ids = {turn.policy_id for turn in turns}
    policies = list(await session.scalars(select(Policy).where(Policy.id.in_(ids))))
    need_groups = (one.id for one in policies if effective_settings(one, settings).algorithm.needs_groups)
    return PolicyConfigs({one.id: effective_rewards(one, settings) for one in policies}, frozenset(need_groups))
