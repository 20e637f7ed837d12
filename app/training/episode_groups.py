"""The key of the samples' group where the episodes of a group are compared (`Sample.group_id`)."""

PREFIX = "episodes/"


def key_of_group(group_id: str) -> str:
    """Return the key of the samples of a group of episodes. `group_id` is the caller's name of it."""
    return f"{PREFIX}{group_id}"


def is_of_episodes(key: str) -> bool:
    """Return whether the key is that of a group of episodes, and not of replies to one prompt."""
    return key.startswith(PREFIX)
