"""
title: Attune feedback
author: Attune
version: 1.0.0
license: Apache-2.0
required_open_webui_version: 0.11.0
description: Sends thumbs, ratings and comments to an Attune server, which trains the model on them.
"""

# An event function of Open WebUI: Admin Panel → Functions → Import. Its connection to Attune needs the header lines of
# docs/connect/openwebui.md, by which Attune finds the reply of a message.
#
# Open WebUI publishes an event once, to the replica that handled the request. So an event only says where to look: what
# is sent is the row as it is now, under a key, so that repeating it changes nothing. What is sent is noted before and
# remembered in a small SQLite file, and every few minutes all rows are compared with it: votes and deletions that the
# server missed while it was down are sent then.

import asyncio
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
from open_webui.env import DATA_DIR
from open_webui.models.feedbacks import Feedbacks
from open_webui.models.functions import Functions
from pydantic import BaseModel, Field

log = logging.getLogger("attune_openwebui")
SCHEMA = """
CREATE TABLE IF NOT EXISTS sent (
    feedback_id TEXT PRIMARY KEY, updated_at INTEGER, user_id TEXT, message_id TEXT, completion_id TEXT, thumb REAL
);
CREATE TABLE IF NOT EXISTS compared (one TEXT, other TEXT, PRIMARY KEY (one, other));
"""
# Rows that are being sent, with no time: whatever becomes of the request, they are sent again or withdrawn later.
NOTE = """
INSERT INTO sent (feedback_id) SELECT value FROM json_each(?) WHERE true
ON CONFLICT (feedback_id) DO UPDATE SET updated_at = NULL
"""
CHUNK = 50  # votes in one request
LATER = (401, 403, 408, 425, 429)  # and 5xx: the vote is sent again at the next comparison
RECONCILER = "attune_openwebui_reconciler"


class Event:
    """Open WebUI calls `event` for everything that happens in it."""

    class Valves(BaseModel):
        """What the administrator sets."""

        url: str = Field("http://localhost:8700/v1", description="the Attune server, with /v1")
        api_key: str = Field(
            "",
            description="an Attune API key with the scope feedback",
            json_schema_extra={"input": {"type": "password"}},
        )
        models: str = Field(
            "", description="send votes on these models alone, e.g. assistant*, tutor; votes on all models when empty"
        )
        ratings: bool = Field(True, description="send the rating from 1 to 10 where a user gave one; else the thumb")
        comments: bool = Field(True, description="send comments, and the reasons and tags of a vote")
        comparisons: bool = Field(True, description="send the order of two replies to one prompt that a user voted on")
        seconds: int = Field(300, ge=10, description="how often to send again what the server missed")

    def __init__(self) -> None:
        self.valves = self.Valves()
        self.file = Path(DATA_DIR) / "attune_openwebui.db"
        self._ssl = httpx.create_ssl_context()  # takes longer to make than a vote to send
        self._lock = asyncio.Lock()

    async def event(self, event: dict[str, Any], __id__: str = "", __app__: Any = None) -> None:
        """Send the feedback that the event is about, and keep comparing the rest."""
        self._keep_reconciling(__app__, __id__)
        if not event["event"].startswith("feedback."):
            return
        subject = event.get("subject") or {}
        try:
            await self.synchronize(None if event["event"] == "feedback.deleted_all" else subject.get("id"))
        except (httpx.HTTPError, sqlite3.Error) as error:
            log.warning("Attune has not received a vote yet, which is sent again later: %r", error)

    async def synchronize(self, only: str | None = None) -> int:
        """Send what differs from what was sent, for all feedback or for this id. Return how many rows remain."""
        async with self._lock:
            store = sqlite3.connect(self.file, timeout=30, isolation_level=None)
            try:
                store.executescript(SCHEMA)
                return await self._synchronize(store, only)
            finally:
                store.close()

    async def _synchronize(self, store: sqlite3.Connection, only: str | None) -> int:
        if only is None:
            existing = {row.id: row.updated_at for row in await Feedbacks.get_all_feedback_ids()}
            sent = dict(store.execute("SELECT feedback_id, updated_at FROM sent"))
            changed = [id for id, updated_at in existing.items() if sent.get(id) != updated_at]
        else:
            row = await Feedbacks.get_feedback_by_id(only)
            existing = {} if row is None else {only: row.updated_at}
            sent = dict(store.execute("SELECT feedback_id, updated_at FROM sent WHERE feedback_id = ?", (only,)))
            changed = list(existing)  # sent again even if its time is the same: times are in seconds
        remaining = 0
        async with httpx.AsyncClient(
            base_url=self.valves.url.rstrip("/"),
            headers={"authorization": f"Bearer {self.valves.api_key}"},
            timeout=30,
            verify=self._ssl,
        ) as client:
            for chunk in _chunks(sorted(changed, key=lambda id: (existing[id], id))):
                remaining += await self._send(client, store, chunk)
            for id in sorted(sent.keys() - existing.keys()):
                remaining += await self._withdraw(client, store, id)
        return remaining

    async def _send(self, client: httpx.AsyncClient, store: sqlite3.Connection, ids: list[str]) -> int:
        """Send the rows with these ids. Return how many the server could not take now."""
        rows = [row for id in ids if (row := await Feedbacks.get_feedback_by_id(id)) is not None]
        items = {row.id: body for row in rows if (body := self._vote(row)) is not None}
        store.execute(NOTE, (json.dumps(list(items)),))
        results = await self._post(client, list(items.values()))
        remaining = 0
        for row in rows:
            result = results.pop(0) if row.id in items else {"status": 200}
            if _is_for_later(result["status"]):
                remaining += 1
                continue
            completion_id = (result.get("feedback") or {}).get("completion_id")
            value = (row.id, row.updated_at, row.user_id, _message_id(row), completion_id, _thumb(row))
            store.execute("INSERT OR REPLACE INTO sent VALUES (?, ?, ?, ?, ?, ?)", value)
            if self.valves.comparisons and completion_id is not None:
                await self._compare(client, store, row)
        return remaining

    def _vote(self, row: Any) -> dict[str, Any] | None:
        """Return the body of the feedback; None for a row without a vote, or on a model that is not meant."""
        data, message_id, thumb = row.data or {}, _message_id(row), _thumb(row)
        rating = (data.get("details") or {}).get("rating") if self.valves.ratings else None
        patterns = [pattern.strip() for pattern in self.valves.models.split(",") if pattern.strip()]
        model = str(data.get("model_id") or "")
        if not message_id or (patterns and not any(fnmatchcase(model, pattern) for pattern in patterns)):
            return None
        body: dict[str, Any] = {
            "key": f"openwebui:{row.id}",
            "sent_at": float(row.updated_at),
            "target": {"metadata": {"message-id": message_id}},
            "source": {"id": f"openwebui:{row.user_id}"},
        }
        if isinstance(rating, int | float) and 1 <= rating <= 10:
            body |= {"kind": "rating", "value": rating, "scale": [1, 10]}
        elif thumb is not None:
            body |= {"kind": "binary", "value": thumb > 0}
        elif self.valves.comments and data.get("comment"):
            return body | {"kind": "comment", "value": str(data["comment"])[:10_000]}
        else:
            return None
        if self.valves.comments:
            tags = ", ".join(map(str, data.get("tags") or (row.meta or {}).get("tags") or ()))
            details = {"reason": str(data.get("reason") or ""), "tags": tags}
            body["metadata"] = {name: value[:512] for name, value in details.items() if value}
            if data.get("comment"):
                body["comment"] = str(data["comment"])[:10_000]
        return body

    async def _compare(self, client: httpx.AsyncClient, store: sqlite3.Connection, row: Any) -> None:
        """Send the order of the reply and of other replies to its prompt that were voted on, or withdraw it."""
        own = _find_vote(store, row.user_id, _message_id(row))
        for message_id in _other_replies(row):
            other = _find_vote(store, row.user_id, message_id)
            if own is None or other is None:
                continue
            pair = tuple(sorted((own[0], other[0])))
            if own[2] == other[2]:
                await self._forget_comparison(client, store, pair)
                continue
            better, worse = (own, other) if own[2] > other[2] else (other, own)
            body = {
                "key": _comparison_key(pair),
                "sent_at": float(row.updated_at),
                "source": {"id": f"openwebui:{row.user_id}"},
                "kind": "comparison",
                "value": [better[1], worse[1]],
            }
            [result] = await self._post(client, [body])
            if not _is_for_later(result["status"]):
                store.execute("INSERT OR IGNORE INTO compared VALUES (?, ?)", pair)

    async def _withdraw(self, client: httpx.AsyncClient, store: sqlite3.Connection, id: str) -> int:
        """Withdraw deleted feedback. Return 1 if the server could not take it now, else 0."""
        for pair in store.execute("SELECT one, other FROM compared WHERE ? IN (one, other)", (id,)).fetchall():
            await self._forget_comparison(client, store, pair)
        response = await client.delete("/feedback", params={"key": f"openwebui:{id}"})
        if _is_for_later(response.status_code):
            return 1
        _log_refusal(response.status_code, response.text)
        store.execute("DELETE FROM sent WHERE feedback_id = ?", (id,))
        return 0

    async def _forget_comparison(
        self, client: httpx.AsyncClient, store: sqlite3.Connection, pair: tuple[str, ...]
    ) -> None:
        if store.execute("SELECT 1 FROM compared WHERE one = ? AND other = ?", pair).fetchone() is None:
            return
        response = await client.delete("/feedback", params={"key": _comparison_key(pair)})
        if not _is_for_later(response.status_code):
            store.execute("DELETE FROM compared WHERE one = ? AND other = ?", pair)

    async def _post(self, client: httpx.AsyncClient, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the server's result for each item. Raises httpx.HTTPError if there is none."""
        if not items:
            return []
        response = await client.post("/feedback/batch", json={"items": items})
        response.raise_for_status()
        results: list[dict[str, Any]] = response.json()["data"]
        for result in results:
            _log_refusal(result["status"], str(result.get("error")))
        return results

    def _keep_reconciling(self, app: Any, function_id: str) -> None:
        """Compare all feedback with what was sent from now on; one task for each process of Open WebUI."""
        state = getattr(app, "state", None)
        owner, task = getattr(state, RECONCILER, (None, None))
        if state is None or (owner is self and not task.done()):
            return
        if task is not None:
            task.cancel()  # of the function as it was before an update
        setattr(state, RECONCILER, (self, asyncio.create_task(self._reconcile(function_id))))

    async def _reconcile(self, function_id: str) -> None:
        while True:
            try:
                function = await Functions.get_function_by_id(function_id)
                if function is None or not function.is_active:
                    return
                self.valves = self.Valves(**(await Functions.get_function_valves_by_id(function_id) or {}))
                await self.synchronize()
            except Exception as error:  # whatever it was, votes are sent again at the next time
                log.warning("Attune has not received all votes yet: %r", error)
            await asyncio.sleep(self.valves.seconds)


def _find_vote(store: sqlite3.Connection, user_id: str, message_id: str) -> tuple[str, str, float] | None:
    """Return a person's vote on a reply that Attune has: its id, the reply's id at Attune, and 1 or -1."""
    return store.execute(
        "SELECT feedback_id, completion_id, thumb FROM sent WHERE user_id = ? AND message_id = ? "
        "AND completion_id NOT NULL AND thumb NOT NULL",
        (user_id, message_id),
    ).fetchone()


def _thumb(row: Any) -> float | None:
    """Return 1 or -1; None without a vote."""
    try:
        rating = float((row.data or {}).get("rating"))
    except (TypeError, ValueError):
        return None
    return None if rating == 0 else 1.0 if rating > 0 else -1.0


def _message_id(row: Any) -> str:
    return str((row.meta or {}).get("message_id") or "")


def _other_replies(row: Any) -> Iterator[str]:
    """Yield the ids of the other replies to the same prompt."""
    chat = ((row.snapshot or {}).get("chat") or {}).get("chat") or {}
    messages = (chat.get("history") or {}).get("messages") or {}
    parent = messages.get((messages.get(_message_id(row)) or {}).get("parentId")) or {}
    yield from (str(id) for id in parent.get("childrenIds") or () if id != _message_id(row))


def _comparison_key(pair: Iterable[str]) -> str:
    return "openwebui:" + ":".join(pair)


def _is_for_later(status: int) -> bool:
    return status >= 500 or status in LATER


def _log_refusal(status: int, reason: str) -> None:
    # 404: the reply is another model's, or was deleted. 409: a later change came first.
    if status >= 400 and status not in (404, 409) and not _is_for_later(status):
        log.error("Attune refused a vote: %s", reason)


def _chunks(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]
