"""The return of each turn: its reward with the discounted rewards of later turns of its conversation or episode."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from alignment.config.rewards import EXPLICIT, RewardsConfig
from alignment.signals.combine_rewards import CombinedReward, Signal, combine_rewards, discounted_return
from app.models import Reward
from app.raters.names import is_person
from workers.feedback.episode_trees import EpisodeTree
from workers.feedback.signals import FinishedTurn

RowsByTurn = Mapping[str, Sequence[Reward]]  # the rewards that count for each turn


class Returns(NamedTuple):
    """By turn: the reward with the discounted rewards of later turns (the return), the rewards of its main raters, and
    the names of all.

    The weight of a return is that of the turn's own reward or, without one, of the next turn's return.
    """

    values: Mapping[str, CombinedReward | None]
    turn_returns: Mapping[str, float]  # of the turns of compared episodes, whose value is that of the whole episode
    turn_rewards: Mapping[str, float]  # of turns in trees: what each adds to its return
    episode_rewards: Mapping[str, float]  # of the turns of compared episodes: that of the whole episode
    off_path: Mapping[str, CombinedReward | None]  # their own rewards, of turns that no compared episode went on from
    rated_by: Mapping[str, Sequence[Reward]]
    raters: Mapping[str, Collection[str]]  # the names of all whose feedback is a part of the return


def compute_returns(
    turns: Sequence[FinishedTurn],
    trees: Collection[EpisodeTree],
    counted: RowsByTurn,
    configs: Mapping[str, RewardsConfig],
    machine_weight: float,
) -> Returns:
    """Return the discounted rewards, computed from the last turn to the first.

    The turns of `trees` get theirs along the tree of their episode, the others along their conversation. A turn that
    only inherits a reward inherits its raters too: a rater who is quarantined, or has the allowed share of a batch,
    must not get in through an earlier turn. `machine_weight` multiplies the weights of rewards without rater.
    """
    next_turn: dict[str, FinishedTurn] = {}
    for turn in turns:  # the last one that continues a turn
        if turn.parent_id is not None:
            next_turn[turn.parent_id] = turn
    values: dict[str, CombinedReward | None] = {}
    rated_by: dict[str, Sequence[Reward]] = {}
    turn_returns: dict[str, float] = {}
    turn_rewards: dict[str, float] = {}
    episode_rewards: dict[str, float] = {}
    off_path: dict[str, CombinedReward | None] = {}
    raters: dict[str, Collection[str]] = {}
    for tree in trees:
        config = configs[tree.policy_id]
        combine_rows = partial(combine, config=config, machine_weight=machine_weight)
        values |= tree.returns(combine_rows, counted, config)
        turn_returns |= tree.turn_returns(combine_rows, counted, config) if tree.group is not None else {}
        turn_rewards |= tree.turn_rewards(combine_rows, counted)
        rated_by |= tree.raters(counted, config)
        raters |= tree.all_raters(counted, config)
        if tree.group is not None:
            own = tree.own_rewards(combine_rows, counted)
            off_path |= {id: own[id] for id in tree.off_path}
            if (reward := tree.reward(combine_rows, counted)) is not None:
                episode_rewards |= dict.fromkeys((turn.id for turn in tree.turns), reward.value)
    for turn in turns:
        if turn.id in values:
            continue
        config = configs[turn.policy_id]
        rewards = [counted[turn.id], *_later_rewards(turn, next_turn, counted, config)]
        credit: CombinedReward | None = None
        for rows in reversed(rewards):
            reward = combine(rows, config, machine_weight)
            value = discounted_return(reward and reward.value, credit and credit.value, config.discount)
            weighted = reward or credit
            credit = None if value is None or weighted is None else CombinedReward(value, weighted.weight)
        values[turn.id] = credit
        with_person = (rows for rows in rewards if any(is_person(row.rater) for row in rows))
        rated_by[turn.id] = next(with_person, rewards[0] or next((rows for rows in rewards if rows), rewards[0]))
        raters[turn.id] = {row.rater for rows in rewards for row in rows if row.rater is not None}
    return Returns(values, turn_returns, turn_rewards, episode_rewards, off_path, rated_by, raters)


def credit_deadline(turn: FinishedTurn, config: RewardsConfig) -> float:
    """Return when all turns that count for this one have ended and were judged, or never will be; 0 without credit."""
    if config.discount == 0 or turn.conversation_id is None or turn.finished_at is None:
        return 0.0
    return turn.finished_at + config.credit_seconds + config.window_seconds


def combine(rows: Sequence[Reward], config: RewardsConfig, machine_weight: float) -> CombinedReward | None:
    """Return the reward of a turn. A machine's reward counts as much as the vote of a new rater."""
    signals = [
        Signal(
            row.reward_source,
            row.value,
            row.weight if row.rater is not None else row.weight * machine_weight,
            row.reward_source == EXPLICIT and is_person(row.rater),
        )
        for row in rows
    ]
    return combine_rewards(signals, config)


def _later_rewards(
    turn: FinishedTurn, next_turn: Mapping[str, FinishedTurn], counted: RowsByTurn, config: RewardsConfig
) -> list[list[Reward]]:
    """Return the rewards of the later turns that count for this one, the next turn's first.

    These are the turns that end within `credit_seconds` after it, and their rewards up to its deadline. So its return
    is the same whenever they are judged: before the deadline its sample is not ready, and afterwards nothing counts.
    """
    later: list[list[Reward]] = []
    deadline, following = credit_deadline(turn, config), next_turn.get(turn.id)
    while config.discount > 0 and following is not None:
        if (following.finished_at or 0.0) > (turn.finished_at or 0.0) + config.credit_seconds:
            break
        later.append([row for row in counted[following.id] if row.created_at <= deadline])
        following = next_turn.get(following.id)
    return later
