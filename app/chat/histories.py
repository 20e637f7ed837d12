"""Histories: a turn stores only what its prompt adds to the messages and tokens of an earlier turn, its history.

The history of a turn is the turn that it continues; of another choice, a group sample or a shadow reply it is the turn
that answers the same prompt. The first `num_history_messages` of a prompt are those of the history's prompt followed by
its reply, and the first `num_history_tokens` are its prompt ids followed by its output ids. Where a prompt differs from
the history, it is stored from there on. A turn without a history stores its whole prompt.

An erased turn is nobody's history: the turns that refer to it get their whole prompts first (`detach`). Writers
therefore lock a history while they refer to it (`lock_histories`), and store the whole prompt if it is gone.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, bindparam, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from app.models import Turn

Messages = list[dict[str, Any]]


class PromptBeginning(NamedTuple):
    """The first messages of a prompt, which another turn has stored."""

    history_id: str | None
    num_messages: int


WHOLE_PROMPT = PromptBeginning(None, 0)  # no other turn has stored any of it


@dataclass(frozen=True)
class History:
    """The messages and tokens of a turn, its reply included, which may begin another turn's prompt."""

    turn_id: str
    messages: Sequence[Mapping[str, Any]]
    token_ids: Sequence[int]

    def begin(self, messages: Sequence[Mapping[str, Any]]) -> "PromptBeginning":
        """Return what a prompt has of this history."""
        count = count_common(self.messages, messages)
        return PromptBeginning(self.turn_id, count) if count else WHOLE_PROMPT


def count_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning of two sequences."""
    if len(one) <= len(other) and list(one) == list(other[: len(one)]):  # the usual case, and fast
        return len(one)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Part(NamedTuple):
    """What one turn of a chain stores: `own` follows the history's `num_shared`, `reply` follows `own`."""

    history_id: str | None
    num_shared: int
    own: Sequence[Any] | None
    reply: Sequence[Any]


def _select_chains(*columns: InstrumentedAttribute[Any]) -> Select[Any]:
    """Return a query for these columns of the turns `turn_ids` and of all turns that they refer to."""
    named = Turn.id.in_(bindparam("turn_ids", expanding=True))
    chain = select(Turn.id, Turn.history_id).where(named).cte("chain", recursive=True)
    history = aliased(Turn)
    chain = chain.union(select(history.id, history.history_id).join(chain, history.id == chain.c.history_id))
    return select(Turn.id, Turn.history_id, *columns).join(chain, chain.c.id == Turn.id)


# Built once: every chat that continues another one executes one of them, and building one takes longer than that.
MESSAGE_COLUMNS = (Turn.num_history_messages, Turn.own_messages, Turn.reply)
TOKEN_COLUMNS = (Turn.num_history_tokens, Turn.own_prompt_ids, Turn.output_ids)
SELECT_MESSAGES = _select_chains(*MESSAGE_COLUMNS)
SELECT_PROMPT_IDS = _select_chains(*TOKEN_COLUMNS)
SELECT_PROMPTS = _select_chains(*MESSAGE_COLUMNS, *TOKEN_COLUMNS)


def join_messages(rows: Iterable[Any], turn_ids: Collection[str]) -> dict[str, Messages]:
    """Return the messages of each turn's prompt, from the rows of SELECT_MESSAGES."""
    parts = {id: Part(history_id, count, own, [reply] if reply else []) for id, history_id, count, own, reply in rows}
    return {id: messages for id in turn_ids if (messages := _join(parts, id)) is not None}


def join_prompt_ids(rows: Iterable[Any], turn_ids: Collection[str]) -> dict[str, list[int]]:
    """Return the prompt ids of each turn that has some, from the rows of SELECT_PROMPT_IDS."""
    parts = {id: Part(history_id, count, own, reply or []) for id, history_id, count, own, reply in rows}
    return {id: ids for id in turn_ids if (ids := _join(parts, id))}


def _join(parts: Mapping[str, Part], turn_id: str) -> list[Any] | None:
    """Return the prompt of a turn, read from its end to its beginning; None if the turn is not there or has none."""
    if (part := parts.get(turn_id)) is None or part.own is None:
        return None
    pieces = [part.own]
    while part.num_shared:
        count = part.num_shared  # of the items of the history that are part of the prompt
        assert part.history_id is not None, f"turn {turn_id} lacks a part of its prompt"
        part = parts[part.history_id]
        assert part.own is not None, f"turn {turn_id} lacks a part of its prompt"
        num_prompt = part.num_shared + len(part.own)
        pieces += [part.reply[: max(count - num_prompt, 0)], part.own[: max(count - part.num_shared, 0)]]
        part = part._replace(num_shared=min(part.num_shared, count))
    return [item for piece in reversed(pieces) for item in piece]


def find_prompt(connection: Connection, turn_id: str) -> tuple[Messages, list[int] | None]:
    """Return the messages and the prompt ids of a turn's prompt, read by one statement; no ids if it has none."""
    rows = connection.execute(SELECT_PROMPTS, {"turn_ids": [turn_id]}).all()
    messages = join_messages(((id, history_id, *stored[:3]) for id, history_id, *stored in rows), [turn_id])
    prompt_ids = join_prompt_ids(((id, history_id, *stored[3:]) for id, history_id, *stored in rows), [turn_id])
    return messages.get(turn_id, []), prompt_ids.get(turn_id)


async def read_messages(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, Messages]:
    """Return the messages of the turns' prompts, by turn id."""
    rows = (await session.execute(SELECT_MESSAGES, {"turn_ids": list(turn_ids)})).all()
    return join_messages(rows, turn_ids)


async def read_prompt_ids(session: AsyncSession, turn_ids: Collection[str]) -> dict[str, list[int]]:
    """Return the prompt ids of the turns that have some, by turn id."""
    rows = (await session.execute(SELECT_PROMPT_IDS, {"turn_ids": list(turn_ids)})).all()
    return join_prompt_ids(rows, turn_ids)


LOCK_TURNS = (
    select(Turn.id)
    .where(Turn.id.in_(bindparam("turn_ids", expanding=True)), Turn.deleted_at.is_(None))
    .order_by(Turn.id)
    .with_for_update(key_share=True, read=True, skip_locked=True)
)


def lock_histories(connection: Connection, turn_ids: Collection[str]) -> set[str]:
    """Lock these turns against erasure until the transaction ends; return those that exist.

    A turn that another transaction has locked is left out rather than waited for: it may be about to be erased.
    """
    if not turn_ids:
        return set()
    return set(connection.scalars(LOCK_TURNS, {"turn_ids": list(turn_ids)}))


def is_recorded(history_id: ColumnElement[str | None]) -> ColumnElement[bool]:
    """Return the condition that a turn still refers to this history, whose tokens are recorded."""
    history = aliased(Turn)
    recorded = select(history.id).where(history.id == history_id, history.own_prompt_ids.is_not(None)).exists()
    return (Turn.history_id == history_id) & recorded


async def detach(session: AsyncSession, turn_ids: Collection[str]) -> None:
    """Store the whole prompts of the turns whose history is one of these turns, which are about to be erased."""
    refers = select(Turn.id).where(Turn.history_id.in_(turn_ids), Turn.id.not_in(turn_ids))
    ids = list(await session.scalars(refers.order_by(Turn.id).with_for_update()))
    if not ids:
        return
    messages, prompt_ids = await read_messages(session, ids), await read_prompt_ids(session, ids)
    for id in ids:
        values = {"own_messages": messages[id], "own_prompt_ids": prompt_ids.get(id)}
        no_history = {"history_id": None, "num_history_messages": 0, "num_history_tokens": 0}
        await session.execute(update(Turn).where(Turn.id == id).values(values | no_history))
