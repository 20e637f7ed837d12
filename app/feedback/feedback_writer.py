"""Write feedback: many requests share one transaction, and a row is one insert together with its idempotency key."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import orjson
from sqlalchemy.engine import Connection

from app.core.database import Database
from app.core.errors import AttuneError, BadRequest, Conflict, NotFound, Unprocessable
from app.core.group_commit import GroupCommit, ItemKey
from app.core.jobs import enqueue_after_commit
from app.feedback import answers, repository
from app.feedback.browser_tokens import TokenClaims
from app.feedback.feedback_limits import FeedbackLimits, find_beyond_limits
from app.feedback.feedback_rows import FeedbackBody, FeedbackRow, feedback_view
from app.feedback.keyed_feedback import KeyedFeedback
from app.feedback.kinds import AnyTarget, FeedbackCreate, OrderedFeedback, Rating, TargetedFeedback
from app.feedback.repository import FoundTurns, ProjectAndValue
from app.feedback.schemas import Choice, ConversationTarget, EpisodeTarget
from app.models import VOTE_KINDS, new_id

MAX_KEY_LENGTH = 250  # of the header; the column holds 255 characters, and a batch appends an index


@dataclass(slots=True)
class Submission:
    """Feedback to write.

    Before that its target is resolved: one by metadata or by a turn's number becomes that turn, or None without one.
    """

    project_id: str
    request: FeedbackCreate
    raw_value: object
    target: AnyTarget | None
    key: str
    has_client_key: bool  # the client chose the key, so the submission may be a replay
    fingerprint: str  # SHA-256 of the meaning of the body
    token_id: str | None = None  # of the browser token
    sender_key: ProjectAndValue | None = None  # whose state gives the idempotency key, see `KeyedFeedback`

    @property
    def project_key(self) -> ProjectAndValue:
        return self.project_id, self.key

    def choices(self) -> list[Choice]:
        """Return the turns that the feedback is about."""
        ranked = [choice for _, choice in self.request.ranked_choices()]
        return [self.target] if isinstance(self.target, Choice) else ranked


@dataclass(frozen=True, slots=True)
class SubmissionResult:
    """The view of the recorded feedback, and whether it was recorded by an earlier request."""

    view: FeedbackBody
    is_replay: bool


@dataclass(frozen=True, slots=True)
class NewFeedback:
    """A row to insert, and the ranks of a comparison or ranking as (rank, turn id)."""

    row: FeedbackRow
    choice: Choice | None
    ranks: list[tuple[int, str]]


def key_of(submission: Submission) -> ItemKey:
    """Return what the submission may wait for: its project's lock, and the turns that it is about."""
    target = tuple((choice.completion_id, choice.choice_index) for choice in submission.choices())
    return ItemKey(submission.project_id, target)


class FeedbackWriter(GroupCommit[Submission, SubmissionResult]):
    """Collects the submissions of concurrent requests and writes them in shared transactions; one for each process."""

    def __init__(self, db: Database, limits: FeedbackLimits) -> None:
        super().__init__(db, partial(submit_many, limits=limits), key=key_of)
        self.limits = limits


def build_submission(
    project_id: str,
    request: FeedbackCreate,
    body: Mapping[str, object],
    *,
    header_key: str | None = None,
    token: TokenClaims | None = None,
) -> Submission:
    """Return the submission for a validated request. Raises BadRequest for contradictory keys.

    Args:
        header_key: The Idempotency-Key header; without effect beside the `key` of the body.
        token: The browser token that the request came with. It separates the keys of one browser from all others.
    """
    if header_key is not None and "\x00" in header_key:
        raise BadRequest("An Idempotency-Key cannot hold a NUL character.", param="Idempotency-Key")
    if request.id is not None and header_key is not None and request.id != header_key:
        raise BadRequest("'id' and the Idempotency-Key header name different keys.", param="id")
    client_key = None if request.key is not None else request.id or header_key
    key = client_key or new_id("auto")
    if client_key is not None and token is not None:
        key = f"browser:{hashlib.sha256(orjson.dumps([token.key_namespace, client_key])).hexdigest()}"
    has_scale = isinstance(request, Rating) and "scale" in body
    return Submission(
        project_id=project_id,
        request=request,
        raw_value={"value": body["value"], "scale": body["scale"]} if has_scale else body["value"],
        target=request.get_target(),
        key=key,
        has_client_key=client_key is not None or request.key is not None,
        fingerprint=_fingerprint(request, body),
        token_id=None if token is None else token.jti,
        sender_key=None if request.key is None else (project_id, request.key),
    )


def _fingerprint(request: FeedbackCreate, body: Mapping[str, object]) -> str:
    """Return a hash of the body's meaning.

    Fields at their defaults do not change it; nor do fields that were added to the API after a row was written.
    """
    target = request.get_target()
    meaning: dict[str, object] = {
        "kind": body["kind"],
        "value": body["value"],
        "name": request.name,
        "comment": request.comment,
        "source": {"kind": request.source.kind, "id": request.source.id},
        "metadata": request.metadata,
    }
    if isinstance(target, Choice):
        meaning["completion_id"] = target.completion_id
        if target.choice_index:
            meaning["choice_index"] = target.choice_index
    elif target is not None:
        meaning["target"] = target.model_dump(exclude_defaults=True)
    elif isinstance(request, OrderedFeedback):
        meaning["value"] = [
            [rank, choice.completion_id, choice.choice_index] for rank, choice in request.ranked_choices()
        ]
    if isinstance(request, Rating) and request.scale != (1, 5):
        meaning["scale"] = request.scale
    return hashlib.sha256(orjson.dumps(meaning, option=orjson.OPT_SORT_KEYS)).hexdigest()


def submit_many(
    connection: Connection, items: Sequence[Submission], limits: FeedbackLimits
) -> list[SubmissionResult | AttuneError]:
    """Return one result or error for each item, in order. The number of statements is independent of their number."""
    turns = repository.find_turns(connection, {choice.completion_id for item in items for choice in item.choices()})
    targets = [(item.project_id, item.target) for item in items]
    conversations = repository.find_conversations(
        connection, {(id, target.conversation_id) for id, target in targets if isinstance(target, ConversationTarget)}
    )
    episodes = repository.find_episodes(
        connection, {(id, target.episode_id) for id, target in targets if isinstance(target, EpisodeTarget)}
    )
    keyed = KeyedFeedback(connection, {item.sender_key for item in items if item.sender_key is not None})
    new: dict[ProjectAndValue, NewFeedback] = {}
    refused: dict[int, AttuneError] = {}
    for index, item in enumerate(items):
        try:
            _choose_key(item, keyed)
            if item.project_key not in new:
                new[item.project_key] = _build_feedback(item, turns, conversations, episodes)
            if item.sender_key is not None:
                keyed.accept(item.sender_key, new[item.project_key].row, item.request.sent_at)
        except (Conflict, NotFound) as error:
            refused[index] = error
    beyond_limits = find_beyond_limits(connection, {key: feedback.row for key, feedback in new.items()}, limits)
    for index, item in enumerate(items):
        if item.project_key in beyond_limits:
            refused[index] = beyond_limits[item.project_key]
            new.pop(item.project_key, None)
    # A replay succeeds although its target no longer exists, or its source is at its limit. All other replays are found
    # when the rows are inserted, so that new feedback needs no query by key.
    retried = {items[index].project_key for index in refused if items[index].has_client_key}
    earlier = repository.find_by_keys(connection, retried)
    rows = earlier | _insert(connection, new)
    created = {key for key, feedback in new.items() if rows[key]["id"] == feedback.row["id"]}
    keyed.write({rows[key]["id"] for key in created})
    is_replay: dict[int, bool] = {}
    for index, item in enumerate(items):
        if index not in refused or item.project_key in earlier:
            is_replay[index] = item.project_key not in created
            created.discard(item.project_key)  # the items that follow with this key are replays
    states = answers.read_states(
        connection, {rows[items[index].project_key]["seq"] for index in is_replay if is_replay[index]}
    )
    results: list[SubmissionResult | AttuneError] = []
    for index, item in enumerate(items):
        if index not in is_replay:
            results.append(refused[index])
            continue
        row = rows[item.project_key]
        if row["fingerprint"] != item.fingerprint:
            message = "This id was used before with another body; send the new body with an id of its own."
            results.append(Unprocessable(message, code="idempotency_key_reused", param="id"))
            continue
        reasons = _exclusion_reasons(item, turns)
        if is_replay[index]:
            has_target = (item.project_id, row["conversation_id"]) in conversations or (
                item.project_id,
                row["episode_id"],
            ) in episodes
            more = answers.view_replay(row, states[row["seq"]], reasons, has_target=has_target)
        else:
            more = answers.view_new(row["kind"], reasons)
        results.append(SubmissionResult({**feedback_view(row), **more}, is_replay[index]))
    return results


def _choose_key(item: Submission, keyed: KeyedFeedback) -> None:
    """Give feedback with a sender's key its idempotency key. Raises Conflict if the key has changed since."""
    if item.sender_key is not None:
        item.key = new_id("auto")  # no row's, so that refused feedback is not taken for a replay
        item.key = keyed.choose_idempotency_key(item.sender_key, item.fingerprint, item.request.sent_at)


def _build_feedback(
    item: Submission, turns: FoundTurns, conversations: set[ProjectAndValue], episodes: set[ProjectAndValue]
) -> NewFeedback:
    """Return the row for this item. Raises NotFound for a target that the project does not have."""
    request, choice, turn_id, conversation_id, episode_id = item.request, None, None, None, None
    ranks: list[tuple[int, str]] = []
    if isinstance(item.target, Choice):
        choice = item.target
        if (item.project_id, choice.completion_id, choice.choice_index) not in turns and _request_id(request):
            raise NotFound(f"There is no completion of a request '{_request_id(request)}'.", param="request_id")
        target = turn_id = _find_turn(item.project_id, choice, turns)
    elif isinstance(item.target, ConversationTarget):
        conversation_id = item.target.conversation_id
        if (item.project_id, conversation_id) not in conversations:
            raise NotFound(f"There is no conversation '{conversation_id}'.", param="conversation_id")
        target = f"conversation:{conversation_id}"
    elif isinstance(item.target, EpisodeTarget):
        episode_id = item.target.episode_id
        if (item.project_id, episode_id) not in episodes:
            raise NotFound(f"There is no episode '{episode_id}'.", param="target.episode_id")
        target = f"episode:{episode_id}"
    elif ranks := [(rank, _find_turn(item.project_id, other, turns)) for rank, other in request.ranked_choices()]:
        # The target depends on the set of turns only: a new order replaces the earlier one.
        ranked_ids = "\n".join(sorted(turn_id for _, turn_id in ranks))
        target = "ranking:" + hashlib.sha256(ranked_ids.encode()).hexdigest()
    else:
        raise _target_not_found(request.get_target())
    value = request.reward_value()
    row: FeedbackRow = {
        "id": new_id("fb"),
        "project_id": item.project_id,
        "turn_id": turn_id,
        "conversation_id": conversation_id,
        "episode_id": episode_id,
        "target": target,
        "kind": request.kind,
        "name": request.name,
        "value": value,
        "raw_value": item.raw_value,
        "comment": request.comment,
        "source_kind": request.source.kind,
        "source_id": request.source.id,
        "request_metadata": request.metadata,
        "idempotency_key": item.key,
        "fingerprint": item.fingerprint,
        "token_id": item.token_id,
        "processed": request.kind not in VOTE_KINDS and turn_id is None,  # a comment changes no reward
    }
    return NewFeedback(row, choice, ranks)


def _request_id(request: FeedbackCreate) -> str | None:
    return request.request_id if isinstance(request, TargetedFeedback) else None


def _target_not_found(target: AnyTarget | None) -> NotFound:
    if isinstance(target, ConversationTarget):
        message = f"There is no conversation '{target.conversation_id}' with a turn {target.turn}."
        return NotFound(message, param="target.turn")
    return NotFound("There is no completion with this metadata.", param="target.metadata")


def _exclusion_reasons(item: Submission, turns: FoundTurns) -> list[str | None]:
    """Return the reasons why the replies that the feedback is about must not be trained on; None for those that may."""
    found = [turns.get((item.project_id, choice.completion_id, choice.choice_index)) for choice in item.choices()]
    return [turn.exclusion_reason for turn in found if turn is not None]


def _find_turn(project_id: str, choice: Choice, turns: FoundTurns) -> str:
    turn = turns.get((project_id, choice.completion_id, choice.choice_index))
    if turn is None:
        suffix = f" with a choice {choice.choice_index}" if choice.choice_index else ""
        raise NotFound(f"There is no completion '{choice.completion_id}'{suffix}.", param="completion_id")
    return turn.id


def _insert(connection: Connection, new: dict[ProjectAndValue, NewFeedback]) -> dict[ProjectAndValue, FeedbackRow]:
    """Insert new feedback and return the stored rows by key. A key that another process has used is left as it is."""
    if not new:
        return {}
    inserted = repository.insert_feedback(connection, [feedback.row for feedback in new.values()])
    rows: dict[ProjectAndValue, FeedbackRow] = {}
    ranks = []
    for key, feedback in new.items():
        if feedback.row["id"] in inserted:
            seq, created_at = inserted[feedback.row["id"]]
            choice = feedback.choice
            rows[key] = {
                **feedback.row,
                "completion_id": choice.completion_id if choice else None,
                "choice_index": choice.choice_index if choice else None,
                "seq": seq,
                "created_at": created_at,
            }
            ranks += [{"feedback_seq": seq, "turn_id": turn_id, "rank": rank} for rank, turn_id in feedback.ranks]
    if ranks:
        repository.insert_ranks(connection, ranks)
    if any(not row["processed"] for row in rows.values()):
        enqueue_after_commit(connection, "curate")
    return rows | repository.find_by_keys(connection, new.keys() - rows.keys())
