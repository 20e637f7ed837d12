"""Signals → rewards, one row for each turn and source; then the samples of the turns are updated."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import EXPLICIT, LEARNED
from alignment.signals.rater_trust import RaterSignal
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import Reward, Turn, new_id
from app.raters.names import is_person
from workers.feedback import rater_trust, sample_groups, samples, signals
from workers.feedback.policy_configs import read_policy_configs
from workers.feedback.rater_trust import RaterTrust
from workers.feedback.signals import FeedbackSignal, FinishedTurn

RewardsByTurn = Mapping[str, Mapping[str, Reward]]  # by turn, then by source key


class NewSignal(NamedTuple):
    """A signal that is not stored as a reward yet."""

    turn: FinishedTurn
    source: str
    signal: FeedbackSignal


async def update_rewards(session: AsyncSession, turns: Sequence[FinishedTurn], settings: Settings) -> None:
    """Store the feedback about these turns as rewards, one for each source, and update the samples."""
    # Feedback and a judgement of the same turn must come one after the other, or each would miss the other's reward.
    await sample_groups.lock_groups(session, [turn.id for turn in turns])
    turns = await signals.read_finished_turns(session, [turn.id for turn in turns])  # as they are under the lock
    configs = await read_policy_configs(session, turns, settings)
    signals_by_turn = await signals.read_signals(session, turns, configs.rewards, configs.compare_episodes)
    stored: dict[str, dict[str, Reward]] = defaultdict(dict)
    rows = select(Reward).where(Reward.turn_id.in_(signals_by_turn)).order_by(Reward.turn_id, Reward.source)
    for row in await session.scalars(rows.with_for_update()):
        stored[row.turn_id][row.source] = row
    new_signals = [
        NewSignal(turn, source, signal)
        for turn in turns
        for source, signal in signals_by_turn[turn.id].items()
        if source not in stored[turn.id] or stored[turn.id][source].value != signal.value
    ]
    for turn in turns:
        for source, signal in signals_by_turn[turn.id].items():
            if source in stored[turn.id]:  # a repeated vote is no new signal, but the reward comes from it
                stored[turn.id][source].feedback_seq = signal.feedback_seq
    trust = await _update_trust(session, new_signals, settings)
    for turn, source, signal in new_signals:
        row = stored[turn.id].get(source) or Reward(
            id=new_id("rew"), turn_id=turn.id, source=source, reward_source=EXPLICIT
        )
        row.value, row.rater, row.feedback_seq = signal.value, signal.rater, signal.feedback_seq
        row.weight = trust[turn.project_id, signal.rater].weight
        session.add(row)
        stored[turn.id][source] = row
    for turn in turns:
        for source in [name for name, row in stored[turn.id].items() if row.reward_source == EXPLICIT]:
            if source not in signals_by_turn[turn.id]:
                await session.delete(stored[turn.id].pop(source))
    await session.flush()
    if settings.raters.trust:
        await _record_agreement(session, stored, new_signals)
    await samples.update_samples(session, turns, configs, settings)


async def _update_trust(
    session: AsyncSession, new_signals: Sequence[NewSignal], settings: Settings
) -> dict[tuple[str, str], RaterTrust]:
    """Return the trust by (project id, rater). Feedback about a whole conversation or a ranking is counted once."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    counted: set[tuple[str | None, str]] = set()
    for turn, source, signal in new_signals:
        key = (turn.conversation_id if source.startswith("conversation/") else turn.id, source)
        if source.startswith(("comparison/", "ranking/")):
            key = (None, source)
        rater_values = values[turn.project_id][signal.rater]
        if key not in counted:
            counted.add(key)
            rater_values.append(signal.value)
    trust: dict[tuple[str, str], RaterTrust] = {}
    for project_id, raters in sorted(values.items()):
        project_trust = await rater_trust.update_trust(session, project_id, raters, settings)
        trust |= {(project_id, name): one for name, one in project_trust.items()}
    return trust


async def _record_agreement(session: AsyncSession, stored: RewardsByTurn, new_signals: Collection[NewSignal]) -> None:
    """Compare the rewards of each turn that has a new signal: its raters agree, or they do not."""
    new_keys = {(turn.id, source) for turn, source, _ in new_signals}
    projects = {turn.id: turn.project_id for turn, _, _ in new_signals}
    comparisons: dict[str, list[list[RaterSignal]]] = defaultdict(list)
    for turn_id, project_id in projects.items():
        rows = [row for row in stored[turn_id].values() if row.reward_source != LEARNED]  # it repeats what raters say
        rows = [row for row in rows if row.reward_source == EXPLICIT or not is_person(row.rater)]
        if len(rows) > 1:
            comparisons[project_id].append(
                [RaterSignal(row.rater, row.value, row.weight, (turn_id, row.source) in new_keys) for row in rows]
            )
    for project_id, turns in sorted(comparisons.items()):
        await rater_trust.record_agreement(session, project_id, turns)


async def record_reward(
    session: AsyncSession, turn_id: str, source: str, value: float, *, rater: str | None = None, weight: float = 1.0
) -> None:
    """Store the reward of a source other than feedback. Call `update_turn_samples` afterwards."""
    await session.execute(delete(Reward).where(Reward.turn_id == turn_id, Reward.source == source))
    # Nobody confirms their own feedback, and a reward model repeats what raters said.
    if source != LEARNED and not is_person(rater):
        others = await session.scalars(select(Reward).where(Reward.turn_id == turn_id, Reward.reward_source != LEARNED))
        other_signals = [RaterSignal(row.rater, row.value, row.weight, fresh=False) for row in others]
        project_id = await session.scalar(select(Turn.project_id).where(Turn.id == turn_id))
        if other_signals and project_id is not None:
            comparison = [*other_signals, RaterSignal(rater, value, weight)]
            await rater_trust.record_agreement(session, project_id, [comparison])
    values = {"turn_id": turn_id, "rater": rater, "value": value, "weight": weight}
    session.add(Reward(id=new_id("rew"), source=source, reward_source=source, **values))
    await session.flush()


async def update_turn_samples(session: AsyncSession, turn_ids: Collection[str], settings: Settings) -> None:
    """Update the samples of turns whose rewards changed, and of earlier turns where the policy discounts.

    Enqueues `assemble`, since the samples may be ready now.
    """
    await sample_groups.lock_groups(session, turn_ids)
    turns = await signals.read_finished_turns(session, turn_ids)
    await samples.update_samples(session, turns, await read_policy_configs(session, turns, settings), settings)
    enqueue_after_commit(session, "assemble")
