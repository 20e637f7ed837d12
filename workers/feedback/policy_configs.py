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
    """By policy: the rewards. The policies whose algorithms learn from groups alone, and from groups of episodes."""

    rewards: Mapping[str, RewardsConfig]
    need_groups: frozenset[str]
    compare_episodes: frozenset[str]


async def read_policy_configs(
    session: AsyncSession, turns: Sequence[FinishedTurn], settings: Settings
) -> PolicyConfigs:
    """Return the configurations of the policies of these turns."""
    ids = {turn.policy_id for turn in turns}
    policies = list(await session.scalars(select(Policy).where(Policy.id.in_(ids))))
    algorithms = {one.id: effective_settings(one, settings).algorithm for one in policies}
    return PolicyConfigs(
        {one.id: effective_rewards(one, settings) for one in policies},
        frozenset(id for id, algorithm in algorithms.items() if algorithm.needs_groups),
        frozenset(id for id, algorithm in algorithms.items() if algorithm.compares_episodes),
    )
