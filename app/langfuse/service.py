"""Record scores of Langfuse as feedback, and delete them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from alignment.json_values import as_object
from app.core.database import Database
from app.core.errors import AttuneError, Conflict
from app.core.settings.service import LangfuseSettings
from app.core.telemetry import Telemetry
from app.feedback import service as feedback
from app.feedback.feedback_rows import BatchResultBody
from app.feedback.feedback_writer import FeedbackWriter
from app.feedback.unmatched import Reason, count_unmatched
from app.langfuse.schemas import Score
from app.langfuse.targets import find_targets
from app.langfuse.translation import CONNECTOR, to_feedback, to_key
from app.models import new_id
from app.projects.auth import Caller


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a score was not taken."""

    status: int
    code: str
    message: str

    @property
    def is_passing(self) -> bool:
        """Whether the same score may be taken later."""
        return self.status >= 500 or self.status == 429

    @classmethod
    def of(cls, error: AttuneError) -> "Problem":
        return cls(error.status, error.code or error.type, error.message)


@dataclass(frozen=True, slots=True)
class Taken:
    """A score that was taken: recorded, counted as unmatched, or older than what is known of it."""

    id: str


Outcome = Taken | Problem


class ScoreService:
    """Records scores of Langfuse as feedback."""

    def __init__(self, db: Database, writer: FeedbackWriter, telemetry: Telemetry, settings: LangfuseSettings) -> None:
        self._db, self._writer, self._telemetry, self._settings = db, writer, telemetry, settings

    async def take(self, caller: Caller, scores: Sequence[Score | AttuneError]) -> list[Outcome]:
        """Record scores as feedback; return when they are committed, with one outcome for each, in order.

        A score that is about no reply of ours is taken and counted. A faulty one does not affect the others.
        """
        outcomes: dict[int, Outcome] = {}
        bodies: dict[int, dict[str, object]] = {}
        read: list[Score] = []
        ids: dict[int, str] = {}
        for index, score in enumerate(scores):
            try:
                if isinstance(score, AttuneError):
                    raise score
                ids[index] = score.id or new_id("score")
                bodies[index] = to_feedback(score, ids[index], self._settings)
                read.append(score)
            except AttuneError as error:
                outcomes[index] = Problem.of(error)
        targets = await find_targets(self._db, caller.project_id, read)
        unmatched: list[Reason] = []
        for index, target in zip(list(bodies), targets, strict=True):
            if isinstance(target, Reason):
                unmatched.append(target)
                outcomes[index] = Taken(ids[index])
                del bodies[index]
            else:
                bodies[index]["target"] = target
        if bodies:
            results = await feedback.submit_batch(self._db, self._writer, caller, list(bodies.values()), None)
            for (index, body), result in zip(bodies.items(), results, strict=True):
                outcome = _to_outcome(result, ids[index])
                if outcome is None:  # its target does not exist, or no longer
                    is_session = "conversation_id" in as_object(body["target"])
                    unmatched.append(Reason.UNKNOWN_CONVERSATION if is_session else Reason.UNKNOWN_REPLY)
                    outcome = Taken(ids[index])
                outcomes[index] = outcome
                if result["status"] == 201:
                    self._telemetry.record_feedback(caller.project_id, result["feedback"]["kind"])
        for reason in unmatched:
            self._telemetry.record_unmatched(caller.project_id, CONNECTOR, reason)
        await count_unmatched(self._db, caller.project_id, CONNECTOR, unmatched)
        return [outcomes[index] for index in range(len(scores))]


def _to_outcome(result: BatchResultBody, score_id: str) -> Outcome | None:
    """Return the outcome of a submission; None if its target was not found."""
    if result["status"] == 404:
        return None
    error = result.get("error")
    if error is None or error["code"] == "superseded":
        return Taken(score_id)
    return Problem(result["status"], error["code"] or error["type"], error["message"])


async def delete_score(db: Database, caller: Caller, score_id: str) -> None:
    """Withdraw the feedback of a score. One that does not exist is remembered as deleted.

    The score as it was before may still arrive, since a client that was not answered sends it again.
    """
    try:
        async with db.write() as session:
            await feedback.withdraw_by_key(
                session, caller.project_id, to_key(score_id), time.time(), actor=caller.key_prefix
            )
    except Conflict as error:
        if error.code != "superseded":
            raise
