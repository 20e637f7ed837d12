"""Feedback that prefers → pairs, in the shape of conversational preference data: prompt, chosen, rejected."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from app.core.database import Database
from app.datasets import repository
from app.datasets.parquet_writer import Gone, ParquetWriter
from app.datasets.repository import CORRECTION, Wanted
from app.models import Feedback, FeedbackRank, Turn

PAGE = 32  # feedback at a time; each may rank many turns
Said = list[dict[str, str]]


async def write(db: Database, wanted: Wanted, sheet: ParquetWriter, gone: Gone) -> None:
    """What cannot be said in roles and text alone (a tool call, a picture) is left out and counted."""
    last = 0
    while True:
        async with db.read() as session:
            page = await repository.preferring_after(session, wanted, last, PAGE)
            ranks = await repository.ranks_of(session, [row.seq for row in page])
            ids = {row.turn_id for row in page if row.turn_id} | {r.turn_id for rows in ranks.values() for r in rows}
            turns = await repository.answers(session, wanted, ids)
        for feedback in page:
            rows = list(pairs(feedback, ranks[feedback.seq], turns))
            sheet.left_out += rows.count(None)
            await sheet.add([row for row in rows if row is not None])
        if len(page) < PAGE or await gone():
            return
        last = page[-1].seq


def pairs(
    feedback: Feedback, ranks: Sequence[FeedbackRank], turns: Mapping[str, Turn]
) -> Iterator[dict[str, Any] | None]:
    """None for a pair that is there but cannot be told. `ranks` come best first; ties prefer nothing."""
    if feedback.kind == CORRECTION:
        if (turn := turns.get(feedback.turn_id or "")) is not None:
            yield _pair(feedback, turn, corrected(feedback.raw_value), None, turn)
        return
    for better, worse in combinations(ranks, 2):
        chosen, rejected = turns.get(better.turn_id), turns.get(worse.turn_id)
        if better.rank == worse.rank or chosen is None or rejected is None:
            continue
        if chosen.messages == rejected.messages:
            yield _pair(feedback, chosen, reply(chosen), chosen.id, rejected)


def _pair(
    feedback: Feedback, asked: Turn, chosen: Said | None, chosen_id: str | None, rejected: Turn
) -> dict[str, Any] | None:
    prompt, worse = plain(asked.messages), reply(rejected)
    if not prompt or chosen is None or worse is None or chosen == worse:
        return None
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": worse,
        "feedback_id": feedback.id,
        "chosen_id": chosen_id,
        "rejected_id": rejected.id,
        "source_kind": feedback.source_kind,
        "created_at": feedback.created_at,
    }


def corrected(said: Any) -> Said | None:
    """The better answer, sent as text or as an assistant's message."""
    return plain([{"role": "assistant", "content": said} if isinstance(said, str) else said])


def reply(turn: Turn) -> Said | None:
    return plain([{"role": "assistant", **(turn.reply or {})}])


def plain(messages: Sequence[Any]) -> Said | None:
    """Roles and text, or None if that is not all there is. A developer's message is a system message."""
    told = [_plain(message) for message in messages]
    return None if any(message is None for message in told) else [message for message in told if message is not None]


def _plain(message: Any) -> dict[str, str] | None:
    if not isinstance(message, dict) or message.get("tool_calls") or message.get("function_call"):
        return None
    role, text = message.get("role", "assistant"), _text(message.get("content"))
    if text is None or not (text or role == "assistant"):
        return None
    return {"role": "system" if role == "developer" else role, "content": text}


def _text(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    return None if None in parts else "".join(part for part in parts if part is not None)
