"""Feedback → signals: the latest reward of each source about each turn, from people and programs."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Literal, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, exists, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import ExplicitSource, RewardsConfig
from alignment.signals.combine_rewards import NUMERIC_KINDS, feedback_reward, rewards_from_ranks, spread_over_turns
from app.chat.histories import read_prompt_ids
from app.core.database import chunked
from app.core.rows import AnySelect
from app.feedback.effective import is_withdrawn, kind_class
from app.feedback.schemas import WITHDRAWAL
from app.models import LIMIT_REASONS, Episode, EpisodeState, Feedback, FeedbackRank, Origin, SourceKind, Turn, TurnState
from app.raters import names
from app.training.episode_groups import MAX_SERIES_TURNS

OUTCOME = "outcome/CODE/episode"  # the source of the outcome that the end of an episode reports
Series = Literal["conversation", "episode"]  # of turns, which feedback may be about as a whole
SERIES: tuple[Series, ...] = ("conversation", "episode")


class FinishedTurn(NamedTuple):
    """The columns of a finished turn that rewards and samples depend on."""

    id: str
    completion_id: str
    project_id: str
    policy_id: str
    version_id: str
    exclusion_reason: str | None
    conversation_id: str | None
    episode_id: str | None
    parent_id: str | None
    end_user: str | None
    created_at: float
    finished_at: float | None
    origin: str


class FeedbackSignal(NamedTuple):
    """The reward that one source gives one turn, the rater who is responsible for it, and the feedback's `seq`."""

    value: float
    rater: str
    feedback_seq: int


COLUMNS = [getattr(Turn, name) for name in FinishedTurn._fields]
SignalsByTurn = dict[str, dict[str, FeedbackSignal]]  # by turn, then by source key


def in_order(turns: Iterable[FinishedTurn]) -> list[FinishedTurn]:
    """Return each of the turns once, as it was read last, in order of creation."""
    return sorted({turn.id: turn for turn in turns}.values(), key=lambda turn: (turn.created_at, turn.id))


async def read_finished_turns(session: AsyncSession, turn_ids: Collection[str]) -> list[FinishedTurn]:
    """Return those of the turns that have finished, in order of creation."""
    turns: list[FinishedTurn] = []
    for chunk in chunked(turn_ids):
        rows = await session.execute(select(*COLUMNS).where(Turn.id.in_(chunk), Turn.state != TurnState.OPEN))
        turns += [FinishedTurn(*row) for row in rows]
    return in_order(turns)


async def read_series(session: AsyncSession, series: Series, pairs: Collection[tuple[str, str]]) -> list[FinishedTurn]:
    """Return the finished chat turns of conversations or of episodes; of a very long one the latest MAX_SERIES_TURNS.

    Requests that the engine refused have no reply and are left out. `pairs` holds (project id, its id). Those of each
    conversation or episode are in order of creation.
    """
    turns: list[FinishedTurn] = []
    if series == "episode":  # a group has many of them
        for project_id, found in groupby(sorted(pairs), itemgetter(0)):
            for chunk in chunked([id for _, id in found]):
                turns += await _read_episodes(session, project_id, chunk)
        return turns
    for project_id, id in sorted(pairs):
        newest = _chats(Turn.project_id == project_id, Turn.conversation_id == id)
        newest = newest.order_by(Turn.created_at.desc(), Turn.id.desc()).limit(MAX_SERIES_TURNS)
        turns += [FinishedTurn(*row) for row in await session.execute(newest)][::-1]
    return turns


async def _read_episodes(session: AsyncSession, project_id: str, ids: Sequence[str]) -> list[FinishedTurn]:
    newest_first = (Turn.created_at.desc(), Turn.id.desc())
    position = func.row_number().over(partition_by=Turn.episode_id, order_by=newest_first).label("position")
    chats = _chats(Turn.project_id == project_id, Turn.episode_id.in_(ids)).add_columns(position).subquery().c
    query = select(*[chats[name] for name in FinishedTurn._fields]).where(chats.position <= MAX_SERIES_TURNS)
    return [FinishedTurn(*row) for row in await session.execute(query.order_by(chats.created_at, chats.id))]


def _chats(*conditions: ColumnElement[bool]) -> AnySelect:
    is_finished = Turn.state.not_in((TurnState.OPEN, TurnState.REFUSED))
    return select(*COLUMNS).where(*conditions, is_finished, Turn.origin == Origin.CHAT)


async def read_signals(
    session: AsyncSession,
    turns: Sequence[FinishedTurn],
    configs: Mapping[str, RewardsConfig],
    compare_episodes: Collection[str] = (),
) -> SignalsByTurn:
    """Return the effective feedback about these turns: about a turn, its conversation or episode, or a ranking with it.

    `configs` holds the reward configuration of each policy, `compare_episodes` the policies whose algorithms compare
    the episodes of a group.
    """
    signals: SignalsByTurn = {turn.id: {} for turn in turns}
    turns_by_id = {turn.id: turn for turn in turns}
    await _add_turn_signals(session, turns_by_id, configs, signals)
    for series in SERIES:
        await _add_series_signals(session, series, turns, configs, compare_episodes, signals)
    await _add_ranking_signals(session, turns_by_id, signals)
    return signals


async def _add_turn_signals(
    session: AsyncSession,
    turns_by_id: Mapping[str, FinishedTurn],
    configs: Mapping[str, RewardsConfig],
    signals: SignalsByTurn,
) -> None:
    of_turns = _latest_of_each_source(Feedback.turn_id.in_(turns_by_id))
    query = of_turns.order_by(Feedback.turn_id, Feedback.seq)
    for turn_id, feedback in groupby(await session.scalars(query), attrgetter("turn_id")):
        turn = turns_by_id[turn_id]
        signals[turn_id] |= signals_by_source(feedback, turn, explicit_source(configs[turn.policy_id]))


def _latest_of_each_source(condition: ColumnElement[bool]) -> Select[Feedback]:
    """Return a query of the latest feedback of each source, target, name and class of kinds, unless it is withdrawn.

    The database selects it: a source may have given a thousand times as much. What withdrawn feedback has replaced does
    not return.
    """
    key = (Feedback.project_id, Feedback.target, Feedback.name, Feedback.source_kind)
    latest = select(func.max(Feedback.seq)).where(condition, Feedback.kind != WITHDRAWAL)
    latest = latest.group_by(*key, func.coalesce(Feedback.source_id, ""), kind_class(Feedback.kind))
    return select(Feedback).where(Feedback.seq.in_(latest), ~is_withdrawn())


def signals_by_source(
    feedback: Iterable[Feedback], turn: FinishedTurn, explicit: ExplicitSource
) -> dict[str, FeedbackSignal]:
    """Return the signals of the latest feedback of each source. A label without a reward gives none."""
    signals: dict[str, FeedbackSignal] = {}
    for row in feedback:
        value = feedback_reward(row.kind, row.value, row.raw_value, explicit)
        if value is not None:
            key = source_key(row) if row.kind in NUMERIC_KINDS else f"{row.kind}/{source_key(row)}"
            signals[key] = FeedbackSignal(value, rater_name(row, turn), row.seq)
    return signals


def explicit_source(config: RewardsConfig) -> ExplicitSource:
    """Return the explicit source of the configuration, or the default.

    Rewards of feedback are stored even where the policy does not use them.
    """
    return next((source for source in config.sources if isinstance(source, ExplicitSource)), ExplicitSource())


def source_key(row: Feedback) -> str:
    """Return the source of the feedback as one string. Example: "default/HUMAN/user-7"."""
    return f"{row.name}/{row.source_kind}/{row.source_id or ''}"


def rater_name(row: Feedback, turn: FinishedTurn) -> str:
    """Return the rater whom the feedback names; a person without a name is the end user of the conversation."""
    if row.source_id or row.source_kind != SourceKind.HUMAN:
        return names.feedback_rater(row.source_kind, row.source_id)
    return end_user_rater(turn)


def end_user_rater(turn: FinishedTurn) -> str:
    """Return the rater name of the person whom the turn answers."""
    return names.turn_rater(turn.end_user, turn.conversation_id, turn.id)


async def _add_series_signals(
    session: AsyncSession,
    series: Series,
    turns: Sequence[FinishedTurn],
    configs: Mapping[str, RewardsConfig],
    compare_episodes: Collection[str],
    signals: SignalsByTurn,
) -> None:
    """Add feedback on whole conversations, or on whole episodes that have ended, to those of their turns."""
    name = f"{series}_id"
    pairs = {(turn.project_id, id) for turn in turns if (id := getattr(turn, name)) is not None}
    if not pairs:
        return
    is_open = exists().where(Episode.id == Feedback.episode_id, Episode.state == EpisodeState.OPEN)
    is_about_pairs = tuple_(Feedback.project_id, getattr(Feedback, name)).in_(sorted(pairs))
    of_series = _latest_of_each_source(and_(is_about_pairs, Feedback.turn_id.is_(None), ~is_open))
    rows = await session.scalars(of_series.order_by(Feedback.project_id, getattr(Feedback, name), Feedback.seq))
    feedback = {pair: list(grouped) for pair, grouped in groupby(rows, attrgetter("project_id", name))}
    turns_of: dict[tuple[str, str], list[FinishedTurn]] = defaultdict(list)
    for turn in await read_series(session, series, feedback):
        turns_of[turn.project_id, getattr(turn, name)].append(turn)
    in_groups, limited = set[str](), set[str]()
    if series == "episode":
        reported = select(Episode.id).where(Episode.id.in_({id for _, id in feedback}))
        limited = set(await session.scalars(reported.where(Episode.reported_reason.in_(LIMIT_REASONS))))
    if series == "episode" and compare_episodes:
        of_pairs = select(Episode.id).where(Episode.id.in_({id for _, id in pairs}))
        in_groups = set(await session.scalars(of_pairs.where(Episode.group_id.is_not(None))))
    for pair, latest in feedback.items():
        # Of an outcome that a tree is computed with, each turn has all: the tree of the episode says whose it is.
        whole = set(compare_episodes) if pair[1] in in_groups else set[str]()
        if series == "episode":
            whole |= {id for id, config in configs.items() if config.episode_credit == "return"}
        _spread(latest, turns_of[pair], series, configs, whole, signals, is_limited=pair[1] in limited)


def _spread(
    feedback: Sequence[Feedback],
    turns: Sequence[FinishedTurn],
    prefix: str,
    configs: Mapping[str, RewardsConfig],
    whole: Collection[str],
    signals: SignalsByTurn,
    *,
    is_limited: bool,
) -> None:
    """Add the latest feedback on a whole conversation or episode to those of its turns that `signals` has.

    It is spread over the turns, but in the policies of `whole`, where each turn has all of it. Of an episode that ended
    at a limit, the outcome counts at most `episode_limit_cap`.
    """
    requested = [(index, turn) for index, turn in enumerate(turns) if turn.id in signals]
    for policy_id in {turn.policy_id for _, turn in requested}:  # a conversation may move to another policy
        config = configs[policy_id]
        latest = signals_by_source(feedback, turns[0], explicit_source(config))
        if is_limited and OUTCOME in latest and config.episode_limit_cap is not None:
            outcome = latest[OUTCOME]
            latest[OUTCOME] = outcome._replace(value=min(outcome.value, config.episode_limit_cap))
        for key, signal in latest.items():
            is_whole = policy_id in whole
            shares = [signal.value] * len(turns) if is_whole else spread_over_turns(signal.value, len(turns), config)
            for index, turn in requested:
                if turn.policy_id == policy_id:
                    signals[turn.id][f"{prefix}/{key}"] = signal._replace(value=shares[index])


async def _add_ranking_signals(
    session: AsyncSession, turns_by_id: Mapping[str, FinishedTurn], signals: SignalsByTurn
) -> None:
    """Add the last ranking of each source over the same turns, as a number for each turn."""
    latest = _latest_of_each_source(Feedback.seq.in_(_rankings_of(turns_by_id)))
    rows = await session.execute(
        latest.add_columns(FeedbackRank.turn_id, FeedbackRank.rank)
        .join(FeedbackRank, FeedbackRank.feedback_seq == Feedback.seq)
        .order_by(Feedback.seq)
    )
    rankings: dict[Feedback, dict[str, int]] = defaultdict(dict)
    for row, turn_id, rank in rows:
        rankings[row][turn_id] = rank
    for row, ranks in rankings.items():
        key = f"{row.kind}/{source_key(row)}/{row.target}"
        rewards = rewards_from_ranks(ranks)
        for turn_id in ranks.keys() & turns_by_id.keys():
            rater = rater_name(row, turns_by_id[turn_id])
            signals[turn_id][key] = FeedbackSignal(rewards[turn_id], rater, row.seq)


def _rankings_of(turn_ids: Collection[str]) -> Select[int]:
    """Return a query of the sequence numbers of the feedback that ranks one of these turns."""
    return select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(turn_ids))


async def read_ranked_turn_ids(session: AsyncSession, targets: Collection[tuple[str, str]]) -> set[str]:
    """Return the turns that feedback about these targets ranks, withdrawn feedback included.

    `targets` holds (project id, target). All feedback about one target ranks the same turns.
    """
    about_targets = tuple_(Feedback.project_id, Feedback.target).in_(sorted(targets))
    one_of_each = (
        select(func.max(Feedback.seq))
        .where(about_targets, Feedback.kind != WITHDRAWAL)
        .group_by(Feedback.project_id, Feedback.target)
    )
    ranks = select(FeedbackRank.turn_id).where(FeedbackRank.feedback_seq.in_(one_of_each))
    return set(await session.scalars(ranks))


async def read_comparison_groups(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, str]:
    """Return the group of each turn that was ranked among replies to exactly the same prompt tokens, by turn."""
    prompts: dict[tuple[int, str], dict[str, tuple[int, ...]]] = defaultdict(dict)
    found: set[tuple[int, str, str]] = set()
    for chunk in chunked(turn_ids):
        of_turns = Feedback.seq.in_(_rankings_of(chunk))  # those of one target rank the same turns
        one_of_each = select(func.max(Feedback.seq)).where(of_turns).group_by(Feedback.project_id, Feedback.target)
        rows = await session.execute(
            select(FeedbackRank.feedback_seq, Feedback.target, Turn.id)
            .join(Feedback, Feedback.seq == FeedbackRank.feedback_seq)
            .join(Turn, Turn.id == FeedbackRank.turn_id)
            .where(FeedbackRank.feedback_seq.in_(one_of_each))
        )
        found.update((seq, target, turn_id) for seq, target, turn_id in rows)
    ranked = sorted(found)
    prompt_ids = await read_prompt_ids(session, {turn_id for _, _, turn_id in ranked})
    for seq, target, turn_id in ranked:
        prompts[seq, target][turn_id] = tuple(prompt_ids.get(turn_id, ()))
    groups: dict[str, str] = {}
    for (_, target), members in prompts.items():
        if len(set(members.values())) == 1 and all(members.values()):
            groups |= dict.fromkeys(members, target)
    return groups
