"""Continue conversations: find the parent turn of a request, and begin the prompt with that turn's recorded tokens.

The parent is found by hashes of the messages, so that unmodified clients get conversations.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import orjson
from sqlalchemy import BindParameter, ColumnElement, Select, bindparam, case, exists, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from alignment.chat_messages import AssistantMessage
from alignment.json_values import as_object, as_objects, as_text
from app.chat import histories
from app.chat.histories import History
from app.inference.engine import EngineClient
from app.inference.request import ChatCall
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import Origin, Turn, TurnState
from app.models.turn import RequestParams
from app.projects.auth import Caller

MAX_REPLIES_SEARCHED = 8  # the newest replies of the history; the client may have edited some of them
CONVERSATION_ID_KEY = "conversation_id"
GENERATED_ID = "conv"  # how the ids of conversations begin that the client does not name
EXACT = "exact"
NOT_CONTINUED = "the messages do not continue the parent turn"
Messages = Sequence[Mapping[str, object]]
MAX_CLOSING_TOKENS = 8  # a chat template closes a reply with a few tokens at most
CHILD = aliased(Turn)
USER = (Turn.key_id, Turn.end_user)  # whose turns are searched; None: IS NULL
HAS_CHILD = case((exists().where(CHILD.parent_id == Turn.id), 1), else_=0)


@dataclass(frozen=True)
class ParentTurn:
    """The previous turn of a conversation.

    `num_messages`: how many messages of the new request it covers, its reply included; None when only the
    conversation's id leads to it.
    """

    id: str
    policy_id: str
    version_id: str
    conversation_id: str | None
    parent_id: str | None
    prefix_hash: str | None
    finish_reason: str | None
    reply: AssistantMessage | None
    output_ids: list[int] | None
    sampling: dict[str, object]
    request_params: RequestParams
    num_messages: int | None = None
    messages: list[dict[str, object]] = field(default_factory=list)
    prompt_ids: list[int] | None = None

    @property
    def history(self) -> History:
        """Its messages and tokens, which the next prompt may begin with."""
        reply, tokens = [self.reply] if self.reply else [], [*(self.prompt_ids or ()), *(self.output_ids or ())]
        return History(self.id, [*self.messages, *reply], tokens if self.prompt_ids else [])

    @property
    def tools(self) -> list[Mapping[str, object]]:
        return list(self.request_params.get("tools", []))

    @property
    def may_omit_tool_calls(self) -> bool:
        """Whether the reply may hold more tool calls than the client received."""
        return self.finish_reason == "tool_calls" and self.request_params.get("parallel_tool_calls") is False


PROMPT_FIELDS = ("num_messages", "messages", "prompt_ids")
PARENT_COLUMNS = [getattr(Turn, one.name) for one in fields(ParentTurn) if one.name not in PROMPT_FIELDS]


def prefix_hashes(messages: Messages) -> list[str]:
    """Return one SHA-256 hash for each prefix: item n covers the first n + 1 messages."""
    hashes, digest = [], b""
    for message in messages:
        normalized = orjson.dumps(_normalize_message(message), option=orjson.OPT_SORT_KEYS)
        digest = hashlib.sha256(digest + normalized).digest()
        hashes.append(digest.hex())
    return hashes


def _normalize_message(message: Mapping[str, object]) -> dict[str, object]:
    """Return the parts of a message that clients send back unchanged.

    Clients rewrite null contents and the white space in a tool call's arguments.
    """
    calls = []
    for call in as_objects(message.get("tool_calls") or []):
        function = as_object(call["function"])
        calls.append([call["id"], function["name"], _normalize_arguments(as_text(function["arguments"]))])
    tool_call_id = message.get("tool_call_id")
    # These keys are hashed: changing one breaks the link to every recorded turn.
    return {"role": message["role"], "content": message.get("content") or "", "calls": calls, "answers": tool_call_id}


def _normalize_arguments(arguments: str) -> object:
    try:
        value = orjson.loads(arguments)
        orjson.dumps([[[[value]]]])  # orjson reads deeper nesting than it writes
        return value
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments


def conversation_hash(messages: Messages) -> int:
    """Return a number that is equal for all turns of a conversation, so that one engine's prefix cache serves it."""
    first_message = next((message for message in messages if message["role"] == "user"), messages[0])
    return zlib.crc32(str(first_message.get("content")).encode())


def find_parent(
    connection: Connection,
    messages: Messages,
    caller: Caller,
    end_user: str | None,
    conversation_id: str | None,
    episode_id: str | None = None,
) -> ParentTurn | None:
    """Return the turn that these messages continue, or None.

    The search covers the turns of the same API key, the same end user and, if one is named, the same conversation.
    When several turns match equally well (two users may have sent the same text), one without a child is preferred.
    If a conversation is named and no message matches, its newest turn is the parent; a refused request is none.
    A chat in an episode continues a turn of that episode, since other attempts at its task may have the same messages;
    a named conversation may go on from an earlier episode.
    """
    hashes = prefix_hashes(messages)
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    index_by_hash = {hashes[index]: index for index in replies[-MAX_REPLIES_SEARCHED:]}
    if index_by_hash:
        values = {"key_id": caller.key_id, "end_user": end_user}
        values |= {"conversation_id": conversation_id, "episode_id": episode_id}
        named = {name: value for name, value in values.items() if value is not None}
        longest_first = {f"hash_{place}": value for place, value in enumerate(reversed(index_by_hash))}
        query = _select_parent(len(longest_first), frozenset(named))
        parent = _read_turn(connection, query, {"project_id": caller.project_id, **named, **longest_first})
        if parent is not None and parent.prefix_hash is not None:
            return replace(parent, num_messages=index_by_hash[parent.prefix_hash] + 1)
    if conversation_id is None:
        return None
    newest = {"project_id": caller.project_id, "conversation_id": conversation_id}
    return _read_turn(connection, NEWEST_OF_CONVERSATION, newest)


@lru_cache(maxsize=256)
def _select_parent(num_hashes: int, named: frozenset[str]) -> Select[Any]:
    """Return the query for the turn with `hash_0`, or else `hash_1` and so on. Of equal ones the newest comes first.

    It depends on which values the request names, and is built once for each form: that takes longer than executing it.
    """
    hashes: list[BindParameter[str]] = [bindparam(f"hash_{place}") for place in range(num_hashes)]
    same_user = [column == bindparam(column.key) if column.key in named else column.is_(None) for column in USER]
    place = case(*((Turn.prefix_hash == value, number) for number, value in enumerate(hashes)))
    order: list[ColumnElement[Any]] = [place, HAS_CHILD]
    scope = []
    if "episode_id" in named:
        order.insert(1, case((Turn.episode_id == bindparam("episode_id"), 0), else_=1))
        scope = [Turn.episode_id == bindparam("episode_id")]
    if "conversation_id" in named:
        scope = [Turn.conversation_id == bindparam("conversation_id")]
    return _select_first(*scope, *same_user, Turn.prefix_hash.in_(hashes), order=order)


def find_end_user(connection: Connection, caller: Caller, conversation_id: str) -> str | None:
    """Return the end user of the newest turn of a conversation of this API key, or None."""
    scope = [Turn.project_id == caller.project_id, Turn.key_id == caller.key_id, Turn.origin == Origin.CHAT]
    newest = select(Turn.end_user).where(*scope, Turn.conversation_id == conversation_id, Turn.deleted_at.is_(None))
    return connection.execute(newest.order_by(Turn.created_at.desc(), Turn.id.desc()).limit(1)).scalar()


def _select_first(*conditions: ColumnElement[bool], order: Sequence[ColumnElement[Any]] = ()) -> Select[Any]:
    """Return the query for the first turn of `project_id` in this order, the newest among equal ones."""
    scope = [Turn.project_id == bindparam("project_id"), Turn.deleted_at.is_(None), Turn.origin == Origin.CHAT]
    query = select(*PARENT_COLUMNS).where(*scope, *conditions)
    return query.order_by(*order, Turn.created_at.desc(), Turn.id.desc()).limit(1)


NEWEST_OF_CONVERSATION = _select_first(
    Turn.conversation_id == bindparam("conversation_id"), Turn.state != TurnState.REFUSED
)


def _read_turn(connection: Connection, query: Select[Any], values: Mapping[str, str]) -> ParentTurn | None:
    """Return the turn that the query finds, with its prompt; None if there is none."""
    row = connection.execute(query, values).one_or_none()
    if row is None:
        return None
    messages, prompt_ids = histories.find_prompt(connection, row.id)
    return replace(ParentTurn(*row), messages=messages, prompt_ids=prompt_ids)


async def reuse_parent_tokens(
    client: EngineClient, call: ChatCall, messages: Messages, parent: ParentTurn, policy_id: str
) -> tuple[list[int] | None, str]:
    """Return the prompt ids that begin with the parent's prompt and output ids, and the turn's `prefix_reuse`.

    That is "exact". Or there are no ids, so that the engine renders the messages, and it is the reason for that.
    Usually the template's rendering already begins with these tokens. Where it tokenizes the sampled reply
    differently, the recorded tokens replace that part of the rendering.
    """
    if (reason := _find_obstacle(parent, call, policy_id)) is not None:
        return None, reason
    assert parent.prompt_ids and parent.output_ids and parent.num_messages is not None
    parent_ids = [*parent.prompt_ids, *parent.output_ids]
    try:
        rendered_ids = await client.tokenize(call)
        if rendered_ids[: len(parent_ids)] == parent_ids:
            return rendered_ids, EXACT
        # The prompt of a turn with a parent may hold an earlier reply in tokens that the template does not produce.
        if parent.parent_id is None and rendered_ids[: len(parent.prompt_ids)] != parent.prompt_ids:
            return None, "the chat template renders the parent's prompt differently now"
        if parent.may_omit_tool_calls:
            return None, "the parent turn may hold more tool calls than the client received"
        if parent.sampling.get("stop"):
            return None, "a stop string ended the parent turn: its tokens hold it, its text does not"
        history_ids = await client.tokenize(call, messages[: parent.num_messages], add_generation_prompt=False)
    except (EngineUnavailable, EngineRefused) as error:
        return None, f"the engine did not tokenize the prompt: {error}"
    return _splice(parent_ids, rendered_ids, history_ids)


def _find_obstacle(parent: ParentTurn, call: ChatCall, policy_id: str) -> str | None:
    """Return why the parent's tokens cannot begin this prompt, as far as the record alone tells; else None."""
    if parent.num_messages is None:
        return NOT_CONTINUED
    if parent.policy_id != policy_id:
        return "the parent turn belongs to another policy"
    if parent.tools != list(call.tools):
        return "the tools have changed since the parent turn"
    if not parent.prompt_ids or not parent.output_ids:
        return "the parent turn has no recorded tokens"
    if parent.finish_reason not in ("stop", "tool_calls"):
        return f"the parent turn ended early: {parent.finish_reason}"
    return None


def _splice(parent_ids: list[int], rendered_ids: list[int], history_ids: list[int]) -> tuple[list[int] | None, str]:
    """Replace the rendered history, up to the end of the parent's reply, by the parent's own tokens.

    Args:
        parent_ids: The parent's prompt and output ids, as recorded.
        rendered_ids: The new prompt as the template renders it.
        history_ids: The messages up to and with the parent's reply, rendered without a generation prompt.
    """
    if rendered_ids[: len(history_ids)] != history_ids:
        return None, "the chat template renders a reply differently once another message follows"
    end_of_turn = parent_ids[-1]
    if end_of_turn not in history_ids[-MAX_CLOSING_TOKENS:]:
        return None, "the parent turn does not end with the chat template's end-of-turn token"
    end = len(history_ids) - history_ids[::-1].index(end_of_turn)
    return [*parent_ids, *history_ids[end:], *rendered_ids[len(history_ids) :]], EXACT
