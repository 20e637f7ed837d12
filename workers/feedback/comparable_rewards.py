"""Which rewards the replies to one prompt are compared by: those of the sources that all of them have.

A judge that graded three of four replies, or a vote that one of them got, would otherwise decide the comparison: the
reply would be better or worse than the others by its source instead of by its quality.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from alignment.config.rewards import EXPLICIT
from alignment.signals.combine_rewards import USER_FEEDBACK_SOURCES
from app.models import Reward
from workers.feedback.signals import FinishedTurn

RewardsByTurn = Mapping[str, Sequence[Reward]]


def select_comparable(
    turns: Iterable[FinishedTurn], rewards: RewardsByTurn, ranked_groups: Mapping[str, str]
) -> tuple[dict[str, list[Reward]], set[str]]:
    """Return the rewards that count for each turn, and the turns that cannot be compared with others of their group.

    The members of a group are the replies of one completion that may be trained on and have a reward. If they have no
    source in common, those that only users have judged are left out of the group. Replies that were ranked against each
    other (`ranked_groups`, by turn) are compared by people's feedback alone: the ranking is what all of them have.
    """
    counted = {turn_id: list(rows) for turn_id, rows in rewards.items()}
    alone: set[str] = set()
    completions: dict[str, list[str]] = defaultdict(list)
    for turn in turns:
        if turn.id in ranked_groups:
            counted[turn.id] = [row for row in counted[turn.id] if row.reward_source == EXPLICIT]
        elif turn.exclusion_reason is None and _sources(counted[turn.id]):
            completions[turn.completion_id].append(turn.id)
    for members in completions.values():
        common, compared = _common_sources({id: _sources(counted[id]) for id in members})
        alone |= set(members) - compared
        for id in compared:
            counted[id] = [row for row in counted[id] if row.reward_source in common]
    return counted, alone


def _sources(rows: Iterable[Reward]) -> set[str]:
    return {row.reward_source for row in rows if row.weight > 0}


def _common_sources(sources: Mapping[str, Collection[str]]) -> tuple[set[str], set[str]]:
    """Return the sources that the members have in common, and the members that have them; nothing if there are none."""
    seen_by_users_only = {id for id, names in sources.items() if set(names) <= set(USER_FEEDBACK_SOURCES)}
    for compared in (set(sources), set(sources) - seen_by_users_only):
        common = set.intersection(*(set(sources[id]) for id in compared)) if compared else set()
        if common:
            return common, compared
    return set(), set()
