"""An offline queue: feedback is stored in a SQLite file and delivered once the server can be reached.

Every piece is committed to the file before its method returns, and deleted from it only after the server has
acknowledged it. A crash between the two sends it again; its id lets the server record it once.
"""

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from attune_client.errors import (
    APIError,
    AttuneError,
    BadRequest,
    Conflict,
    NotDelivered,
    NotFound,
    QueueFull,
    RateLimited,
    ServerError,
    TooLarge,
    Unprocessable,
)
from attune_client.feedback import MAX_BATCH, BatchSender, FeedbackReceiver, with_id
from attune_client.transport import RetryPolicy
from attune_client.types import BatchResult, FeedbackBody

log = logging.getLogger("attune_client")
SCHEMA = """
CREATE TABLE IF NOT EXISTS pending (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS refused (
    id TEXT PRIMARY KEY, body TEXT NOT NULL, status INTEGER NOT NULL, error TEXT NOT NULL
);
"""
MAX_QUEUED_ITEMS = 100_000
IDLE_SECONDS = 5.0  # so that a queue also delivers what another process has written to its file
BACKOFF = RetryPolicy(base_seconds=0.5, max_seconds=30.0)
Row = tuple[str, str]  # id and body
WITHDRAWAL = "withdraw_key"  # the field of a body that withdraws this key


@dataclass(frozen=True)
class RefusedFeedback:
    """Feedback that the server refused for good, such as a vote on a deleted reply."""

    id: str
    body: FeedbackBody
    status: int
    error: dict[str, Any]


class FeedbackQueue(FeedbackReceiver[str]):
    """A durable queue; each method returns the id of the feedback once it is stored in the file.

    Feedback is delivered in its order, by a background thread and by `flush`. Several processes may share a file.
    Create the queue in the process that uses it: a thread does not survive a fork. In asyncio, call its methods by
    `asyncio.to_thread`, since each waits for the disk.

    Args:
        path: The SQLite file. Its folder must exist.
        feedback: Where to deliver, `Attune(…).feedback`; `Attune.queue` passes it.
        max_items: Beyond this number QueueFull is raised: nothing is dropped without notice.
        background: Deliver in a background thread. Without it, feedback waits for `flush`.
    """

    def __init__(
        self, path: str | Path, feedback: BatchSender, *, max_items: int = MAX_QUEUED_ITEMS, background: bool = True
    ) -> None:
        self._feedback = feedback
        self._max_items = max_items
        self._batch_size = MAX_BATCH
        self._database_lock = threading.Lock()
        self._delivery_lock = threading.Lock()
        self._closed, self._wake = threading.Event(), threading.Event()
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # corrections and comments are for their owner alone
        self._database = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + SCHEMA)
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="attune-feedback-queue", daemon=True)
            self._thread.start()

    def submit(self, body: FeedbackBody) -> str:
        """Store feedback and return its id; with a `key`, that and its time.

        Raises QueueFull, and ValueError for what JSON cannot hold.
        """
        body = with_id(body)
        return self._store(str(body.get("id") or f"{body['key']}@{body['sent_at']}"), body)

    def withdraw_key(self, key: str, *, sent_at: float | None = None) -> str:
        """Store the withdrawal of the feedback with this key, which is delivered after what was stored before it."""
        sent_at = time.time() if sent_at is None else sent_at
        return self._store(f"withdraw {key}@{sent_at}", {WITHDRAWAL: key, "sent_at": sent_at})

    def _store(self, id: str, body: FeedbackBody) -> str:
        text = json.dumps(body, allow_nan=False, sort_keys=True)
        json.dumps(
            body, ensure_ascii=False
        ).encode()  # as it is sent: a lone surrogate is refused here, by a ValueError
        with self._database_lock:
            self._execute_in_transaction(lambda: self._insert(id, text))
        self._wake.set()
        return id

    def _insert(self, id: str, text: str) -> None:
        known = self._database.execute("SELECT body FROM pending WHERE id = ?", (id,)).fetchone()
        if known is not None:
            if known[0] != text:
                raise ValueError(f"the queue holds other feedback with the id {id!r}")
            return
        [count] = self._database.execute("SELECT count(*) FROM pending").fetchone()
        if count >= self._max_items:
            raise QueueFull(f"the queue holds {count} pieces of feedback that could not be delivered yet")
        self._database.execute("INSERT INTO pending (id, body) VALUES (?, ?)", (id, text))

    @property
    def pending(self) -> int:
        """The number of pieces that are not delivered yet."""
        with self._database_lock:
            [count] = self._database.execute("SELECT count(*) FROM pending").fetchone()
        return int(count)

    def refused(self) -> list[RefusedFeedback]:
        """Return what the server refused for good. It stays in the file until `clear_refused`."""
        with self._database_lock:
            rows = self._database.execute("SELECT id, body, status, error FROM refused ORDER BY rowid").fetchall()
        return [RefusedFeedback(id, json.loads(body), status, json.loads(error)) for id, body, status, error in rows]

    def clear_refused(self) -> None:
        with self._database_lock:
            self._database.execute("DELETE FROM refused")

    def flush(self, timeout: float | None = None) -> None:
        """Deliver everything, and wait for it.

        Raises NotDelivered when the time is over, and at once for an error that waiting does not mend, such as a
        revoked key. The feedback stays in the file.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        num_failures, cause = 0, None
        while self.pending:
            try:
                self._deliver()
                num_failures, cause = 0, None
                continue
            except AttuneError as error:
                cause = error
            seconds = max(cause.retry_after or 0.0, BACKOFF.backoff(num_failures))
            num_failures += 1
            is_late = deadline is not None and time.monotonic() + seconds >= deadline
            if is_late or not cause.should_retry:
                pending = self.pending
                raise NotDelivered(f"{pending} pieces of feedback are not delivered: {cause}", pending) from cause
            time.sleep(seconds)

    def close(self, timeout: float = 5.0) -> None:
        """Deliver what can be delivered in this time, and close the file. What is left waits in the file."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.flush(timeout)
        except NotDelivered as error:
            log.warning("%s", error)
        with self._database_lock:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """Deliver until the queue is closed. While deliveries fail, new feedback does not shorten the wait."""
        num_failures = 0
        while not self._closed.is_set():
            self._wake.clear()
            try:
                delivered = self._deliver()
            except AttuneError as error:
                if num_failures == 0:
                    log.warning("feedback waits in the queue: %s", error)
                self._closed.wait(max(error.retry_after or 0.0, BACKOFF.backoff(num_failures)))
                num_failures += 1
                continue
            except Exception:  # such as a full disk: the feedback is in the file, and the thread must live
                log.exception("the queue could not deliver")
                self._closed.wait(BACKOFF.max_seconds)
                continue
            num_failures = 0
            if not delivered:
                self._wake.wait(IDLE_SECONDS)

    def _deliver(self) -> bool:
        """Send the oldest batch; return whether there was one. Raises AttuneError if the server could not take it.

        A batch that is refused as a whole is halved until the piece that cannot be sent is alone.
        """
        with self._delivery_lock:
            with self._database_lock:
                rows: list[Row] = self._database.execute(
                    "SELECT id, body FROM pending ORDER BY seq LIMIT ?", (self._batch_size,)
                ).fetchall()
            if not rows:
                return False
            bodies = [json.loads(body) for _, body in rows]
            num_bodies = next((at for at, body in enumerate(bodies) if WITHDRAWAL in body), len(bodies)) or 1
            rows, bodies = rows[:num_bodies], bodies[:num_bodies]  # up to the next withdrawal, or that alone
            try:
                results = self._send(bodies)
            except (BadRequest, TooLarge, Unprocessable, UnicodeError) as error:
                if len(rows) == 1:
                    results = [_result_of(error)]
                else:
                    self._batch_size = max(1, len(rows) // 2)
                    return True
            except RateLimited:
                self._batch_size = max(1, len(rows) // 2)  # a batch larger than the limit would never pass
                raise
            self._batch_size = min(MAX_BATCH, 2 * self._batch_size)
            if any(_is_temporary(result) for result in self._settle(rows, results)):
                raise ServerError("The server could not take a part of the feedback.", status=503, should_retry=True)
            return True

    def _send(self, bodies: list[FeedbackBody]) -> Sequence[BatchResult]:
        if WITHDRAWAL not in bodies[0]:
            return self._feedback.batch(bodies)
        try:
            self._feedback.withdraw_key(bodies[0][WITHDRAWAL], sent_at=bodies[0]["sent_at"])
        except (NotFound, Conflict) as error:  # there is none, or a later change
            if error.should_retry:
                raise
            return [{"index": 0, "status": error.status, "error": _describe(error)}]
        return [{"index": 0, "status": 200}]

    def _settle(self, rows: Sequence[Row], results: Sequence[BatchResult]) -> list[BatchResult]:
        """Delete what the server has recorded, and set aside what it refused for good. Returns the results."""
        settled = [(row, result) for row, result in zip(rows, results, strict=True) if not _is_temporary(result)]
        refused = [
            (*row, result["status"], json.dumps(result.get("error")))
            for row, result in settled
            if result["status"] >= 400
        ]

        def change() -> None:
            self._database.executemany("INSERT OR REPLACE INTO refused VALUES (?, ?, ?, ?)", refused)
            self._database.executemany("DELETE FROM pending WHERE id = ?", [(id,) for (id, _), _ in settled])

        with self._database_lock:
            self._execute_in_transaction(change)
        if refused:
            log.warning("the server refused %d pieces of feedback; `refused` lists them", len(refused))
        withdrawn = [id for (id, _), result in settled if result.get("feedback", {}).get("withdrawn")]
        if withdrawn:
            log.warning("%d pieces of feedback were withdrawn before and do not count: %s", len(withdrawn), withdrawn)
        return list(results)

    def _execute_in_transaction(self, change: Any) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            change()
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def _is_temporary(result: BatchResult) -> bool:
    return result["status"] in (408, 429) or result["status"] >= 500


def _result_of(error: APIError | UnicodeError) -> BatchResult:
    """Return the result of a piece that was refused alone, or that JSON cannot hold: earlier releases stored those."""
    if isinstance(error, UnicodeError):
        unreadable = {"message": str(error), "type": "invalid_request_error", "param": None, "code": "invalid_json"}
        return {"index": 0, "status": 400, "error": unreadable}
    return {"index": 0, "status": error.status, "error": _describe(error)}


def _describe(error: APIError) -> dict[str, Any]:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
