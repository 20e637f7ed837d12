"""Feedback → Words: what people and programs have said of turns, the latest of each source, as rewards to be kept."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config import rewards
from alignment.config.rewards import ExplicitSource, RewardsConfig
from app.models import Feedback, FeedbackRank, Origin, Turn, TurnState
from app.raters import names

LONGEST_CONVERSATION = 256  # turns that one word about a whole conversation falls on


class Judged(NamedTuple):
    """What becomes of a turn's sample needs no more of the turn than this."""

    id: str
    completion_id: str
    project_id: str
    policy_id: str
    version_id: str
    exclusion_reason: str | None
    conversation_id: str | None
    parent_id: str | None
    end_user: str | None
    created_at: float
    finished_at: float | None
    origin: str


class Spoken(NamedTuple):
    value: float
    rater: str


COLUMNS = [getattr(Turn, name) for name in Judged._fields]
Said = dict[str, dict[str, Spoken]]  # by turn, by source


async def turns(session: AsyncSession, turn_ids: Collection[str]) -> list[Judged]:
    """Those that have ended, in the order in which they began."""
    rows = await session.execute(
        select(*COLUMNS).where(Turn.id.in_(turn_ids), Turn.state != TurnState.OPEN).order_by(Turn.created_at, Turn.id)
    )
    return [Judged(*row) for row in rows]


async def conversations(session: AsyncSession, pairs: Collection[tuple[str, str]]) -> list[Judged]:
    """All chats that have ended in these conversations, each a project and an id; of a very long one the latest."""
    found: list[Judged] = []
    for project_id, conversation_id in sorted(pairs):
        rows = await session.execute(
            select(*COLUMNS)
            .where(
                Turn.project_id == project_id,
                Turn.conversation_id == conversation_id,
                Turn.state != TurnState.OPEN,
                Turn.origin == Origin.CHAT,
            )
            .order_by(Turn.created_at.desc(), Turn.id.desc())
            .limit(LONGEST_CONVERSATION)
        )
        found += [Judged(*row) for row in rows][::-1]
    return found


async def spoken(session: AsyncSession, judged: Sequence[Judged], configs: Mapping[str, RewardsConfig]) -> Said:
    """Everything that counts of what was said of these turns: of each alone, of its conversation, in a ranking."""
    said: Said = {turn.id: {} for turn in judged}
    by_id = {turn.id: turn for turn in judged}
    explicit = {policy_id: explicit_of(config) for policy_id, config in configs.items()}
    await _of_turns(session, by_id, explicit, said)
    await _of_conversations(session, judged, configs, said)
    await _in_rankings(session, by_id, said)
    return said


async def _of_turns(
    session: AsyncSession, by_id: Mapping[str, Judged], explicit: Mapping[str, ExplicitSource], said: Said
) -> None:
    rows = await session.scalars(select(Feedback).where(Feedback.turn_id.in_(by_id)).order_by(Feedback.seq))
    heard: dict[str, list[Feedback]] = defaultdict(list)
    for row in rows:
        assert row.turn_id is not None
        heard[row.turn_id].append(row)
    for turn_id, mine in heard.items():
        turn = by_id[turn_id]
        said[turn_id] |= latest(mine, turn, explicit[turn.policy_id])


def latest(heard: Sequence[Feedback], turn: Judged, explicit: ExplicitSource) -> dict[str, Spoken]:
    """By source, in order of arrival. Who takes a comment back has not taken the thumb back."""
    said: dict[str, Spoken] = {}
    keys: dict[str, str] = {}
    for row in heard:
        if row.kind == rewards.WITHDRAWAL:
            said.pop(keys.get(row.request_metadata.get("withdraws", ""), ""), None)
            continue
        value = rewards.worth(row.kind, row.value, row.raw_value, explicit)
        if value is not None:
            key = keys[row.id] = source(row) if row.kind in rewards.KINDS else f"{row.kind}/{source(row)}"
            said[key] = Spoken(value, rater(row, turn))
    return said


def explicit_of(config: RewardsConfig) -> ExplicitSource:
    """Words are kept as rewards even where the policy does not listen to them."""
    return next((one for one in config.sources if isinstance(one, ExplicitSource)), ExplicitSource())


def source(row: Feedback) -> str:
    """Example: "default/HUMAN/user-7"."""
    return f"{row.name}/{row.source_kind}/{row.source_id or ''}"


def rater(row: Feedback, turn: Judged) -> str:
    """Who is answerable: as the feedback names them; a person without a name is the conversation's."""
    if row.source_id or row.source_kind != names.PERSON:
        return names.spoken(row.source_kind, row.source_id)
    return who(turn)


def who(turn: Judged) -> str:
    return names.voice(turn.end_user, turn.conversation_id, turn.id)


async def _of_conversations(
    session: AsyncSession, judged: Sequence[Judged], configs: Mapping[str, RewardsConfig], said: Said
) -> None:
    pairs = {(turn.project_id, turn.conversation_id) for turn in judged if turn.conversation_id is not None}
    if not pairs:
        return
    rows = await session.scalars(
        select(Feedback)
        .where(tuple_(Feedback.project_id, Feedback.conversation_id).in_(sorted(pairs)), Feedback.turn_id.is_(None))
        .order_by(Feedback.seq)
    )
    heard: dict[tuple[str, str], list[Feedback]] = defaultdict(list)
    for row in rows:
        assert row.conversation_id is not None
        heard[row.project_id, row.conversation_id].append(row)
    for pair, mine in heard.items():
        members = await conversations(session, [pair])
        present = [(place, turn) for place, turn in enumerate(members) if turn.id in said]
        for policy_id in {turn.policy_id for _, turn in present}:  # a conversation may go from one to another
            config = configs[policy_id]
            for name, word in latest(mine, members[0], explicit_of(config)).items():
                shares = rewards.spread(word.value, len(members), config)
                for place, turn in present:
                    if turn.policy_id == policy_id:
                        said[turn.id][f"conversation/{name}"] = Spoken(shares[place], word.rater)


async def _in_rankings(session: AsyncSession, by_id: Mapping[str, Judged], said: Said) -> None:
    """The last order of each source over the same turns, as a number for each of them."""
    rows = list(
        await session.execute(
            select(Feedback, FeedbackRank.turn_id)
            .join(FeedbackRank, FeedbackRank.feedback_seq == Feedback.seq)
            .where(FeedbackRank.turn_id.in_(by_id))
            .order_by(Feedback.seq)
        )
    )
    if not rows:
        return
    gone = await _withdrawn(session, {(row.project_id, row.target) for row, _ in rows})
    ranks = await _ranks(session, {row.seq for row, _ in rows})
    for row, turn_id in rows:
        name = f"{row.kind}/{source(row)}/{row.target}"
        if row.id in gone:
            said[turn_id].pop(name, None)
        else:
            said[turn_id][name] = Spoken(rewards.order(ranks[row.seq])[turn_id], rater(row, by_id[turn_id]))


async def ranked(session: AsyncSession, targets: Collection[tuple[str, str]]) -> set[str]:
    """The turns that were put in order under these targets, each a project and a target; also by what is withdrawn."""
    rows = await session.scalars(
        select(FeedbackRank.turn_id)
        .join(Feedback, Feedback.seq == FeedbackRank.feedback_seq)
        .where(tuple_(Feedback.project_id, Feedback.target).in_(sorted(targets)))
    )
    return set(rows)


async def _withdrawn(session: AsyncSession, targets: Collection[tuple[str, str]]) -> set[str]:
    rows = await session.scalars(
        select(Feedback).where(
            Feedback.kind == rewards.WITHDRAWAL,
            tuple_(Feedback.project_id, Feedback.target).in_(sorted(targets)),
        )
    )
    return {row.request_metadata["withdraws"] for row in rows}


async def _ranks(session: AsyncSession, seqs: Collection[int]) -> dict[int, dict[str, int]]:
    rows = await session.execute(
        select(FeedbackRank.feedback_seq, FeedbackRank.turn_id, FeedbackRank.rank).where(
            FeedbackRank.feedback_seq.in_(seqs)
        )
    )
    ranks: dict[int, dict[str, int]] = defaultdict(dict)
    for seq, turn_id, rank in rows:
        ranks[seq][turn_id] = rank
    return ranks


async def groups(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, str]:
    """Turns that people have put in order and that answer the very same prompt: replies to compare, by turn."""
    orders = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(turn_ids))
    rows = await session.execute(
        select(FeedbackRank.feedback_seq, Feedback.target, Turn.id, Turn.prompt_ids)
        .join(Feedback, Feedback.seq == FeedbackRank.feedback_seq)
        .join(Turn, Turn.id == FeedbackRank.turn_id)
        .where(FeedbackRank.feedback_seq.in_(orders))
        .order_by(FeedbackRank.feedback_seq)
    )
    prompts: dict[tuple[int, str], dict[str, tuple[int, ...]]] = defaultdict(dict)
    for seq, target, turn_id, ids in rows:
        prompts[seq, target][turn_id] = tuple(ids or ())
    found: dict[str, str] = {}
    for (_, target), members in prompts.items():
        if len(set(members.values())) == 1 and all(members.values()):
            found |= dict.fromkeys(members, target)
    return found
