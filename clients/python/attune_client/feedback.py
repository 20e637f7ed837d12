"""Feedback: every kind, single and in batches. Each piece has an id before it is first sent, so a retry counts once."""

import re
import time
import uuid
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, Unpack, cast

from attune_client.replies import choice_index, completion_id, is_reply
from attune_client.transport import AsyncTransport, Request, SyncTransport
from attune_client.types import (
    BatchResult,
    FeedbackBody,
    FeedbackFields,
    FeedbackPage,
    FeedbackRecord,
    FeedbackToken,
)

R_co = TypeVar("R_co", covariant=True)
PATH = "/v1/feedback"
MAX_BATCH = 1000
HEADER_VALUE = re.compile(r"[!-~]{1,255}")


class FeedbackKinds(Generic[R_co]):
    """The kinds of feedback. What a method returns depends on the class: see its subclasses.

    `reply` is a completion id, a reply (see `completion_id`), or a target of the API such as
    `{"conversation_id": "c-7"}`, `{"episode_id": "ep-…"}` or `{"metadata": {"thread": "7"}}`. `choice_index` selects
    one of several choices.
    """

    def submit(self, body: FeedbackBody) -> R_co:
        """Submit feedback in the API's own form. An `id` is added if there is none."""
        raise NotImplementedError

    def up(self, reply: Any, *, choice_index: int | None = None, **fields: Unpack[FeedbackFields]) -> R_co:
        """Thumbs up."""
        return self._submit("binary", True, _target(reply, choice_index), fields)

    def down(self, reply: Any, *, choice_index: int | None = None, **fields: Unpack[FeedbackFields]) -> R_co:
        """Thumbs down."""
        return self._submit("binary", False, _target(reply, choice_index), fields)

    def score(
        self, reply: Any, value: float, *, choice_index: int | None = None, **fields: Unpack[FeedbackFields]
    ) -> R_co:
        """A number between -1 and 1."""
        return self._submit("score", value, _target(reply, choice_index), fields)

    def rate(
        self,
        reply: Any,
        value: float,
        *,
        scale: tuple[float, float] = (1, 5),
        choice_index: int | None = None,
        **fields: Unpack[FeedbackFields],
    ) -> R_co:
        """A number on a scale, such as 1 to 5 stars."""
        return self._submit("rating", value, _target(reply, choice_index) | {"scale": list(scale)}, fields)

    def correct(
        self, reply: Any, better: str, *, choice_index: int | None = None, **fields: Unpack[FeedbackFields]
    ) -> R_co:
        """A better answer."""
        return self._submit("correction", better, _target(reply, choice_index), fields)

    def label(
        self, reply: Any, label: str, *, choice_index: int | None = None, **fields: Unpack[FeedbackFields]
    ) -> R_co:
        """A label."""
        return self._submit("categorical", label, _target(reply, choice_index), fields)

    def comment(
        self, reply: Any, text: str, *, choice_index: int | None = None, **fields: Unpack[FeedbackFields]
    ) -> R_co:
        """A text."""
        return self._submit("comment", text, _target(reply, choice_index), fields)

    def compare(self, better: Any, worse: Any, *, tie: bool = False, **fields: Unpack[FeedbackFields]) -> R_co:
        """Two replies to one prompt, the better one first. With `tie` they are equally good."""
        pair = [_reference(better), _reference(worse)]
        return self._submit("comparison", [pair] if tie else pair, {}, fields)

    def rank(self, replies: Sequence[Any], **fields: Unpack[FeedbackFields]) -> R_co:
        """Two to sixteen replies to one prompt, the best first. A nested list is a tie."""
        value = [
            [_reference(tied) for tied in item] if isinstance(item, list) else _reference(item) for item in replies
        ]
        return self._submit("ranking", value, {}, fields)

    def _submit(self, kind: str, value: Any, target: FeedbackBody, fields: FeedbackFields) -> R_co:
        named = dict(fields)
        if isinstance(source := named.get("source"), str):
            named["source"] = {"kind": "HUMAN", "id": source}
        return self.submit({"kind": kind, "value": value, **target, **named})


class FeedbackReceiver(FeedbackKinds[R_co]):
    """Feedback that is delivered: that of a client, and that of an offline queue."""

    def withdraw_key(self, key: str, *, sent_at: float | None = None) -> R_co:
        """Withdraw the feedback that was submitted with this key."""
        raise NotImplementedError


class FeedbackBodies(FeedbackKinds[FeedbackBody]):
    """Build bodies for `batch` without sending them."""

    def submit(self, body: FeedbackBody) -> FeedbackBody:
        return with_id(body)


build = FeedbackBodies()


class Feedback(FeedbackReceiver[FeedbackRecord]):
    """Submit feedback; each method returns the feedback as it is stored, after its commit."""

    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def submit(self, body: FeedbackBody) -> FeedbackRecord:
        return cast(FeedbackRecord, self._transport.json(_submit_request(body)))

    def batch(self, bodies: Sequence[FeedbackBody]) -> list[BatchResult]:
        """Submit bodies made by `build`. Returns one result for each, in order; an invalid one affects no other."""
        results: list[BatchResult] = []
        for request in _batch_requests(bodies):
            results += _shift(self._transport.json(request)["data"], len(results))
        return results

    def get(self, id: str) -> FeedbackRecord:
        """Return feedback by the id that the server gave it, with what has become of it (`outcome`)."""
        return cast(FeedbackRecord, self._transport.json(Request("GET", f"{PATH}/{id}")))

    def find(
        self, reply: Any = None, *, conversation_id: str | None = None, after: str | None = None, limit: int = 100
    ) -> FeedbackPage:
        """Return a page of the feedback about a reply or a conversation."""
        return cast(FeedbackPage, self._transport.json(_find_request(reply, conversation_id, after, limit)))

    def withdraw(self, id: str) -> FeedbackRecord:
        """Withdraw feedback by the id that the server gave it. Withdrawing it again changes nothing."""
        return cast(FeedbackRecord, self._transport.json(Request("DELETE", f"{PATH}/{id}")))

    def withdraw_key(self, key: str, *, sent_at: float | None = None) -> FeedbackRecord:
        """Withdraw the feedback that was submitted with this key. Raises NotFound if there is none."""
        return cast(FeedbackRecord, self._transport.json(_withdraw_request(key, sent_at)))

    def create_token(self, reply: Any, kinds: Sequence[str] = ("binary",), **fields: Any) -> FeedbackToken:
        """Return a token with which a web page can submit feedback on this reply, without an API key.

        `fields` are further fields of the API: source_id, names, expires_in, choice_index.
        """
        return cast(FeedbackToken, self._transport.json(_token_request(reply, kinds, fields)))


class AsyncFeedback(FeedbackReceiver[Awaitable[FeedbackRecord]]):
    """Submit feedback; the asynchronous form of Feedback."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def _json(self, request: Request) -> Any:
        return await self._transport.json(request)

    def submit(self, body: FeedbackBody) -> Awaitable[FeedbackRecord]:
        return self._json(_submit_request(body))

    async def batch(self, bodies: Sequence[FeedbackBody]) -> list[BatchResult]:
        """Submit bodies made by `build`. Returns one result for each, in order; an invalid one affects no other."""
        results: list[BatchResult] = []
        for request in _batch_requests(bodies):
            results += _shift((await self._json(request))["data"], len(results))
        return results

    async def get(self, id: str) -> FeedbackRecord:
        """Return feedback by the id that the server gave it, with what has become of it (`outcome`)."""
        return cast(FeedbackRecord, await self._json(Request("GET", f"{PATH}/{id}")))

    async def find(
        self, reply: Any = None, *, conversation_id: str | None = None, after: str | None = None, limit: int = 100
    ) -> FeedbackPage:
        """Return a page of the feedback about a reply or a conversation."""
        return cast(FeedbackPage, await self._json(_find_request(reply, conversation_id, after, limit)))

    async def withdraw(self, id: str) -> FeedbackRecord:
        """Withdraw feedback by the id that the server gave it. Withdrawing it again changes nothing."""
        return cast(FeedbackRecord, await self._json(Request("DELETE", f"{PATH}/{id}")))

    async def withdraw_key(self, key: str, *, sent_at: float | None = None) -> FeedbackRecord:
        """Withdraw the feedback that was submitted with this key. Raises NotFound if there is none."""
        return cast(FeedbackRecord, await self._json(_withdraw_request(key, sent_at)))

    async def create_token(self, reply: Any, kinds: Sequence[str] = ("binary",), **fields: Any) -> FeedbackToken:
        """Return a token with which a web page can submit feedback on this reply, without an API key."""
        return cast(FeedbackToken, await self._json(_token_request(reply, kinds, fields)))


class BatchSender(Protocol):
    """What the offline queue needs of a client."""

    def batch(self, bodies: Sequence[FeedbackBody]) -> Sequence[BatchResult]: ...

    def withdraw_key(self, key: str, *, sent_at: float | None = None) -> FeedbackRecord: ...


def with_id(body: FeedbackBody) -> FeedbackBody:
    """Return the body with an id, or with the time if it has a key. The server records one piece of feedback for it."""
    if body.get("key"):
        return {"sent_at": time.time(), **body}
    return body if body.get("id") else {**body, "id": str(uuid.uuid4())}


def _target(reply: Any, choice: int | None) -> FeedbackBody:
    if not is_reply(reply):
        return {"target": dict(cast(Mapping[str, Any], reply))}
    index = choice_index(reply) if choice is None else choice
    return {"completion_id": completion_id(reply)} | ({"choice_index": index} if index else {})


def _reference(reply: Any) -> Any:
    """Return how a comparison or ranking names a reply: its id, or with its choice."""
    if isinstance(reply, Mapping) and "completion_id" in reply:
        return dict(reply)
    id, index = completion_id(reply), choice_index(reply)
    return {"completion_id": id, "choice_index": index} if index else id


def _submit_request(body: FeedbackBody) -> Request:
    """Return the request, with its id also as the header: gateways such as LiteLLM remove `id` from bodies."""
    body = with_id(body)
    id = body.get("id")
    headers = {"idempotency-key": id} if isinstance(id, str) and HEADER_VALUE.fullmatch(id) else {}
    return Request("POST", PATH, body, headers=headers)


def _batch_requests(bodies: Sequence[FeedbackBody]) -> Iterator[Request]:
    items = [with_id(body) for body in bodies]  # all ids are made before the first request
    for start in range(0, len(items), MAX_BATCH):
        yield Request("POST", f"{PATH}/batch", {"items": items[start : start + MAX_BATCH]})


def _shift(results: list[BatchResult], start: int) -> list[BatchResult]:
    return [{**result, "index": result["index"] + start} for result in results]


def _find_request(reply: Any, conversation_id: str | None, after: str | None, limit: int) -> Request:
    id = None if reply is None else completion_id(reply)
    params = {"completion_id": id, "conversation_id": conversation_id, "after": after, "limit": limit}
    return Request("GET", PATH, params=params)


def _withdraw_request(key: str, sent_at: float | None) -> Request:
    return Request("DELETE", PATH, params={"key": key, "sent_at": time.time() if sent_at is None else sent_at})


def _token_request(reply: Any, kinds: Sequence[str], fields: Mapping[str, Any]) -> Request:
    index = choice_index(reply)
    body = {"completion_id": completion_id(reply), "kinds": list(kinds)} | ({"choice_index": index} if index else {})
    return Request("POST", f"{PATH}/tokens", {**body, **fields})
