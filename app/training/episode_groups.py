"""The keys of samples that a batch has all of, or none (`Sample.group_id`): where the episodes of a group are compared,
and where the turns of an episode are rewarded by their returns. And the limits of groups."""

import hashlib

PREFIX = "episodes/"
PREFIX_OF_ONE = "episode/"
DIGEST_CHARS = 32
MAX_SIZE = 128  # episodes that a group may be planned to have
MAX_SERIES_TURNS = 256  # feedback about a conversation or an episode applies to at most so many turns
MAX_ATTEMPTS = 2 * MAX_SIZE  # with those that replace lost ones


def key_of_group(group_id: str, start_version_id: str | None) -> str:
    """Return the key of the samples of a group of episodes. `group_id` is the caller's name of it.

    It holds a digest of that name, which may be personal: the samples stay when the episodes are erased. Episodes that
    started on another version are compared with each other alone: they come from another distribution.
    """
    digest = hashlib.sha256(group_id.encode()).hexdigest()[:DIGEST_CHARS]
    return f"{PREFIX}{digest}" if start_version_id is None else f"{PREFIX}{digest}/{start_version_id}"


def is_of_episodes(key: str) -> bool:
    """Return whether the key is that of a group of episodes, and not of replies to one prompt."""
    return key.startswith(PREFIX)


def key_of_episode(episode_id: str) -> str:
    """Return the key of the samples of an episode that is of no group."""
    return f"{PREFIX_OF_ONE}{episode_id}"


def is_of_one_episode(key: str) -> bool:
    """Return whether the key is that of an episode, and of no group."""
    return key.startswith(PREFIX_OF_ONE)
