"""Find what scores are about: a reply by its id, its message or its trace; a conversation by its session."""

from collections.abc import Sequence

from app.chat.trace_ids import MESSAGE_KEY, TRACE_KEY
from app.core.database import Database
from app.feedback.repository import find_turns
from app.feedback.schemas import Choice
from app.feedback.target_queries import find_newest_turns, find_traced_turns
from app.feedback.unmatched import Reason
from app.langfuse.schemas import Score
from app.models import to_completion_id

COMPLETION_KEYS = ("completion_id", "completionId", "completion-id", "request_id", "requestId", "request-id")
MESSAGE_KEYS = ("messageId", "message_id", MESSAGE_KEY)
MAX_METADATA_VALUE = 512  # of the pairs that replies are found by

Target = dict[str, object]  # as a body of feedback names it


async def find_targets(db: Database, project_id: str, scores: Sequence[Score]) -> list[Target | Reason]:
    """Return what each score is about, or why it is about nothing that is known.

    The order is that of certainty: our own id of the reply, then the message that it was sent for, then its trace, by
    metadata or by the header `traceparent`. A score that names a reply is never about the conversation: the reply may
    be another model's.
    """
    ids = [_completion_ids(score) for score in scores]
    pairs = [_pairs(score) for score in scores]
    turns = await db.run_read(lambda connection: find_turns(connection, {id for own in ids for id in own}))
    queries = [pair for own in pairs for pair in own]
    async with db.read() as session:
        found = iter(await find_newest_turns(session, project_id, queries))
        traced = await find_traced_turns(session, project_id, {_trace(score) for score in scores} - {""})
    by_pair = [[next(found) for _ in own] for own in pairs]
    targets: list[Target | Reason] = []
    for score, own_ids, choices in zip(scores, ids, by_pair, strict=True):
        known = (id for id in own_ids if (project_id, id, 0) in turns)
        by_id = next((Choice(completion_id=id) for id in known), None)
        by_metadata = next((choice for choice in choices if choice is not None), None)
        choice = by_id or by_metadata or traced.get(_trace(score))
        if choice is not None:
            targets.append(choice.model_dump())
        elif own_ids or choices:
            targets.append(Reason.UNKNOWN_REPLY)
        elif score.session_id and len(score.session_id) <= 255:
            targets.append({"conversation_id": score.session_id})
        else:
            targets.append(Reason.NO_REPLY_NAMED)
    return targets


def _completion_ids(score: Score) -> list[str]:
    """Return what may be our id of the reply, the surest first."""
    named = (score.find_metadata(*COMPLETION_KEYS), score.observation_id, score.trace_id)
    return [to_completion_id(id) for id in named if id]


def _trace(score: Score) -> str:
    """Return the trace that the score is about; none if it is about one observation, which may be another model's."""
    return score.trace_id or "" if score.observation_id is None else ""


def _pairs(score: Score) -> list[dict[str, str]]:
    """Return the pairs of metadata that the reply may have, the surest first."""
    named = ((MESSAGE_KEY, score.find_metadata(*MESSAGE_KEYS)), (TRACE_KEY, score.trace_id))
    return [{key: value} for key, value in named if value and len(value) <= MAX_METADATA_VALUE]
