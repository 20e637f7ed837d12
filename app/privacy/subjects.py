"""A data subject: the names that its id stands for, the rows that are stored of it, and their export."""

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import orjson
from sqlalchemy import ColumnElement, CompoundSelect, Select, and_, func, inspect, or_, select, union
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.chat.histories import read_messages, read_prompt_ids
from app.core.database import Database
from app.core.rows import AnySelect
from app.models import (
    Base,
    Episode,
    Feedback,
    FeedbackRank,
    Judgement,
    Origin,
    Pin,
    PinKind,
    Rater,
    Reward,
    Sample,
    SourceKind,
    Turn,
)
from app.raters import names
from app.raters.names import END_USER, hash_name

PAGE_SIZE = 64  # turns in memory at a time
# Columns of the service that say nothing about the subject.
LEASE_COLUMNS = {"lease_owner", "lease_until", "heartbeat_at", "attempt", "fence"}
HISTORY_COLUMNS = {"history_id", "num_history_messages", "num_history_tokens", "own_messages", "own_prompt_ids"}
EPISODE_COLUMNS = {"key_sha256", "end_fingerprint"}
INTERNAL_COLUMNS = LEASE_COLUMNS | HISTORY_COLUMNS | EPISODE_COLUMNS | {"processed", "request_sha256", "fingerprint"}


@dataclass(frozen=True)
class SubjectNames:
    """All names that `id` may stand for: an end user, the id of a feedback source, or a rater.

    A prefix such as "HUMAN/" restricts it to that kind, unless the prefix is part of the id itself. The hash that
    retention puts in place of a source's id is one of its names.

    Example: SubjectNames.of("proj-1", "HUMAN/user-7") includes the end user "user-7", not the program "CODE/user-7"
    """

    project_id: str
    id: str
    end_users: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]  # kind and id

    @classmethod
    def of(cls, project_id: str, id: str) -> Self:
        kind, slash, rest = id.partition("/")
        end_users, sources = [id], [(source_kind.value, id) for source_kind in SourceKind]
        if slash and rest and kind in tuple(SourceKind):
            sources.append((kind, rest))
        if slash and rest and kind in (SourceKind.HUMAN, END_USER):
            end_users.append(rest)
        expired = [(kind, names.pseudonym(project_id, kind, id)) for kind, id in sources]
        return cls(project_id, id, tuple(end_users), (*sources, *expired))

    @property
    def sha256(self) -> str:
        """What the audit log keeps in place of the id."""
        return hash_name(self.project_id, self.id)

    @property
    def raters(self) -> list[str]:
        """The names that the raters, rewards and samples of this subject have."""
        feedback_raters = [names.feedback_rater(kind, id) for kind, id in self.sources]
        return feedback_raters + [names.end_user_rater(name) for name in self.end_users]

    def feedback_filter(self) -> ColumnElement[bool]:
        """Return the condition for feedback that names the subject."""
        ids = {id for _, id in self.sources}
        pairs = or_(*[and_(Feedback.source_kind == kind, Feedback.source_id == id) for kind, id in self.sources])
        return and_(Feedback.project_id == self.project_id, Feedback.source_id.in_(ids), pairs)


class SubjectRecords(NamedTuple):
    """What is stored of a subject. It is false if that is nothing.

    `turns` are ids, the latest first, so that every turn comes before the turns that it continues. `feedback` are the
    sequence numbers of the feedback that names the subject.
    """

    turns: list[str]
    feedback: list[int]
    raters: list[Rater]
    pins: list[Pin]

    def __bool__(self) -> bool:
        return any(self)


def _select_turns(names: SubjectNames) -> CompoundSelect[str]:
    """Return a query for the ids of the subject's turns.

    These are the turns that name the subject; the turns without an end user that continue one of them, because their
    messages contain its messages; and the group samples and shadow replies of all of these.
    """
    existing = select(Turn.id).where(Turn.project_id == names.project_id, Turn.deleted_at.is_(None))
    mine = existing.where(Turn.end_user.in_(names.end_users)).cte("mine", recursive=True)
    child = aliased(Turn)
    continued = (
        select(child.id)
        .join(mine, child.parent_id == mine.c.id)
        .where(child.end_user.is_(None), child.deleted_at.is_(None), child.project_id == names.project_id)
    )
    chats = select(mine.union(continued).c.id)
    group_samples = existing.where(Turn.completion_id.in_(chats), Turn.origin == Origin.GROUP_SAMPLE)
    shadow_replies = existing.where(Turn.shadow_of_id.in_(chats))
    return union(chats, group_samples, shadow_replies)  # one statement with OR would use no index


def _select_pins(names: SubjectNames) -> Select[Pin]:
    """Return a query for the pins of the subject and of the subject's conversations."""
    conversations = select(Turn.conversation_id).where(
        Turn.id.in_(_select_turns(names)), Turn.conversation_id.is_not(None)
    )
    of_user = and_(Pin.kind == PinKind.USER, Pin.subject.in_(names.end_users))
    of_conversation = and_(Pin.kind == PinKind.CONVERSATION, Pin.subject.in_(conversations))
    query = select(Pin).where(Pin.project_id == names.project_id, or_(of_user, of_conversation))
    return query.order_by(Pin.created_at, Pin.id)


async def find_records(session: AsyncSession, names: SubjectNames) -> SubjectRecords:
    latest_first = Turn.created_at.desc(), Turn.id.desc()
    queries: list[AnySelect] = [
        select(Turn.id).where(Turn.id.in_(_select_turns(names))).order_by(*latest_first),
        select(Feedback.seq).where(names.feedback_filter()).order_by(Feedback.seq),
        select(Rater).where(Rater.project_id == names.project_id, Rater.name.in_(names.raters)).order_by(Rater.name),
        _select_pins(names),
    ]
    return SubjectRecords(*[list(await session.scalars(query)) for query in queries])


async def count_rows(session: AsyncSession, names: SubjectNames) -> dict[str, int]:
    """Return the number of rows by kind. `feedback` counts the subject's, and others' on the subject's turns."""
    ids = _select_turns(names)
    ranked = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(ids))
    feedback = or_(names.feedback_filter(), Feedback.turn_id.in_(ids), Feedback.seq.in_(ranked))
    conditions = {
        "feedback": and_(Feedback.project_id == names.project_id, feedback),
        "rewards": Reward.turn_id.in_(ids),
        "judgements": Judgement.turn_id.in_(ids),
        "samples": Sample.turn_id.in_(ids),
    }
    return {
        name: int(await session.scalar(select(func.count()).where(condition)) or 0)
        for name, condition in conditions.items()
    }


async def export_lines(db: Database, records: SubjectRecords) -> AsyncIterator[bytes]:
    """Yield every row as a line of JSON: raters, pins, turns with what belongs to them, feedback on others' turns.

    An episode of several pages of turns is in each of them.

    The rows are read page by page. While a client reads them, no connection to the database is held.
    """
    yield _to_lines("rater", records.raters) + _to_lines("pin", records.pins)
    for start in range(0, len(records.turns), PAGE_SIZE):
        ids = records.turns[start : start + PAGE_SIZE]
        ranked = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(ids))
        episode_ids = select(Turn.episode_id).where(Turn.id.in_(ids))
        queries: dict[str, Select[Base]] = {
            "turn": select(Turn).where(Turn.id.in_(ids)).order_by(Turn.created_at, Turn.id),
            "episode": select(Episode).where(Episode.id.in_(episode_ids)).order_by(Episode.created_at, Episode.id),
            "feedback.received": select(Feedback)
            .where(or_(Feedback.turn_id.in_(ids), Feedback.seq.in_(ranked)))
            .order_by(Feedback.seq),
            "reward": select(Reward).where(Reward.turn_id.in_(ids)).order_by(Reward.id),
            "judgement": select(Judgement).where(Judgement.turn_id.in_(ids)).order_by(Judgement.id),
            "sample": select(Sample).where(Sample.turn_id.in_(ids)).order_by(Sample.turn_id),
        }
        page = b""
        async with db.read() as session:
            messages, prompt_ids = await read_messages(session, ids), await read_prompt_ids(session, ids)
            prompts = {id: {"messages": messages.get(id), "prompt_ids": prompt_ids.get(id)} for id in ids}
            for kind, query in queries.items():
                page += _to_lines(kind, await session.scalars(query), prompts if kind == "turn" else {})
        yield page
    for start in range(0, len(records.feedback), PAGE_SIZE):
        seqs = records.feedback[start : start + PAGE_SIZE]
        async with db.read() as session:
            rows = select(Feedback).where(Feedback.seq.in_(seqs)).order_by(Feedback.seq)
            page = _to_lines("feedback", await session.scalars(rows))
        yield page


def _to_lines(kind: str, rows: Iterable[Base], fields: Mapping[str, Mapping[str, object]] | None = None) -> bytes:
    """Return a line of JSON for each row: its columns, and the `fields` of its id in their place.

    Example: {"object": "turn", "id": "chatcmpl-…", "messages": […], …}
    """
    lines = []
    for row in rows:
        names = [column.key for column in inspect(type(row)).column_attrs if column.key not in INTERNAL_COLUMNS]
        values = {name: getattr(row, name) for name in names} | dict((fields or {}).get(getattr(row, "id", ""), {}))
        lines.append(orjson.dumps({"object": kind, **values}) + b"\n")
    return b"".join(lines)
