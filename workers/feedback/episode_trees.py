"""Credit along an episode's tree of turns (`rewards.episode_credit` "return"): which turns share it, and how."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import RewardsConfig
from alignment.signals.combine_rewards import CombinedReward
from alignment.signals.tree_returns import Step, tree_returns
from app.episodes import graph
from app.models import Episode, EpisodeState, Reward, Turn, TurnState
from app.raters.names import is_person
from workers.feedback import signals
from workers.feedback.signals import FinishedTurn

ON_EPISODE, ON_CONVERSATION = "episode/", "conversation/"  # how the sources of feedback on a whole begin
RowsByTurn = Mapping[str, Sequence[Reward]]
Combine = Callable[[Sequence[Reward]], CombinedReward | None]


@dataclass(frozen=True)
class EpisodeTree:
    """The finished chats of an episode in order, and the turn that each of them continues, or None for a root.

    `aside` are turns that no line of the tree goes through: another choice was taken, or the reply failed. They have
    the rewards of their own alone.
    """

    policy_id: str
    turns: Sequence[FinishedTurn]
    parents: Mapping[str, str | None]
    aside: frozenset[str]
    state: EpisodeState
    deadline_at: float
    ended_at: float | None

    def returns(self, combine: Combine, counted: RowsByTurn, config: RewardsConfig) -> dict[str, CombinedReward | None]:
        """Return the return of each turn.

        Feedback on the whole episode is its outcome. Feedback on a whole conversation counts for the last turn of it.
        """
        outcome = combine(self.outcomes(counted))
        going_on = self._turns_whose_conversation_goes_on()
        own: dict[str, CombinedReward | None] = {}
        for turn in self.turns:
            elsewhere = (ON_EPISODE, ON_CONVERSATION) if turn.id in going_on else (ON_EPISODE,)
            own[turn.id] = combine([row for row in counted[turn.id] if not row.source.startswith(elsewhere)])
        steps = [Step(turn.id, self.parents[turn.id], own[turn.id]) for turn in self.turns if turn.id not in self.aside]
        return {id: own[id] for id in self.aside} | tree_returns(steps, outcome, config.episode_discount)

    def outcomes(self, counted: RowsByTurn) -> list[Reward]:
        """Return the rewards of the episode as a whole, one of each source. Every turn has a copy of them."""
        found: dict[str, Reward] = {}
        for turn in self.turns:
            for row in counted[turn.id]:
                if row.source.startswith(ON_EPISODE):
                    found.setdefault(row.source, row)
        return list(found.values())

    def raters(self, counted: RowsByTurn) -> dict[str, Sequence[Reward]]:
        """Return the rewards of each turn's raters: its own or, if no person rated it, the nearest later ones."""
        rated_by: dict[str, Sequence[Reward]] = {}
        later: dict[str, Sequence[Reward]] = {}  # by turn: the rewards of the turns that continue it
        for turn in reversed(self.turns):
            rated_by[turn.id] = _with_person_or_first(counted[turn.id], later.get(turn.id, ()))
            parent = self.parents[turn.id]
            if parent is not None and turn.id not in self.aside:
                later[parent] = _with_person_or_first(rated_by[turn.id], later.get(parent, ()))
        return rated_by

    def ready_at(self, counted: RowsByTurn, config: RewardsConfig) -> float:
        """Return when the rewards of the episode are known: at its end, or `credit_seconds` later without an outcome.

        Its end lets curation compute this again, so an open episode has the time of its last possible end.
        """
        if self.state == EpisodeState.OPEN:
            return self.deadline_at + config.credit_seconds
        if self.outcomes(counted):
            return 0.0
        return (self.ended_at or 0.0) + config.credit_seconds

    def _turns_whose_conversation_goes_on(self) -> set[str]:
        conversations = {turn.id: turn.conversation_id for turn in self.turns}
        return {
            parent
            for turn in self.turns
            if (parent := self.parents[turn.id]) is not None and conversations[parent] == turn.conversation_id
        }


async def read_trees(
    session: AsyncSession, turns: Sequence[FinishedTurn], configs: Mapping[str, RewardsConfig]
) -> list[EpisodeTree]:
    """Return the trees of the episodes of these turns, where the policy credits the turns of an episode by returns.

    Of a very long episode these are the latest MAX_SERIES_TURNS; earlier ones have their own rewards.
    """
    policies = {
        (turn.project_id, turn.episode_id): turn.policy_id
        for turn in turns
        if turn.episode_id is not None and configs[turn.policy_id].episode_credit == "return"
    }
    by_episode: dict[str, list[FinishedTurn]] = defaultdict(list)
    for turn in await signals.read_series(session, "episode", policies.keys()):
        if turn.episode_id is not None and turn.policy_id == policies[turn.project_id, turn.episode_id]:
            by_episode[turn.episode_id].append(turn)
    rows = await session.scalars(select(Episode).where(Episode.id.in_(by_episode)).order_by(Episode.id))
    return [await _read_tree(session, episode, by_episode[episode.id]) for episode in rows]


async def _read_tree(session: AsyncSession, episode: Episode, turns: Sequence[FinishedTurn]) -> EpisodeTree:
    ids = {turn.id: turn for turn in turns}
    query = select(*graph.COLUMNS).where(Turn.id.in_(ids))
    rows = (await session.execute(query.order_by(Turn.episode_step, Turn.choice_index, Turn.id))).all()
    shown = graph.build_graph(rows)
    continued = {turn.parent_turn_id for turn in shown}
    continued_steps = {turn.step for turn in shown if turn.id in continued}
    aside = frozenset(
        turn.id
        for turn in shown
        if turn.id not in continued and (turn.state != TurnState.DONE or turn.step in continued_steps)
    )
    return EpisodeTree(
        turns[0].policy_id,
        [ids[turn.id] for turn in shown],
        {turn.id: turn.parent_turn_id for turn in shown},
        aside,
        EpisodeState(episode.state),
        episode.deadline_at,
        episode.ended_at,
    )


def _with_person_or_first(*candidates: Sequence[Reward]) -> Sequence[Reward]:
    """Return the first rewards that a person gave or, if there are none, the first ones."""
    with_person = (rows for rows in candidates if any(is_person(row.rater) for row in rows))
    return next(with_person, next((rows for rows in candidates if rows), ()))
