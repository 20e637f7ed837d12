"""When the samples of an episode are ready: once its rewards are known, or those of all attempts of its group."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from alignment.config.rewards import RewardsConfig
from alignment.signals.combine_rewards import CombinedReward
from app.models import LOST_REASONS, EpisodeState
from workers.feedback.episode_trees import EpisodeTree, RowsByTurn


def ready_times(
    trees: Collection[EpisodeTree],
    returns: Mapping[str, CombinedReward | None],
    counted: RowsByTurn,
    configs: Mapping[str, RewardsConfig],
    answered_at: Mapping[str, float],
    time: float,
) -> dict[str, float]:
    """Return by turn when its sample is ready: when the rewards of the episode are known, or those of its whole group.

    A group is whole when as many attempts as planned have a reward. One that was lost may be replaced as long as the
    others could have lasted.

    Args:
        answered_at: For each turn, when all sources of its rewards have answered or are waited for no longer.
        time: That of the database.
    """
    known_at = {tree.episode.id: _known_at(tree, counted, configs[tree.policy_id], answered_at) for tree in trees}
    groups: dict[tuple[str, str | None], list[EpisodeTree]] = defaultdict(list)
    for tree in trees:
        if tree.group is not None:
            groups[tree.policy_id, tree.episode.group_id].append(tree)
    for members in groups.values():
        ready_at = max(known_at[tree.episode.id] for tree in members)
        num_rewarded_or_pending = sum(
            known_at[tree.episode.id] > time or any(returns[turn.id] is not None for turn in tree.turns)
            for tree in members
        )
        if num_rewarded_or_pending < (members[0].episode.group_size or 0):
            latest = max(tree.episode.deadline_at for tree in members)
            ready_at = max(ready_at, latest + configs[members[0].policy_id].credit_seconds)
        known_at |= dict.fromkeys((tree.episode.id for tree in members), ready_at)
    return {turn.id: known_at[tree.episode.id] for tree in trees for turn in tree.turns}


def _known_at(tree: EpisodeTree, counted: RowsByTurn, config: RewardsConfig, answered_at: Mapping[str, float]) -> float:
    """Return when the rewards of the episode are known: at its end, or `credit_seconds` later without an outcome; and
    not before all sources have answered for all of its turns.

    Its end lets curation compute this again, so an open episode has the time of its last possible end.
    """
    on_path = (turn for turn in tree.turns if turn.id not in tree.off_path and turn.exclusion_reason is None)
    last_answer = max((answered_at[turn.id] for turn in on_path), default=0.0)
    if tree.episode.state == EpisodeState.OPEN:
        return max(last_answer, tree.episode.deadline_at + config.credit_seconds)
    if tree.outcomes(counted) or (tree.episode.reported_reason or tree.episode.end_reason) in LOST_REASONS:
        return last_answer
    return max(last_answer, (tree.episode.ended_at or 0.0) + config.credit_seconds)
