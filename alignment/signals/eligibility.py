"""Which turns a reward source judges, and which completions get group samples."""

import hashlib
from collections.abc import Sequence

from alignment.config.rewards import RewardsConfig, Source
from alignment.config.rollouts import GroupSamplingConfig

USER_FEEDBACK_SOURCES = ("explicit", "next_turn")  # they need a user, so they cannot score a rollout
GROUP_SAMPLING = "group_sampling"  # the name under which a completion's share is drawn


def is_in_share(turn_id: str, source: str, share: float) -> bool:
    """Return whether the turn is in the source's share. The result is stable, and independent between sources."""
    digest = hashlib.sha256(f"{source}/{turn_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def scores_unseen_replies(source: Source) -> bool:
    """Return whether the source can score a reply that no user has seen."""
    return source.type not in USER_FEEDBACK_SOURCES


def group_sampling_disabled_reason(config: GroupSamplingConfig, rewards: RewardsConfig) -> str | None:
    """Return why group sampling is disabled, None if it is enabled."""
    if config.extra_replies == 0:
        return "extra_replies is 0"
    if config.tokens_per_hour == 0:
        return "tokens_per_hour is 0"
    if not any(scores_unseen_replies(source) for source in rewards.sources):
        return "no reward source of the policy can score a reply that no user has seen"
    if rewards.discount > 0:
        return "rewards.discount uses the rewards of later turns, which group samples do not have"
    return None


def needs_group_samples(completion_id: str, config: GroupSamplingConfig, sources: Sequence[Source]) -> bool:
    """Return whether this completion gets group samples: it is in the share, and some source will score them."""
    if not is_in_share(completion_id, GROUP_SAMPLING, config.share):
        return False
    return any(
        scores_unseen_replies(source) and is_in_share(completion_id, source.name, getattr(source, "share", 1.0))
        for source in sources
    )
