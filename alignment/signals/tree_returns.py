"""Discounted returns over the turns of an episode, along the tree of what continues what."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from alignment.signals.combine_rewards import CombinedReward


class Step(NamedTuple):
    """A turn of an episode: the turn that it continues, and its own reward without the outcome of the episode."""

    id: str
    parent: str | None
    reward: CombinedReward | None = None


def tree_returns(
    steps: Sequence[Step], outcome: CombinedReward | None, discount: float
) -> dict[str, CombinedReward | None]:
    """Return the return of each turn: G_t = r_t + [t ends a line] R + γ · mean of G over the turns that continue t.

    `steps` are in order: a turn comes after the one that it continues. A turn without a reward has r_t = 0; the result
    is None where neither the turn nor a later one of its tree has a reward. With discount 1 and no rewards but the
    outcome R every return is R.

    The discount counts the turns of a line, never the calls between them: a parallel line costs nothing (AReaL's
    tree discount, areal-project/AReaL#1666). The weight of a return is that of its own reward; without one, that of the
    outcome or the mean of those of the next returns.
    """
    following: dict[str, list[str]] = defaultdict(list)
    known = {step.id for step in steps}
    for step in steps:
        if step.parent in known and step.parent is not None:
            following[step.parent].append(step.id)
    returns: dict[str, CombinedReward | None] = {}
    for step in reversed(steps):
        returns[step.id] = _return(step.reward, following.get(step.id, ()), returns, outcome, discount)
    return returns


def turn_rewards(steps: Sequence[Step], outcome: CombinedReward | None) -> dict[str, float]:
    """Return what each turn adds to its return: r_t + [t ends a line] R."""
    continued = {step.parent for step in steps}
    end = 0.0 if outcome is None else outcome.value
    return {
        step.id: (0.0 if step.reward is None else step.reward.value) + (0.0 if step.id in continued else end)
        for step in steps
    }


def episode_return(steps: Sequence[Step], outcome: CombinedReward | None) -> CombinedReward | None:
    """Return the reward of an episode as a whole, R + Σ r_t; None where it has none at all.

    Its weight is that of the outcome or, without one, the mean of those of its turns' rewards.
    """
    own = [step.reward for step in steps if step.reward is not None]
    if outcome is None and not own:
        return None
    weight = outcome.weight if outcome is not None else sum(one.weight for one in own) / len(own)
    return CombinedReward(sum(one.value for one in own) + (0.0 if outcome is None else outcome.value), weight)


def _return(
    reward: CombinedReward | None,
    following: Sequence[str],
    returns: Mapping[str, CombinedReward | None],
    outcome: CombinedReward | None,
    discount: float,
) -> CombinedReward | None:
    later = [found for id in following if (found := returns[id]) is not None]
    if not following and outcome is not None:
        later, future = [outcome], outcome.value
    else:
        future = discount * sum(one.value for one in later) / max(1, len(following))
    if reward is None and not later:
        return None
    weight = reward.weight if reward is not None else sum(one.weight for one in later) / len(later)
    return CombinedReward((reward.value if reward is not None else 0.0) + future, weight)
