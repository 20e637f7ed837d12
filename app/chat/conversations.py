"""Threads: which turn came before, found by the messages themselves, so that stock clients get conversations."""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import ColumnElement, case, exists, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from app.models import Origin, Turn, new_id

LOOK_BACK = 8  # replies in the history that may be the turn before; later ones may have been edited by the client
CONVERSATION_ID = "conversation_id"
CHILD = aliased(Turn)
FOLLOWED = case((exists().where(CHILD.parent_id == Turn.id), 1), else_=0)


@dataclass(frozen=True)
class Parent:
    """The turn before, and how many of the new request's messages it accounts for (its reply included)."""

    id: str
    policy_id: str
    version_id: str
    conversation_id: str | None
    finish_reason: str | None
    prompt_ids: list[int] | None
    output_ids: list[int] | None
    stops: list[str]
    tools: list[dict[str, Any]]
    cut: bool  # it may have called more tools than were sent on
    spliced: bool  # its own prompt may hold a reply in tokens that the template would not spell so
    num_messages: int | None  # None: known by the conversation's name only, the messages say nothing of it


def hashes(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """One hash for each prefix: the n-th stands for the first n + 1 messages."""
    chain, digest = [], b""
    for message in messages:
        digest = hashlib.sha256(digest + orjson.dumps(_essence(message), option=orjson.OPT_SORT_KEYS)).digest()
        chain.append(digest.hex())
    return chain


def _essence(message: Mapping[str, Any]) -> dict[str, Any]:
    """What survives a client's round trip: clients re-write null contents and the spaces in a call's arguments."""
    calls = [
        [call["id"], call["function"]["name"], _canonical(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    answers = message.get("tool_call_id")
    return {"role": message["role"], "content": message.get("content") or "", "calls": calls, "answers": answers}


def _canonical(arguments: str) -> Any:
    try:
        value = orjson.loads(arguments)
        orjson.dumps([[[[value]]]])  # what is read may be nested deeper than what can be written
        return value
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments


def opening(messages: Sequence[Mapping[str, Any]]) -> int:
    """The same for every turn of a conversation, which so stays with one engine and its prefix cache."""
    first = next((message for message in messages if message["role"] == "user"), messages[0])
    return zlib.crc32(str(first.get("content")).encode())


def parent_of(
    connection: Connection,
    messages: Sequence[Mapping[str, Any]],
    *,
    project_id: str,
    key_id: str,
    end_user: str | None,
    conversation_id: str | None,
) -> Parent | None:
    """By its messages: of this key, this end user and (if one is named) this conversation.

    Two strangers may have said the very same; then each follow-up takes a turn that nobody has followed up yet.
    A conversation that is named but does not go on from any reply of ours has its newest turn as parent.
    """
    said = hashes(messages)
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"][-LOOK_BACK:]
    mine = [Turn.project_id == project_id, Turn.deleted_at.is_(None), Turn.origin == Origin.CHAT]
    if conversation_id is not None:
        mine.append(Turn.conversation_id == conversation_id)
    if replies:
        same_voice = [Turn.key_id == key_id, Turn.end_user.is_(None) if end_user is None else Turn.end_user == end_user]
        ours = Turn.prefix_hash.in_([said[at] for at in replies])
        by_length = {said[at]: at for at in replies}
        longest = case(by_length, value=Turn.prefix_hash).desc()
        if (row := _first(connection, *mine, *same_voice, ours, order=(longest, FOLLOWED))) is not None:
            return _parent(row, by_length[row.prefix_hash] + 1)
    if conversation_id is not None and (row := _first(connection, *mine)) is not None:
        return _parent(row, None)
    return None


def _first(connection: Connection, *conditions: ColumnElement[bool], order: Sequence[Any] = ()) -> Any:
    """The first in this order, the newest of equals; None if there is none."""
    return connection.execute(
        select(
            Turn.id,
            Turn.policy_id,
            Turn.version_id,
            Turn.conversation_id,
            Turn.finish_reason,
            Turn.prompt_ids,
            Turn.output_ids,
            Turn.sampling,
            Turn.request_params,
            Turn.parent_id,
            Turn.prefix_hash,
        )
        .where(*conditions)
        .order_by(*order, Turn.created_at.desc())
        .limit(1)
    ).one_or_none()


def _parent(row: Any, num_messages: int | None) -> Parent:
    return Parent(
        id=row.id,
        policy_id=row.policy_id,
        version_id=row.version_id,
        conversation_id=row.conversation_id,
        finish_reason=row.finish_reason,
        prompt_ids=row.prompt_ids,
        output_ids=row.output_ids,
        stops=row.sampling.get("stop", []),
        tools=[] if row.request_params.get("tool_choice") == "none" else row.request_params.get("tools", []),
        cut=row.finish_reason == "tool_calls" and row.request_params.get("parallel_tool_calls") is False,
        spliced=row.parent_id is not None,
        num_messages=num_messages,
    )


def conversation(named: str | None, parent: Parent | None) -> str:
    return named or (parent.conversation_id if parent else None) or new_id("conv")
