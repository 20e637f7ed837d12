"""Which of the groups of ready samples, in their order, fit into a batch."""

from collections.abc import Sequence
from typing import NamedTuple

from alignment.tolerance import is_tie
from app.training.episode_groups import is_of_episodes, is_of_one_episode

# Of two groups, the one with the smaller priority is selected first, then the older one.
FIRST, NORMAL, AUTOMATED, WAITS_FOR_NEW = -1000, 0, 1, 2


class ReadyGroup(NamedTuple):
    """Samples of replies to one prompt, of an episode, or of those of a group: by turn the rewards that are compared.

    `is_planned` is true if the prompt comes from a prompt set, not from a chat.

    Groups sort by priority, then by `order`: the time at which the first of the samples became ready, or its negative
    for automated rewards.
    """

    priority: int
    order: float
    key: str
    rewards: dict[str, float]
    is_planned: bool


def fill_batch(
    groups: Sequence[ReadyGroup], size: int, max_planned: int, splits_episodes: bool = False
) -> dict[str, float]:
    """Return the rewards by turn of the groups that fit.

    Replies to one prompt are compared with each other, so a group is split only if it alone exceeds the batch. A group
    of episodes is never split: it may be a batch of its own, which is larger than the others. Neither is an episode,
    which takes half of the places at most, so that others are beside it (`_num_places`). Groups
    of prompt sets get at most `max_planned` places, or one group. Groups that wait for new samples get as many
    places as others; one of episodes that would never fit so joins others that fill half of the batch.
    """
    rewards: dict[str, float] = {}
    num_taken = num_planned = num_waiting = 0
    for group in groups:
        num_places, waits = _num_places(group, size, splits_episodes), group.priority == WAITS_FOR_NEW
        if group.is_planned and num_planned and num_planned + num_places > max_planned:
            continue
        is_large = is_of_episodes(group.key) and num_places > size // 2
        if waits and is_large and not num_waiting and 2 * num_taken >= size:
            return rewards | group.rewards
        if waits and 2 * num_waiting + num_places > num_taken:
            continue
        if num_taken + num_places <= size:
            rewards |= group.rewards
            num_taken += num_places
            num_planned += num_places if group.is_planned else 0
            num_waiting += num_places if waits else 0
        elif not rewards and is_of_episodes(group.key):
            return group.rewards
        elif not rewards:
            return _split_group(group, size)
    return rewards


def _num_places(group: ReadyGroup, size: int, splits_episodes: bool) -> int:
    """Return how many of the `size` places of a batch the group takes.

    An episode of no group takes half of them at most, however many turns it has: it would never fit otherwise, and the
    returns of one episode alone may be equal.
    """
    num_samples = len(group.rewards)
    return num_samples if splits_episodes or not is_of_one_episode(group.key) else min(num_samples, max(1, size // 2))


def _split_group(group: ReadyGroup, size: int) -> dict[str, float]:
    """Return the first `size` samples of the group, the last of them replaced if all rewards would be equal."""
    items = list(group.rewards.items())
    others = [item for item in items[size:] if not is_tie((item[1], items[0][1]))]
    if others and is_tie([reward for _, reward in items[:size]]):
        items[size - 1] = others[0]
    return dict(items[:size])
