"""Credit in episodes whose turns are not rewarded one by one: by returns along the tree of their turns
(`rewards.episode_credit` "return"), or as one attempt of a group of episodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from alignment.config.rewards import EXPLICIT, RewardsConfig
from alignment.signals.combine_rewards import CombinedReward
from alignment.signals.tree_returns import Step, episode_return, tree_returns, turn_rewards
from app.models import Episode, Reward
from app.raters.names import is_person
from workers.feedback.signals import FinishedTurn

ON_EPISODE, ON_CONVERSATION = "episode/", "conversation/"  # how the sources of feedback on a whole begin
RowsByTurn = Mapping[str, Sequence[Reward]]
Combine = Callable[[Sequence[Reward]], CombinedReward | None]


@dataclass(frozen=True)
class EpisodeTree:
    """The finished chats of an episode in order, and the turn that each of them continues, or None for a root.

    `off_path` are turns that no line of the tree goes through: another reply to the same request was taken, or the
    reply failed. They have the rewards of their own alone, and are not compared. `group` is the key of the samples'
    group, if the episode is compared with others.
    """

    policy_id: str
    episode: Episode
    turns: Sequence[FinishedTurn]
    parents: Mapping[str, str | None]
    off_path: frozenset[str]
    group: str | None

    def returns(self, combine: Combine, counted: RowsByTurn, config: RewardsConfig) -> dict[str, CombinedReward | None]:
        """Return the return of each turn; the reward of the whole episode, where outcomes of a group are compared.

        Feedback on the whole episode is its outcome. Feedback on a whole conversation counts for the last turn of it.
        Turns off the path have their own rewards or, in a group, none.
        """
        own = self.own_rewards(combine, counted)
        off_path = {id: own[id] if self.group is None else None for id in self.off_path}
        if config.episode_credit == "outcome":
            reward = self.reward(combine, counted)
            return off_path | {turn.id: reward for turn in self.turns if turn.id not in self.off_path}
        return off_path | tree_returns(self._steps(own), combine(self.outcomes(counted)), config.episode_discount)

    def reward(self, combine: Combine, counted: RowsByTurn) -> CombinedReward | None:
        """Return the reward of the whole episode: its outcome, the feedback on its turns, and the mean of the rewards
        of its other turns.

        Those come from judges and models, and as a sum they would grow with the number of turns.
        """
        steps = self._steps(self.own_rewards(combine, counted))
        by_feedback = [
            step for step in steps if any(row.reward_source == EXPLICIT for row in self._own(counted, step.id))
        ]
        others = [step.reward for step in steps if step.reward is not None and step not in by_feedback]
        if others:
            means = (sum(column) / len(others) for column in zip(*others, strict=True))
            by_feedback.append(Step("others", None, CombinedReward(*means)))
        return episode_return(by_feedback, combine(self.outcomes(counted)))

    def turn_returns(self, combine: Combine, counted: RowsByTurn, config: RewardsConfig) -> dict[str, float]:
        """Return the return of each turn that has one, whatever its reward is."""
        steps = self._steps(self.own_rewards(combine, counted))
        found = tree_returns(steps, combine(self.outcomes(counted)), config.episode_discount)
        return {id: one.value for id, one in found.items() if one is not None}

    def turn_rewards(self, combine: Combine, counted: RowsByTurn) -> dict[str, float]:
        """Return what each turn adds to its return, with the outcome at the end of each line."""
        return turn_rewards(self._steps(self.own_rewards(combine, counted)), combine(self.outcomes(counted)))

    def own_rewards(self, combine: Combine, counted: RowsByTurn) -> dict[str, CombinedReward | None]:
        """Return the reward of each turn without the outcome of the episode."""
        return {turn.id: combine(self._own(counted, turn.id)) for turn in self.turns}

    def _own(self, counted: RowsByTurn, turn_id: str) -> list[Reward]:
        elsewhere = (ON_EPISODE, ON_CONVERSATION) if turn_id in self._going_on else (ON_EPISODE,)
        return [row for row in counted[turn_id] if not row.source.startswith(elsewhere)]

    def _steps(self, own: Mapping[str, CombinedReward | None]) -> list[Step]:
        on_path = (turn.id for turn in self.turns if turn.id not in self.off_path)
        return [Step(id, self.parents[id], own[id]) for id in on_path]

    def outcomes(self, counted: RowsByTurn) -> list[Reward]:
        """Return the rewards of the episode as a whole, one of each source. Every turn has a copy of them."""
        found: dict[str, Reward] = {}
        for turn in self.turns:
            for row in counted[turn.id]:
                if row.source.startswith(ON_EPISODE):
                    found.setdefault(row.source, row)
        return list(found.values())

    def raters(self, counted: RowsByTurn, config: RewardsConfig) -> dict[str, Sequence[Reward]]:
        """Return the rewards of each turn's raters: its own or, if no person rated it, the nearest later ones.

        A reward of the whole episode has the raters of all its turns.
        """
        if config.episode_credit == "outcome":
            of_turns = [counted[turn.id] for turn in self.turns if turn.id not in self.off_path]
            return {turn.id: _with_person_or_first(counted[turn.id], *of_turns) for turn in self.turns}
        rated_by: dict[str, Sequence[Reward]] = {}
        later: dict[str, Sequence[Reward]] = {}  # by turn: the rewards of the turns that continue it
        for turn in reversed(self.turns):
            rated_by[turn.id] = _with_person_or_first(counted[turn.id], later.get(turn.id, ()))
            parent = self.parents[turn.id]
            if parent is not None and turn.id not in self.off_path:
                later[parent] = _with_person_or_first(rated_by[turn.id], later.get(parent, ()))
        return rated_by

    def all_raters(self, counted: RowsByTurn, config: RewardsConfig) -> dict[str, frozenset[str]]:
        """Return the names of all raters whose feedback is a part of each turn's reward."""
        names = {turn.id: _raters(counted[turn.id]) for turn in self.turns}
        if config.episode_credit == "outcome":
            on_path = frozenset[str]().union(*(names[turn.id] for turn in self.turns if turn.id not in self.off_path))
            return {id: own if id in self.off_path else on_path for id, own in names.items()}
        for turn in reversed(self.turns):
            parent = self.parents[turn.id]
            if parent in names and parent is not None and turn.id not in self.off_path:
                names[parent] |= names[turn.id]
        return names

    @cached_property
    def _going_on(self) -> frozenset[str]:
        """The turns whose conversations go on."""
        conversations = {turn.id: turn.conversation_id for turn in self.turns}
        return frozenset(
            parent
            for turn in self.turns
            if (parent := self.parents[turn.id]) is not None and conversations[parent] == turn.conversation_id
        )


def _raters(rows: Sequence[Reward]) -> frozenset[str]:
    return frozenset(row.rater for row in rows if row.rater is not None)


def _with_person_or_first(*candidates: Sequence[Reward]) -> Sequence[Reward]:
    """Return the first rewards that a person gave or, if there are none, the first ones."""
    with_person = (rows for rows in candidates if any(is_person(row.rater) for row in rows))
    return next(with_person, next((rows for rows in candidates if rows), ()))
