"""Find the parent turn of a request by hashes of its messages, so that unmodified clients get conversations."""

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

MAX_REPLIES_SEARCHED = 8  # the newest replies of the history; the client may have edited some of them
CONVERSATION_ID_KEY = "conversation_id"
CHILD = aliased(Turn)
HAS_CHILD = case((exists().where(CHILD.parent_id == Turn.id), 1), else_=0)


@dataclass(frozen=True)
class ParentTurn:
    """The previous turn of a conversation, and how many messages of the new request it covers."""

    id: str
    policy_id: str
    version_id: str
    conversation_id: str | None
    finish_reason: str | None
    prompt_ids: list[int] | None
    output_ids: list[int] | None
    stop_strings: list[str]
    tools: list[dict[str, Any]]
    may_omit_tool_calls: bool  # the reply may hold more tool calls than the client received
    may_be_spliced: bool  # its prompt may hold an earlier reply in tokens that the chat template does not produce
    num_messages: int | None  # its reply included; None when only the conversation's id leads to it


def prefix_hashes(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one SHA-256 hash for each prefix: item n covers the first n + 1 messages."""
    hashes, digest = [], b""
    for message in messages:
        normalized = orjson.dumps(_normalize_message(message), option=orjson.OPT_SORT_KEYS)
        digest = hashlib.sha256(digest + normalized).digest()
        hashes.append(digest.hex())
    return hashes


def _normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a message that clients send back unchanged.

    Clients rewrite null contents and the white space in a tool call's arguments.
    """
    calls = [
        [call["id"], call["function"]["name"], _normalize_arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    tool_call_id = message.get("tool_call_id")
    # These keys are hashed: changing one breaks the link to every recorded turn.
    return {"role": message["role"], "content": message.get("content") or "", "calls": calls, "answers": tool_call_id}


def _normalize_arguments(arguments: str) -> Any:
    try:
        value = orjson.loads(arguments)
        orjson.dumps([[[[value]]]])  # orjson reads deeper nesting than it writes
        return value
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments


def conversation_hash(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return a number that is equal for all turns of a conversation, so that one engine's prefix cache serves it."""
    first_message = next((message for message in messages if message["role"] == "user"), messages[0])
    return zlib.crc32(str(first_message.get("content")).encode())


def find_parent(
    connection: Connection,
    messages: Sequence[Mapping[str, Any]],
    *,
    project_id: str,
    key_id: str,
    end_user: str | None,
    conversation_id: str | None,
) -> ParentTurn | None:
    """Return the turn that these messages continue, or None.

    The search covers the turns of the same API key, the same end user and, if one is named, the same conversation.
    When several turns match equally well (two users may have sent the same text), one without a child is preferred.
    If a conversation is named and no message matches, its newest turn is the parent.
    """
    hashes = prefix_hashes(messages)
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    index_by_hash = {hashes[index]: index for index in replies[-MAX_REPLIES_SEARCHED:]}
    scope = [Turn.project_id == project_id, Turn.deleted_at.is_(None), Turn.origin == Origin.CHAT]
    if conversation_id is not None:
        scope.append(Turn.conversation_id == conversation_id)
    if index_by_hash:
        same_user = [Turn.key_id == key_id, Turn.end_user.is_(None) if end_user is None else Turn.end_user == end_user]
        matches = Turn.prefix_hash.in_(list(index_by_hash))
        longest_first = case(index_by_hash, value=Turn.prefix_hash).desc()
        row = _find_turn(connection, *scope, *same_user, matches, order=(longest_first, HAS_CHILD))
        if row is not None:
            return _to_parent_turn(row, index_by_hash[row.prefix_hash] + 1)
    if conversation_id is not None and (row := _find_turn(connection, *scope)) is not None:
        return _to_parent_turn(row, None)
    return None


def _find_turn(connection: Connection, *conditions: ColumnElement[bool], order: Sequence[Any] = ()) -> Any:
    """Return the first row in this order, the newest among equal ones; None if no turn matches."""
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


def _to_parent_turn(row: Any, num_messages: int | None) -> ParentTurn:
    return ParentTurn(
        id=row.id,
        policy_id=row.policy_id,
        version_id=row.version_id,
        conversation_id=row.conversation_id,
        finish_reason=row.finish_reason,
        prompt_ids=row.prompt_ids,
        output_ids=row.output_ids,
        stop_strings=row.sampling.get("stop", []),
        tools=[] if row.request_params.get("tool_choice") == "none" else row.request_params.get("tools", []),
        may_omit_tool_calls=row.finish_reason == "tool_calls"
        and row.request_params.get("parallel_tool_calls") is False,
        may_be_spliced=row.parent_id is not None,
        num_messages=num_messages,
    )


def resolve_conversation_id(requested_id: str | None, parent: ParentTurn | None) -> str:
    return requested_id or (parent.conversation_id if parent else None) or new_id("conv")
