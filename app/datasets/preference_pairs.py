"""The export of preference pairs, in the columns of conversational preference data: prompt, chosen, rejected."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import pyarrow as pa  # type: ignore[import-untyped]
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.chat.histories import read_messages
from app.core.database import Database
from app.datasets.turn_rows import ExportFilter
from app.feedback.effective import is_effective
from app.models import RANKING_KINDS, Feedback, FeedbackRank, Origin, Turn

PAGE_SIZE = 32  # feedback events at a time; each may rank many turns
CORRECTION = "correction"
Messages = list[dict[str, str]]

MESSAGES_TYPE = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

PREFERENCES_SCHEMA = pa.schema(
    [
        ("prompt", MESSAGES_TYPE),
        ("chosen", MESSAGES_TYPE),
        ("rejected", MESSAGES_TYPE),
        ("feedback_id", pa.string()),
        ("chosen_id", pa.string()),
        ("rejected_id", pa.string()),
        ("source_kind", pa.string()),
        ("created_at", pa.float64()),
    ]
)


@dataclass(frozen=True)
class RecordedReply:
    """A turn's prompt and its reply."""

    id: str
    messages: Sequence[Mapping[str, object]]
    reply: Mapping[str, object]


async def read_pages(db: Database, export_filter: ExportFilter) -> AsyncGenerator[list[dict[str, object] | None]]:
    """Yield the pairs of each effective comparison, ranking and correction, in order of arrival.

    None stands for a pair that roles and text cannot represent (a tool call, an image).
    """
    last_seq = 0
    while True:
        async with db.read() as session:
            page = await _read_feedback(session, export_filter, last_seq)
            ranks = await _read_ranks(session, [row.seq for row in page])
            turn_ids = {row.turn_id for row in page if row.turn_id}
            turn_ids |= {rank.turn_id for rows in ranks.values() for rank in rows}
            turns = await _read_replies(session, export_filter, turn_ids)
        for feedback in page:
            yield list(make_pairs(feedback, ranks[feedback.seq], turns))
        if len(page) < PAGE_SIZE:
            return
        last_seq = page[-1].seq


async def _read_feedback(session: AsyncSession, export_filter: ExportFilter, last_seq: int) -> Sequence[Feedback]:
    """Return the next effective comparisons, rankings and corrections, in order of arrival."""
    kinds = Feedback.kind.in_((*RANKING_KINDS, CORRECTION))
    query = select(Feedback).where(*export_filter.conditions(Feedback), kinds, Feedback.seq > last_seq, is_effective())
    return (await session.scalars(query.order_by(Feedback.seq).limit(PAGE_SIZE))).all()


async def _read_ranks(session: AsyncSession, seqs: Sequence[int]) -> dict[int, list[FeedbackRank]]:
    """Return the ranks by the feedback's sequence number, best first."""
    ranks: dict[int, list[FeedbackRank]] = {seq: [] for seq in seqs}
    best_first = (FeedbackRank.rank, FeedbackRank.feedback_seq, FeedbackRank.turn_id)
    for row in await session.scalars(
        select(FeedbackRank).where(FeedbackRank.feedback_seq.in_(seqs)).order_by(*best_first)
    ):
        ranks[row.feedback_seq].append(row)
    return ranks


async def _read_replies(
    session: AsyncSession, export_filter: ExportFilter, turn_ids: set[str]
) -> dict[str, RecordedReply]:
    """Return the turns that have a reply, and are neither deleted nor a front end's task, by id."""
    query = select(Turn.id, Turn.reply).where(
        Turn.id.in_(turn_ids),
        Turn.project_id == export_filter.project_id,
        Turn.deleted_at.is_(None),
        Turn.origin != Origin.TASK,
    )
    if export_filter.policy_id is not None:
        query = query.where(Turn.policy_id == export_filter.policy_id)
    replies = {id: reply for id, reply in await session.execute(query) if reply}
    messages = await read_messages(session, replies.keys())
    return {id: RecordedReply(id, prompt, replies[id]) for id, prompt in messages.items()}


def make_pairs(
    feedback: Feedback, ranks: Sequence[FeedbackRank], turns: Mapping[str, RecordedReply]
) -> Iterator[dict[str, object] | None]:
    """Yield a row for each pair of the feedback; None for a pair that cannot be represented.

    `ranks` come best first; turns of the same rank make no pair.
    """
    if feedback.kind == CORRECTION:
        if (turn := turns.get(feedback.turn_id or "")) is not None:
            yield _pair_row(feedback, turn, parse_correction(feedback.raw_value), None, turn)
        return
    for better, worse in combinations(ranks, 2):
        chosen, rejected = turns.get(better.turn_id), turns.get(worse.turn_id)
        if better.rank == worse.rank or chosen is None or rejected is None:
            continue
        if chosen.messages == rejected.messages:
            yield _pair_row(feedback, chosen, reply_messages(chosen), chosen.id, rejected)


def _pair_row(
    feedback: Feedback,
    prompt_turn: RecordedReply,
    chosen: Messages | None,
    chosen_id: str | None,
    rejected: RecordedReply,
) -> dict[str, object] | None:
    prompt, rejected_messages = plain_messages(prompt_turn.messages), reply_messages(rejected)
    if not prompt or chosen is None or rejected_messages is None or chosen == rejected_messages:
        return None
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected_messages,
        "feedback_id": feedback.id,
        "chosen_id": chosen_id,
        "rejected_id": rejected.id,
        "source_kind": feedback.source_kind,
        "created_at": feedback.created_at,
    }


def parse_correction(value: object) -> Messages | None:
    """Return the better reply, which feedback sends as text or as an assistant's message."""
    return plain_messages([{"role": "assistant", "content": value} if isinstance(value, str) else value])


def reply_messages(turn: RecordedReply) -> Messages | None:
    return plain_messages([{"role": "assistant", **turn.reply}])


def plain_messages(messages: Sequence[object]) -> Messages | None:
    """Return messages of role and text, or None if one holds more. A developer message becomes a system message."""
    plain = [_plain_message(message) for message in messages]
    return None if any(message is None for message in plain) else [message for message in plain if message is not None]


def _plain_message(message: object) -> dict[str, str] | None:
    if not isinstance(message, dict) or message.get("tool_calls") or message.get("function_call"):
        return None
    role, text = message.get("role", "assistant"), _content_text(message.get("content"))
    if text is None or not (text or role == "assistant"):
        return None
    return {"role": "system" if role == "developer" else role, "content": text}


def _content_text(content: object) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    return None if None in parts else "".join(part for part in parts if part is not None)
