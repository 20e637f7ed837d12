"""Rewards → Samples: each turn's worth, with credit from what came after it, and when it is ripe to be learned from."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config import rewards
from alignment.config.rewards import EXPLICIT, RewardsConfig, Signal
from alignment.config.rollouts import judges
from app.core.database import database_time
from app.core.settings import Settings
from app.models import WITHDRAWN, Judgement, JudgementState, Origin, Reward, Sample, SampleState, Turn
from app.raters.names import is_person
from workers.feedback import group_samples, rater_trust, signals
from workers.feedback.signals import Judged


class Heard(NamedTuple):
    """What is on record about one turn."""

    rewards: Sequence[Reward]
    asked: Mapping[str, str]  # states of its judgements, by source


async def follow(
    session: AsyncSession,
    judged: Sequence[Judged],
    configs: Mapping[str, RewardsConfig],
    settings: Settings,
    held: Mapping[tuple[str, str], str],
) -> None:
    """Samples as the rewards on record would have them; a frozen one stays as it is. `held`: by project and rater, who
    must not be learned from yet, and why."""
    judged = [turn for turn in judged if turn.origin != Origin.SHADOW]  # compared, and never learned from
    together = await group_samples.of(session, judged)
    judged = together.added_to(judged)
    everything = await _with_their_conversations(session, judged, configs)
    heard = await _heard(session, [turn.id for turn in everything])
    worths, voices = _credited(everything, heard, configs)
    mine = [turn for turn in judged if configs[turn.policy_id].discount == 0]
    mine += [turn for turn in everything if configs[turn.policy_id].discount > 0]
    rows = await session.scalars(
        select(Sample).where(Sample.turn_id.in_([turn.id for turn in mine])).order_by(Sample.turn_id).with_for_update()
    )
    known = {row.turn_id: row for row in rows}
    fresh = [turn for turn in mine if turn.id not in known and worths[turn.id] is not None]
    groups = await signals.groups(session, [turn.id for turn in mine])
    clusters = await _clusters(session, fresh) if settings.trust else {}
    at = await database_time(session)
    for turn in mine:
        worth, config = worths[turn.id], configs[turn.policy_id]
        sample = known.get(turn.id)
        if sample is None:
            if worth is None:
                continue
            sample = _new(turn, worth, clusters.get(turn.id))
            session.add(sample)
        _think_again(sample, worth, turn.exclusion_reason)
        sample.group_id = groups.get(turn.id, sample.group_id)
        if sample.state == SampleState.OPEN:
            sample.ready_at = max(
                [together.expected(turn), *(_ripe(one, heard[one.id], config, at) for one in together.beside(turn))]
            )
            sample.rater = _rater(voices[together.speaker(turn).id])
            _hold(sample, turn, voices[turn.id], held)


async def _with_their_conversations(
    session: AsyncSession, judged: Sequence[Judged], configs: Mapping[str, RewardsConfig]
) -> list[Judged]:
    """Where credit flows back, a word about one turn is news for those before it."""
    pairs = {
        (turn.project_id, turn.conversation_id)
        for turn in judged
        if turn.conversation_id is not None and configs[turn.policy_id].discount > 0
    }
    everything = {turn.id: turn for turn in judged}
    if pairs:
        everything |= {
            turn.id: turn for turn in await signals.conversations(session, pairs) if turn.policy_id in configs
        }
    return sorted(everything.values(), key=lambda turn: (turn.created_at, turn.id))


async def _heard(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, Heard]:
    spoken: dict[str, list[Reward]] = defaultdict(list)
    asked: dict[str, dict[str, str]] = defaultdict(dict)
    for reward in await session.scalars(
        select(Reward).where(Reward.turn_id.in_(turn_ids)).order_by(Reward.created_at, Reward.id)
    ):
        spoken[reward.turn_id].append(reward)
    rows = await session.execute(
        select(Judgement.turn_id, Judgement.source, Judgement.state).where(Judgement.turn_id.in_(turn_ids))
    )
    for turn_id, source, state in rows:
        asked[turn_id][source] = state
    return {id: Heard(spoken[id], asked[id]) for id in turn_ids}


def _credited(
    judged: Sequence[Judged], heard: Mapping[str, Heard], configs: Mapping[str, RewardsConfig]
) -> tuple[dict[str, float | None], dict[str, Sequence[Reward]]]:
    """From the last turn to the first: each passes its credit on to the one that it followed, and with it the voices
    that the credit rests on: whoever is held or has had their share must not come in by an earlier turn."""
    after: dict[str, str] = {}
    credits: dict[str, float | None] = {}
    voices: dict[str, Sequence[Reward]] = {}
    for turn in reversed(judged):
        config, later = configs[turn.policy_id], after.get(turn.id, "")
        mine = heard[turn.id].rewards
        said = [
            Signal(row.reward_source, row.value, row.weight, row.reward_source == EXPLICIT and is_person(row.rater))
            for row in mine
        ]
        credits[turn.id] = rewards.credit(rewards.combine(said, config), credits.get(later), config.discount)
        own = any(is_person(row.rater) for row in mine)
        voices[turn.id] = mine if own or config.discount == 0 else voices.get(later, mine)
        if turn.parent_id is not None:
            after.setdefault(turn.parent_id, turn.id)
    return credits, voices


async def _clusters(session: AsyncSession, fresh: Sequence[Judged]) -> dict[str, str | None]:
    rows = await session.execute(
        select(Turn.id, Turn.prompt_ids, Turn.output_ids).where(
            Turn.id.in_([turn.id for turn in fresh if turn.exclusion_reason is None])
        )
    )
    return {id: rater_trust.cluster(prompt or (), output or ()) for id, prompt, output in rows}


def _new(turn: Judged, reward: float, cluster: str | None) -> Sample:
    return Sample(
        turn_id=turn.id,
        policy_id=turn.policy_id,
        version_id=turn.version_id,
        conversation_id=turn.conversation_id,
        group_id=turn.completion_id,
        cluster=cluster,
        state=SampleState.DROPPED if turn.exclusion_reason else SampleState.OPEN,
        reason=turn.exclusion_reason,
        reward=reward,
        ready_at=0.0,
    )


def _think_again(sample: Sample, reward: float | None, exclusion_reason: str | None) -> None:
    """Late or second thoughts count until a batch is frozen."""
    if reward is None:
        if sample.state in (SampleState.OPEN, SampleState.QUARANTINED):
            sample.state, sample.reason = SampleState.DROPPED, WITHDRAWN
    elif sample.state in (SampleState.OPEN, SampleState.QUARANTINED):
        sample.reward = reward
    elif (sample.state, sample.reason) == (SampleState.DROPPED, WITHDRAWN) and exclusion_reason is None:
        sample.state, sample.reason, sample.reward = SampleState.OPEN, None, reward


def _ripe(turn: Judged, heard: Heard, config: RewardsConfig, at: float) -> float:
    """When the last source that has not spoken, nor declined to, is no longer waited for."""
    if turn.origin == Origin.PROMPT_SET:
        return at  # its verifier has spoken
    spoken = {reward.reward_source for reward in heard.rewards}
    settled = {source for source, state in heard.asked.items() if state != JudgementState.OPEN}
    sources = [one for one in config.sources if turn.origin == Origin.CHAT or judges(one)]
    waits = [source.window_seconds for source in sources if source.name not in spoken | settled]
    ended = turn.finished_at if turn.finished_at is not None else at
    return max(ended + max(waits), 0.0) if waits and max(waits) > 0 else at


def _rater(said: Sequence[Reward]) -> str | None:
    people = [reward for reward in said if is_person(reward.rater)]
    return max(people, key=lambda reward: reward.weight).rater if people else None


def _hold(sample: Sample, turn: Judged, said: Sequence[Reward], held: Mapping[tuple[str, str], str]) -> None:
    """One word of somebody who is held is enough: it is part of what the sample is worth."""
    reasons = [why for row in said if (why := held.get((turn.project_id, row.rater or ""))) is not None]
    if reasons:
        sample.state, sample.reason = SampleState.QUARANTINED, reasons[0]
