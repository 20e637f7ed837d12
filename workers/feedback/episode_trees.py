"""Credit in episodes whose turns are not rewarded one by one: by returns along the tree of their turns
(`rewards.episode_credit` "return"), or as one attempt of a group of episodes."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from alignment.signals.combine_rewards import CombinedReward
from alignment.signals.tree_returns import Step, episode_return, step_rewards, tree_returns
from app.episodes import graph
from app.models import EndReason, Episode, EpisodeState, Reward, Turn, TurnState
from app.raters.names import is_person
from app.training.episode_groups import key_of_group
from workers.feedback import signals
from workers.feedback.policy_configs import PolicyConfigs
from workers.feedback.signals import FinishedTurn

ON_EPISODE, ON_CONVERSATION = "episode/", "conversation/"  # how the sources of feedback on a whole begin
RowsByTurn = Mapping[str, Sequence[Reward]]
Combine = Callable[[Sequence[Reward]], CombinedReward | None]


@dataclass(frozen=True)
class EpisodeTree:
    """The finished chats of an episode in order, and the turn that each of them continues, or None for a root.

    `aside` are turns that no line of the tree goes through: another choice was taken, or the reply failed. They have
    the rewards of their own alone. `group` is the key of the samples' group, if the episode is compared with others.
    """

    policy_id: str
    episode: Episode
    turns: Sequence[FinishedTurn]
    parents: Mapping[str, str | None]
    aside: frozenset[str]
    group: str | None

    def returns(self, combine: Combine, counted: RowsByTurn, config: RewardsConfig) -> dict[str, CombinedReward | None]:
        """Return the return of each turn; the reward of the whole episode, where outcomes of a group are compared.

        Feedback on the whole episode is its outcome. Feedback on a whole conversation counts for the last turn of it.
        """
        steps, aside = self._steps(combine, counted)
        outcome = combine(self.outcomes(counted))
        if config.episode_credit == "outcome":
            return aside | dict.fromkeys((step.id for step in steps), episode_return(steps, outcome))
        return aside | tree_returns(steps, outcome, config.episode_discount)

    def step_returns(self, combine: Combine, counted: RowsByTurn, config: RewardsConfig) -> dict[str, float]:
        """Return the return of each turn that has one, whatever its reward is."""
        steps, _ = self._steps(combine, counted)
        found = tree_returns(steps, combine(self.outcomes(counted)), config.episode_discount)
        return {id: one.value for id, one in found.items() if one is not None}

    def step_rewards(self, combine: Combine, counted: RowsByTurn) -> dict[str, float]:
        """Return what each turn adds to its return, with the outcome at the end of each line."""
        steps, _ = self._steps(combine, counted)
        return step_rewards(steps, combine(self.outcomes(counted)))

    def _steps(self, combine: Combine, counted: RowsByTurn) -> tuple[list[Step], dict[str, CombinedReward | None]]:
        """Return the turns of the tree with the rewards of their own, and the rewards of those aside."""
        going_on = self._turns_whose_conversation_goes_on()
        own: dict[str, CombinedReward | None] = {}
        for turn in self.turns:
            elsewhere = (ON_EPISODE, ON_CONVERSATION) if turn.id in going_on else (ON_EPISODE,)
            own[turn.id] = combine([row for row in counted[turn.id] if not row.source.startswith(elsewhere)])
        steps = [Step(turn.id, self.parents[turn.id], own[turn.id]) for turn in self.turns if turn.id not in self.aside]
        return steps, {id: own[id] if self.group is None else None for id in self.aside}

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
            of_turns = [counted[turn.id] for turn in self.turns]
            return {turn.id: _with_person_or_first(counted[turn.id], *of_turns) for turn in self.turns}
        rated_by: dict[str, Sequence[Reward]] = {}
        later: dict[str, Sequence[Reward]] = {}  # by turn: the rewards of the turns that continue it
        for turn in reversed(self.turns):
            rated_by[turn.id] = _with_person_or_first(counted[turn.id], later.get(turn.id, ()))
            parent = self.parents[turn.id]
            if parent is not None and turn.id not in self.aside:
                later[parent] = _with_person_or_first(rated_by[turn.id], later.get(parent, ()))
        return rated_by

    def known_at(self, counted: RowsByTurn, config: RewardsConfig) -> float:
        """Return when the rewards of the episode are known: at its end, or `credit_seconds` later without an outcome.

        Its end lets curation compute this again, so an open episode has the time of its last possible end.
        """
        if self.episode.state == EpisodeState.OPEN:
            return self.episode.deadline_at + config.credit_seconds
        if self.outcomes(counted) or self.episode.end_reason == EndReason.ABANDONED:
            return 0.0
        return (self.episode.ended_at or 0.0) + config.credit_seconds

    def _turns_whose_conversation_goes_on(self) -> set[str]:
        conversations = {turn.id: turn.conversation_id for turn in self.turns}
        return {
            parent
            for turn in self.turns
            if (parent := self.parents[turn.id]) is not None and conversations[parent] == turn.conversation_id
        }


def ready_times(
    trees: Collection[EpisodeTree],
    returns: Mapping[str, CombinedReward | None],
    counted: RowsByTurn,
    configs: Mapping[str, RewardsConfig],
    time: float,
) -> dict[str, float]:
    """Return by turn when its sample is ready: when the rewards of the episode are known, or those of its whole group.

    A group is whole when as many attempts as planned have a reward. One that was lost may be replaced as long as the
    others could have lasted. `time` is that of the database.
    """
    known_at = {tree.episode.id: tree.known_at(counted, configs[tree.policy_id]) for tree in trees}
    groups: dict[str, list[EpisodeTree]] = defaultdict(list)
    for tree in trees:
        if tree.group is not None:
            groups[tree.group].append(tree)
    for members in groups.values():
        ready_at = max(known_at[tree.episode.id] for tree in members)
        num_alive = sum(
            known_at[tree.episode.id] > time or any(returns[turn.id] is not None for turn in tree.turns)
            for tree in members
        )
        if num_alive < (members[0].episode.group_size or 0):
            latest = max(tree.episode.deadline_at for tree in members)
            ready_at = max(ready_at, latest + configs[members[0].policy_id].credit_seconds)
        known_at |= dict.fromkeys((tree.episode.id for tree in members), ready_at)
    return {turn.id: known_at[tree.episode.id] for tree in trees for turn in tree.turns}


async def read_trees(session: AsyncSession, turns: Sequence[FinishedTurn], configs: PolicyConfigs) -> list[EpisodeTree]:
    """Return the trees of the episodes of these turns, and of the other episodes of their groups.

    Those are episodes of policies that credit turns by returns, or that compare the episodes of a group. Of a very long
    episode these are the latest MAX_SERIES_TURNS turns; earlier ones have their own rewards.
    """
    by_return = {id for id, config in configs.rewards.items() if config.episode_credit == "return"}
    policies = {
        turn.episode_id: turn.policy_id
        for turn in turns
        if turn.episode_id is not None and turn.policy_id in by_return | configs.compare_episodes
    }
    episodes = list(await session.scalars(select(Episode).where(Episode.id.in_(policies)).order_by(Episode.id)))
    groups = {
        (episode.project_id, episode.policy_id, episode.group_id)
        for episode in episodes
        if episode.group_id is not None and episode.policy_id in configs.compare_episodes
    }
    if groups:
        in_group = tuple_(Episode.project_id, Episode.policy_id, Episode.group_id).in_(sorted(groups))
        wanted = select(Episode).where(or_(Episode.id.in_(policies), in_group)).order_by(Episode.id)
        episodes = list(await session.scalars(wanted))
    trees = []
    for episode in episodes:
        policy_id, is_grouped = policies.get(episode.id, episode.policy_id), _key(episode) in groups
        if policy_id not in by_return and not is_grouped:
            continue
        series = await signals.read_series(session, "episode", [(episode.project_id, episode.id)])
        chats = [turn for turn in series if turn.policy_id == policy_id]
        trees.append(await _read_tree(session, episode, chats, policy_id, is_grouped=is_grouped))
    return trees


def _key(episode: Episode) -> tuple[str, str, str | None]:
    return episode.project_id, episode.policy_id, episode.group_id


async def _read_tree(
    session: AsyncSession, episode: Episode, turns: Sequence[FinishedTurn], policy_id: str, *, is_grouped: bool
) -> EpisodeTree:
    ids = {turn.id: turn for turn in turns}
    query = select(*graph.COLUMNS).where(Turn.id.in_(ids))
    rows = (await session.execute(query.order_by(Turn.episode_step, Turn.choice_index, Turn.id))).all()
    shown = graph.build_graph(rows)
    continued = {turn.parent_turn_id for turn in shown}
    continued_steps = {turn.step for turn in shown if turn.id in continued}
    aside = (
        turn.id
        for turn in shown
        if turn.id not in continued and (turn.state != TurnState.DONE or turn.step in continued_steps)
    )
    return EpisodeTree(
        policy_id,
        episode,
        [ids[turn.id] for turn in shown],
        {turn.id: turn.parent_turn_id for turn in shown},
        frozenset(aside),
        key_of_group(episode.group_id) if is_grouped and episode.group_id is not None else None,
    )


def _with_person_or_first(*candidates: Sequence[Reward]) -> Sequence[Reward]:
    """Return the first rewards that a person gave or, if there are none, the first ones."""
    with_person = (rows for rows in candidates if any(is_person(row.rater) for row in rows))
    return next(with_person, next((rows for rows in candidates if rows), ()))
