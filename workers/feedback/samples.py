"""Rewards → samples: the reward of each turn, with the discounted rewards of later turns, and when it is ready."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import EXPLICIT, RewardsConfig
from alignment.signals.combine_rewards import CombinedReward, scores_unseen_replies
from alignment.tolerance import is_tie
from app.chat.histories import read_prompt_ids
from app.core.database import chunked, database_time
from app.core.settings import Settings
from app.models import (
    Judgement,
    JudgementState,
    Origin,
    Rater,
    RaterStanding,
    Reward,
    Sample,
    SampleRule,
    SampleState,
    Turn,
)
from app.raters.names import is_person
from app.training import episode_groups
from app.training.automated_samples import find_replaceable
from app.training.batch_samples import UNDONE
from app.training.unlearning import WITHDRAWN
from app.training.vote_totals import reopen_votes_on_turns
from workers.feedback import corrections, lost_attempts, rater_trust, sample_groups, signals
from workers.feedback.comparable_rewards import select_comparable
from workers.feedback.group_readiness import ready_times
from workers.feedback.policy_configs import PolicyConfigs
from workers.feedback.read_trees import read_trees
from workers.feedback.returns import compute_returns, credit_deadline
from workers.feedback.signals import FinishedTurn

OFF_PATH = "the attempts of its group are compared, and its episode did not go on from its reply"
WAITING = (SampleState.OPEN, SampleState.QUARANTINED)  # states in which a sample may still change
USABLE_AGAIN = (SampleRule.WITHDRAWN, SampleRule.OFF_PATH, SampleRule.ATTEMPT_LOST)  # once the turn has a reward


class TurnRewards(NamedTuple):
    """The rewards of one turn, and the sources whose judgements are done, skipped or failed."""

    rewards: Sequence[Reward]
    settled_sources: Collection[str]


async def update_samples(
    session: AsyncSession,
    turns: Sequence[FinishedTurn],
    configs: PolicyConfigs,
    settings: Settings,
) -> None:
    """Create or change the samples of these turns and of their groups as their rewards demand.

    A sample in a batch stays as it is, but for a person's feedback that replaces an automated reward after the update
    (app/training/automated_samples.py). Samples with the feedback of a quarantined rater wait for an admin.
    """
    turns = [turn for turn in turns if turn.origin != Origin.SHADOW]  # compared, but never trained on
    rewards, need_groups = configs.rewards, configs.need_groups
    groups = await sample_groups.read_groups(session, turns, with_choices_of=need_groups)
    turns = groups.with_members(turns)
    all_turns = await _with_conversations(session, turns, rewards)
    trees = await read_trees(session, all_turns, configs)
    trees_by_turn = {turn.id: tree for tree in trees for turn in tree.turns}
    all_turns = signals.in_order([*all_turns, *(turn for tree in trees for turn in tree.turns)])
    turn_ids = [turn.id for turn in all_turns]
    turn_rewards = await _read_rewards(session, turn_ids)
    comparison_groups = await signals.read_comparison_groups(session, turn_ids)
    counted, alone = {id: list(one.rewards) for id, one in turn_rewards.items()}, set[str]()
    if need_groups:
        grouped = [turn for turn in all_turns if turn.policy_id in need_groups]
        counted, alone = select_comparable(grouped, counted, comparison_groups)
    returns = compute_returns(all_turns, trees, counted, rewards, rater_trust.newcomer_trust(settings).weight)
    changed = {turn.id for turn in turns} | trees_by_turn.keys()
    affected = [turn for turn in all_turns if turn.id in changed or rewards[turn.policy_id].discount > 0]
    affected_ids = [turn.id for turn in affected]
    samples: dict[str, Sample] = {}
    for chunk in chunked(affected_ids):
        rows = select(Sample).where(Sample.turn_id.in_(chunk)).order_by(Sample.turn_id).with_for_update()
        samples |= {row.turn_id: row for row in await session.scalars(rows)}
    voted = {turn.id for turn in affected if _has_vote(counted[turn.id]) and rewards[turn.policy_id].uses_feedback}
    replaceable = await find_replaceable(session, voted)
    new_turns = [turn for turn in affected if turn.id not in samples and returns.values[turn.id] is not None]
    clusters = await _read_clusters(session, new_turns) if settings.raters.trust else {}
    usable_texts = await corrections.find_usable(session, (row for turn in affected for row in counted[turn.id]))
    time = await database_time(session)
    answered_at = {turn.id: _ready_at(turn, turn_rewards[turn.id], rewards[turn.policy_id], time) for turn in all_turns}
    of_lost = await lost_attempts.find_turns_of_lost(session, all_turns, returns.raters)
    values = {id: None if id in of_lost else value for id, value in returns.values.items()}
    known_at = ready_times(trees, values, counted, rewards, answered_at, time)
    quarantined = await _read_quarantined(session, affected, returns.raters)
    for turn in affected:
        reward, config = values[turn.id], rewards[turn.policy_id]
        sample = samples.get(turn.id)
        if sample is None:
            known_reward = returns.values[turn.id] or returns.off_path.get(turn.id)
            if known_reward is None:
                continue
            sample = _new_sample(turn, known_reward, clusters.get(turn.id))
            session.add(sample)
        has_feedback = _has_feedback(counted[turn.id])
        is_unused = _has_feedback(turn_rewards[turn.id].rewards) and not has_feedback
        uses_feedback = config.uses_feedback and not is_unused
        if turn.id in replaceable and turn.exclusion_reason is None:
            _open_again(sample)
        elif turn.id not in voted:
            _close_again(sample)
        if turn.id in of_lost:
            _drop_waiting(sample, SampleRule.ATTEMPT_LOST, lost_attempts.REASON)
        elif turn.id in returns.off_path:
            _drop_waiting(sample, SampleRule.OFF_PATH, OFF_PATH)
        else:
            _update_reward(
                sample, reward, turn.exclusion_reason, has_feedback=has_feedback, uses_feedback=uses_feedback
            )
        if sample.state in WAITING:
            sample.turn_return = returns.turn_returns.get(turn.id)
            sample.turn_reward = returns.turn_rewards.get(turn.id)
            sample.episode_reward = returns.episode_rewards.get(turn.id)
        tree = trees_by_turn.get(turn.id)
        is_compared = tree is not None and tree.group is not None
        sample.episode_id = turn.episode_id if is_compared else None
        if tree is not None and tree.group is not None:
            sample.group_id = tree.group
        elif tree is not None and turn.id not in tree.off_path and turn.policy_id not in need_groups:
            sample.group_id = episode_groups.key_of_episode(tree.episode.id)
        elif turn.id in alone:
            sample.group_id = f"turn/{turn.id}"  # not the id of its completion, which may be the same
        elif turn.policy_id in need_groups:
            sample.group_id = comparison_groups.get(turn.id, turn.completion_id)
        else:
            is_of_episode = episode_groups.is_of_one_episode(sample.group_id or "")
            group = turn.completion_id if is_of_episode else sample.group_id
            sample.group_id = comparison_groups.get(turn.id, group)
        if sample.state in WAITING:
            sample.is_corrected = uses_feedback and corrections.has_usable(counted[turn.id], usable_texts)
        if sample.state == SampleState.OPEN:
            member_times = [
                _ready_at(member, turn_rewards[member.id], config, time) for member in groups.trainable_group(turn)
            ]
            credit_at = known_at[turn.id] if turn.id in known_at else credit_deadline(turn, config)
            sample.ready_at = max([groups.open_until.get(turn.completion_id, 0.0), credit_at, *member_times])
            sample.rater = _main_rater(returns.rated_by[groups.rated_turn(turn).id])
            _quarantine(sample, turn, returns.raters[turn.id], quarantined)
        if sample.origin is not None:  # for a new sample the assembly fills it in, with the columns beside it
            is_automated = sample.rater is None and not _has_feedback(turn_rewards[turn.id].rewards)
            sample.is_automated = is_automated and turn.origin != Origin.PROMPT_SET
    await session.flush()
    await reopen_votes_on_turns(session, affected_ids)


async def _with_conversations(
    session: AsyncSession, turns: Sequence[FinishedTurn], configs: Mapping[str, RewardsConfig]
) -> list[FinishedTurn]:
    """Add the other turns of the conversations whose policy discounts: a reward changes the turns before it."""
    pairs = {
        (turn.project_id, turn.conversation_id)
        for turn in turns
        if turn.conversation_id is not None and configs[turn.policy_id].discount > 0
    }
    conversations = await signals.read_series(session, "conversation", pairs)
    return signals.in_order([*turns, *(turn for turn in conversations if turn.policy_id in configs)])


async def _read_rewards(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, TurnRewards]:
    turn_rewards: dict[str, list[Reward]] = defaultdict(list)
    settled_sources: dict[str, set[str]] = defaultdict(set)
    for chunk in chunked(turn_ids):
        of_turns = select(Reward).where(Reward.turn_id.in_(chunk)).order_by(Reward.created_at, Reward.id)
        for reward in await session.scalars(of_turns):
            turn_rewards[reward.turn_id].append(reward)
        has_settled = (Judgement.turn_id.in_(chunk), Judgement.state != JudgementState.OPEN)
        for turn_id, source in await session.execute(select(Judgement.turn_id, Judgement.source).where(*has_settled)):
            settled_sources[turn_id].add(source)
    return {id: TurnRewards(turn_rewards[id], settled_sources[id]) for id in turn_ids}


def _has_feedback(rows: Sequence[Reward]) -> bool:
    return any(row.reward_source == EXPLICIT for row in rows)


def _has_vote(rows: Sequence[Reward]) -> bool:
    return any(row.reward_source == EXPLICIT and is_person(row.rater) and row.weight > 0 for row in rows)


def _open_again(sample: Sample) -> None:
    """Let a person's feedback replace the automated reward that an update has learned from."""
    sample.state, sample.automated_batch_id, sample.batch_id = SampleState.OPEN, sample.batch_id, None
    sample.rule = sample.reason = None


def _close_again(sample: Sample) -> None:
    """Put a sample back whose feedback was withdrawn before an update: its automated reward was learned from."""
    is_withdrawn = sample.state == SampleState.DROPPED and sample.rule == SampleRule.WITHDRAWN
    if sample.automated_batch_id is not None and (sample.state in WAITING or is_withdrawn):
        sample.state, sample.batch_id, sample.automated_batch_id = SampleState.TRAINED, sample.automated_batch_id, None
        sample.rule = sample.reason = None


async def _read_clusters(session: AsyncSession, turns: Sequence[FinishedTurn]) -> dict[str, str | None]:
    ids = [turn.id for turn in turns if turn.exclusion_reason is None]
    rows = await session.execute(select(Turn.id, Turn.output_ids).where(Turn.id.in_(ids)))
    prompt_ids = await read_prompt_ids(session, ids)
    return {id: rater_trust.cluster_key(prompt_ids.get(id, ()), output_ids or ()) for id, output_ids in rows}


def _new_sample(turn: FinishedTurn, reward: CombinedReward, cluster: str | None) -> Sample:
    return Sample(
        turn_id=turn.id,
        policy_id=turn.policy_id,
        version_id=turn.version_id,
        conversation_id=turn.conversation_id,
        group_id=turn.completion_id,
        cluster=cluster,
        state=SampleState.DROPPED if turn.exclusion_reason else SampleState.OPEN,
        rule=SampleRule.EXCLUDED if turn.exclusion_reason else None,
        reason=turn.exclusion_reason,
        reward=reward.value,
        weight=reward.weight,
        ready_at=0.0,
    )


def _update_reward(
    sample: Sample,
    reward: CombinedReward | None,
    exclusion_reason: str | None,
    *,
    has_feedback: bool,
    uses_feedback: bool,
) -> None:
    """Apply the new reward. Late and changed feedback counts until the sample is in a batch.

    A sample that was dropped since its score was too old is used again when somebody gives feedback on its reply.
    """
    if reward is None:
        if sample.state in WAITING:
            sample.state, sample.rule, sample.reason = SampleState.DROPPED, SampleRule.WITHDRAWN, WITHDRAWN
    elif sample.state in WAITING:
        if sample.reason == UNDONE and not is_tie((reward.value, sample.reward)):
            sample.reason = None  # it has new feedback itself
        sample.reward, sample.weight, sample.uses_feedback = reward.value, reward.weight, uses_feedback
    elif sample.state == SampleState.DROPPED and exclusion_reason is None:
        is_usable_again = sample.rule in USABLE_AGAIN or (
            sample.rule == SampleRule.TOO_OLD and has_feedback and uses_feedback
        )
        if not is_usable_again:
            return
        sample.state, sample.rule, sample.reason = SampleState.OPEN, None, None
        sample.reward, sample.weight, sample.uses_feedback = reward.value, reward.weight, uses_feedback


def _drop_waiting(sample: Sample, rule: SampleRule, reason: str) -> None:
    """Drop a sample that has not been learned from, or say by which rule a dropped one is."""
    if sample.state in WAITING or (sample.state == SampleState.DROPPED and sample.rule == SampleRule.WITHDRAWN):
        sample.state, sample.rule, sample.reason = SampleState.DROPPED, rule, reason


def _ready_at(turn: FinishedTurn, turn_rewards: TurnRewards, config: RewardsConfig, time: float) -> float:
    """Return when the windows of all sources that have neither answered nor declined are over."""
    if turn.origin == Origin.PROMPT_SET:
        return time  # only its verifier counts, and it has run
    answered = {reward.reward_source for reward in turn_rewards.rewards}.union(turn_rewards.settled_sources)
    sources = [source for source in config.sources if turn.origin == Origin.CHAT or scores_unseen_replies(source)]
    window = max((source.window_seconds for source in sources if source.name not in answered), default=0.0)
    return (time if turn.finished_at is None else turn.finished_at) + window if window > 0 else time


def _main_rater(turn_rewards: Sequence[Reward]) -> str | None:
    """Return the person with the most weight among the raters; without one, the program with the most weight.

    A program that sends feedback has the caps of a person. The deployment's own judges are no raters, nor is who has no
    weight.
    """
    raters = [reward for reward in turn_rewards if reward.rater is not None and reward.weight > 0]
    people = [reward for reward in raters if is_person(reward.rater)]
    return max(people or raters, key=lambda reward: reward.weight).rater if raters else None


def _quarantine(
    sample: Sample, turn: FinishedTurn, raters: Collection[str], quarantined: Mapping[tuple[str, str], str]
) -> None:
    """Quarantine the sample if one of its raters is quarantined: that feedback is part of its reward."""
    for rater in sorted(raters):
        if (reason := quarantined.get((turn.project_id, rater))) is not None:
            sample.state, sample.reason = SampleState.QUARANTINED, reason
            return


async def _read_quarantined(
    session: AsyncSession, turns: Sequence[FinishedTurn], raters: Mapping[str, Collection[str]]
) -> dict[tuple[str, str], str]:
    """Return why the quarantined ones among the raters of these turns are, by (project id, rater)."""
    found: dict[tuple[str, str], str] = {}
    for chunk in chunked({name for turn in turns for name in raters[turn.id]}):
        in_projects = (Rater.project_id.in_({turn.project_id for turn in turns}), Rater.name.in_(chunk))
        query = select(Rater.project_id, Rater.name, Rater.reason)
        for project_id, name, reason in await session.execute(
            query.where(*in_projects, Rater.standing == RaterStanding.QUARANTINED)
        ):
            found[project_id, name] = reason or "quarantined"
    return found
