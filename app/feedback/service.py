"""Take feedback once: the row and its idempotency key are one insert, and a whole group is one transaction."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.engine import Connection

from app.core.errors import AttuneError, NotFound, Unprocessable
from app.core.jobs import enqueue_after_commit
from app.feedback import repository
from app.feedback.repository import Found
from app.feedback.schemas import Choice, ConversationTarget, seen
from app.feedback.submission import Item
from app.models import new_id

ProjectKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is on record, as it is shown, and whether it was there before."""

    view: dict[str, Any]
    replayed: bool


@dataclass(slots=True)
class Group:
    """What one transaction knows: keys that came before, turns and conversations that are there, rows to be written."""

    known: dict[ProjectKey, dict[str, Any]]
    turns: dict[tuple[str, str, int], Found]
    conversations: set[tuple[str, str]]
    fresh: dict[ProjectKey, tuple[dict[str, Any], Found | None]] = field(default_factory=dict)
    ranks: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


def submit_many(connection: Connection, items: Sequence[Item]) -> list[Receipt | AttuneError]:
    """One outcome for each item, in order. The number of statements does not depend on the number of items."""
    group = _look_around(connection, items)
    refused: dict[int, AttuneError] = {}
    mine: dict[ProjectKey, int] = {}
    for number, item in enumerate(items):
        key = (item.project_id, item.key)
        if key in group.fresh:
            continue
        try:
            _plan(group, key, item)
            mine[key] = number
        except NotFound as error:
            refused[number] = error
    _remember(connection, group, items, refused)
    _write(connection, group)
    return [
        refused.get(number) or _outcome(group, item, first=mine.get((item.project_id, item.key)) == number)
        for number, item in enumerate(items)
    ]


def _look_around(connection: Connection, items: Sequence[Item]) -> Group:
    completions, conversations = set(), set()
    for item in items:
        completions |= {choice.completion_id for choice in _choices(item)}
        if isinstance(item.about, ConversationTarget):
            conversations.add((item.project_id, item.about.conversation_id))
    turns = repository.turns(connection, completions) if completions else []
    return Group(
        known={},
        turns={(turn.project_id, turn.completion_id, turn.choice_index): turn for turn in turns},
        conversations=repository.conversations(connection, conversations) if conversations else set(),
    )


def _remember(connection: Connection, group: Group, items: Sequence[Item], refused: dict[int, AttuneError]) -> None:
    """What was said once is answered as then, though its target is gone by now. All other replays show when they are
    written: so the usual case, something new, costs no look at old keys."""
    keys = {(items[number].project_id, items[number].key) for number in refused if items[number].keyed}
    if keys:
        group.known |= repository.with_keys(connection, keys)
        for number in [number for number in refused if (items[number].project_id, items[number].key) in group.known]:
            del refused[number]


def _choices(item: Item) -> list[Choice]:
    return [item.about] if isinstance(item.about, Choice) else [choice for _, choice in item.request.ranks()]


def _plan(group: Group, key: ProjectKey, item: Item) -> None:
    """The row that this item becomes. Raises NotFound for a target that the project does not have."""
    request, turn, conversation, id = item.request, None, None, new_id("fb")
    if isinstance(item.about, Choice):
        turn = _turn(group, item.project_id, item.about)
        target = turn.id
    elif isinstance(item.about, ConversationTarget):
        conversation = item.about.conversation_id
        if (item.project_id, conversation) not in group.conversations:
            raise NotFound(f"There is no conversation '{conversation}'.", param="conversation_id")
        target = f"conversation:{conversation}"
    elif ranks := [(rank, _turn(group, item.project_id, choice).id) for rank, choice in request.ranks()]:
        target = _same_set(turn_id for _, turn_id in ranks)
        group.ranks[id] = ranks
    else:
        raise NotFound("There is no completion with this metadata.", param="target.metadata")
    row = {
        "id": id,
        "project_id": item.project_id,
        "turn_id": turn and turn.id,
        "conversation_id": conversation,
        "target": target,
        "kind": request.kind,
        "name": request.name,
        "value": request.number(),
        "raw_value": item.said,
        "comment": request.comment,
        "source_kind": request.source.kind,
        "source_id": request.source.id,
        "request_metadata": request.metadata,
        "idempotency_key": item.key,
        "fingerprint": item.fingerprint,
        "processed": request.number() is None and turn is None and not group.ranks.get(id),  # words alone
    }
    group.fresh[key] = (row, turn)


def _same_set(turn_ids: Iterable[str]) -> str:
    """The same turns judged again replace what was said before, in whichever order they are named."""
    return "ranking:" + hashlib.sha256("\n".join(sorted(turn_ids)).encode()).hexdigest()


def _turn(group: Group, project_id: str, choice: Choice) -> Found:
    turn = group.turns.get((project_id, choice.completion_id, choice.choice_index))
    if turn is None:
        of = f"There is no completion '{choice.completion_id}'"
        with_choice = f"{of} with a choice {choice.choice_index}" if choice.choice_index else of
        raise NotFound(f"{with_choice}.", param="completion_id")
    return turn


def _write(connection: Connection, group: Group) -> None:
    """What another process has written under the same key meanwhile becomes known instead."""
    if not group.fresh:
        return
    repository.in_turn(connection, {project for project, _ in group.fresh})
    taken = repository.add(connection, [row for row, _ in group.fresh.values()])
    lost = set()
    for key, (row, _) in group.fresh.items():
        if row["id"] in taken:
            row["seq"], row["created_at"] = taken[row["id"]]
        else:
            lost.add(key)
    if lost:
        group.known |= repository.with_keys(connection, lost)
        for key in lost:
            group.ranks.pop(group.fresh.pop(key)[0]["id"], None)
    if group.ranks:
        repository.rank(
            connection,
            [
                {"feedback_seq": taken[id][0], "turn_id": turn_id, "rank": rank}
                for id, ranks in group.ranks.items()
                for rank, turn_id in ranks
            ],
        )
    if any(not row["processed"] for row, _ in group.fresh.values()):
        enqueue_after_commit(connection, "curate")


def _outcome(group: Group, item: Item, *, first: bool) -> Receipt | AttuneError:
    key = (item.project_id, item.key)
    choice: tuple[str, int] | None
    if key in group.fresh:
        row, turn = group.fresh[key]
        choice = (turn.completion_id, turn.choice_index) if turn else None
    else:
        row, first = group.known[key], False
        choice = (row["completion_id"], row["choice_index"]) if row["turn_id"] else None
    if row["fingerprint"] != item.fingerprint:
        return Unprocessable("This id was used before with another body.", code="idempotency_key_reused", param="id")
    return Receipt(seen(row, choice), replayed=not first)
