"""Write feedback: many requests share one transaction, and a row is one insert together with its idempotency key."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.engine import Connection

from app.core.database import Database
from app.core.errors import AttuneError, NotFound, Unprocessable
from app.core.group_commit import GroupCommit
from app.core.jobs import enqueue_after_commit
from app.feedback import repository
from app.feedback.repository import TargetTurn
from app.feedback.schemas import Choice, ConversationTarget, feedback_view
from app.feedback.submission import Submission
from app.models import new_id

ProjectKey = tuple[str, str]  # project id, idempotency key


@dataclass(frozen=True, slots=True)
class SubmissionResult:
    """The view of the recorded feedback, and whether it was recorded by an earlier request."""

    view: dict[str, Any]
    is_replay: bool


@dataclass(slots=True)
class GroupState:
    """What one transaction knows: earlier feedback by key, targets that exist, and the rows to insert.

    `new_rows` holds each row with its target turn, if it has one; `ranks` holds (rank, turn id) pairs by feedback id.
    """

    existing: dict[ProjectKey, dict[str, Any]]
    turns: dict[tuple[str, str, int], TargetTurn]
    conversations: set[tuple[str, str]]
    new_rows: dict[ProjectKey, tuple[dict[str, Any], TargetTurn | None]] = field(default_factory=dict)
    ranks: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


class FeedbackWriter(GroupCommit[Submission, SubmissionResult]):
    """Collects the submissions of concurrent requests and writes them in shared transactions; one for each process."""

    def __init__(self, db: Database) -> None:
        super().__init__(db, submit_many)


def submit_many(connection: Connection, items: Sequence[Submission]) -> list[SubmissionResult | AttuneError]:
    """Return one result or error for each item, in order. The number of statements is independent of their number."""
    group = _load_targets(connection, items)
    refused: dict[int, AttuneError] = {}
    first_index: dict[ProjectKey, int] = {}
    for index, item in enumerate(items):
        key = (item.project_id, item.key)
        if key in group.new_rows:
            continue
        try:
            _add_row(group, key, item)
            first_index[key] = index
        except NotFound as error:
            refused[index] = error
    _accept_replays(connection, group, items, refused)
    _write_rows(connection, group)
    return [
        refused.get(index) or _to_result(group, item, is_first=first_index.get((item.project_id, item.key)) == index)
        for index, item in enumerate(items)
    ]


def _load_targets(connection: Connection, items: Sequence[Submission]) -> GroupState:
    completions, conversations = set(), set()
    for item in items:
        completions |= {choice.completion_id for choice in _target_choices(item)}
        if isinstance(item.target, ConversationTarget):
            conversations.add((item.project_id, item.target.conversation_id))
    turns = repository.find_turns(connection, completions) if completions else []
    return GroupState(
        existing={},
        turns={(turn.project_id, turn.completion_id, turn.choice_index): turn for turn in turns},
        conversations=repository.find_conversations(connection, conversations) if conversations else set(),
    )


def _accept_replays(
    connection: Connection, group: GroupState, items: Sequence[Submission], refused: dict[int, AttuneError]
) -> None:
    """Load the earlier feedback of refused items: a replay succeeds although its target no longer exists.

    All other replays are found when the rows are inserted, so that new feedback needs no query by key.
    """
    keys = {(items[index].project_id, items[index].key) for index in refused if items[index].has_client_key}
    if keys:
        group.existing |= repository.find_by_keys(connection, keys)
        for index in list(refused):
            if (items[index].project_id, items[index].key) in group.existing:
                del refused[index]


def _target_choices(item: Submission) -> list[Choice]:
    return [item.target] if isinstance(item.target, Choice) else [choice for _, choice in item.request.ranked_choices()]


def _add_row(group: GroupState, key: ProjectKey, item: Submission) -> None:
    """Add the row for this item to the group. Raises NotFound for a target that the project does not have."""
    request, turn, conversation_id, id = item.request, None, None, new_id("fb")
    if isinstance(item.target, Choice):
        turn = _find_turn(group, item.project_id, item.target)
        target = turn.id
    elif isinstance(item.target, ConversationTarget):
        conversation_id = item.target.conversation_id
        if (item.project_id, conversation_id) not in group.conversations:
            raise NotFound(f"There is no conversation '{conversation_id}'.", param="conversation_id")
        target = f"conversation:{conversation_id}"
    elif ranks := [(rank, _find_turn(group, item.project_id, choice).id) for rank, choice in request.ranked_choices()]:
        target = _ranking_target(turn_id for _, turn_id in ranks)
        group.ranks[id] = ranks
    else:
        raise NotFound("There is no completion with this metadata.", param="target.metadata")
    is_text_only = request.reward_value() is None and turn is None and not group.ranks.get(id)
    row = {
        "id": id,
        "project_id": item.project_id,
        "turn_id": turn and turn.id,
        "conversation_id": conversation_id,
        "target": target,
        "kind": request.kind,
        "name": request.name,
        "value": request.reward_value(),
        "raw_value": item.raw_value,
        "comment": request.comment,
        "source_kind": request.source.kind,
        "source_id": request.source.id,
        "request_metadata": request.metadata,
        "idempotency_key": item.key,
        "fingerprint": item.fingerprint,
        "processed": is_text_only,  # curation has nothing to do for it
    }
    group.new_rows[key] = (row, turn)


def _ranking_target(turn_ids: Iterable[str]) -> str:
    """Return the target of an ordering. It depends on the set of turns only: a new order replaces the earlier one."""
    return "ranking:" + hashlib.sha256("\n".join(sorted(turn_ids)).encode()).hexdigest()


def _find_turn(group: GroupState, project_id: str, choice: Choice) -> TargetTurn:
    turn = group.turns.get((project_id, choice.completion_id, choice.choice_index))
    if turn is None:
        message = f"There is no completion '{choice.completion_id}'"
        if choice.choice_index:
            message += f" with a choice {choice.choice_index}"
        raise NotFound(f"{message}.", param="completion_id")
    return turn


def _write_rows(connection: Connection, group: GroupState) -> None:
    """Insert the new rows. One whose key another process has used meanwhile moves to `existing`."""
    if not group.new_rows:
        return
    repository.lock_projects(connection, {project for project, _ in group.new_rows})
    inserted = repository.insert_feedback(connection, [row for row, _ in group.new_rows.values()])
    conflicts = set()
    for key, (row, _) in group.new_rows.items():
        if row["id"] in inserted:
            row["seq"], row["created_at"] = inserted[row["id"]]
        else:
            conflicts.add(key)
    if conflicts:
        group.existing |= repository.find_by_keys(connection, conflicts)
        for key in conflicts:
            group.ranks.pop(group.new_rows.pop(key)[0]["id"], None)
    if group.ranks:
        repository.insert_ranks(
            connection,
            [
                {"feedback_seq": inserted[id][0], "turn_id": turn_id, "rank": rank}
                for id, ranks in group.ranks.items()
                for rank, turn_id in ranks
            ],
        )
    if any(not row["processed"] for row, _ in group.new_rows.values()):
        enqueue_after_commit(connection, "curate")


def _to_result(group: GroupState, item: Submission, *, is_first: bool) -> SubmissionResult | AttuneError:
    key = (item.project_id, item.key)
    choice: tuple[str, int] | None
    if key in group.new_rows:
        row, turn = group.new_rows[key]
        choice = (turn.completion_id, turn.choice_index) if turn else None
    else:
        row, is_first = group.existing[key], False
        choice = (row["completion_id"], row["choice_index"]) if row["turn_id"] else None
    if row["fingerprint"] != item.fingerprint:
        return Unprocessable("This id was used before with another body.", code="idempotency_key_reused", param="id")
    return SubmissionResult(feedback_view(row, choice), is_replay=not is_first)
