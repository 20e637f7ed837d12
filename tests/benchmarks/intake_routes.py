"""The intake routes of the API, and senders that repeat each change until it is answered.

A change that was sent and not answered may have been recorded or not: the sender sends it again, as it was.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import httpx2

from tests.benchmarks.deployment import Deployment
from tests.benchmarks.intake_votes import Change, Traffic, TrafficOptions, to_person
from tests.support.langfuse import basic, librechat_score

NUM_SENDERS = 8  # at a time
BATCH_SIZE = 100
REPEAT_SECONDS = 0.25
Body = dict[str, Any]


class Route(Protocol):
    """A way in which votes come.

    `send` returns how many changes it sent, repetitions included, when all of them are acknowledged.
    """

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> TrafficOptions: ...

    async def send(self, target: Deployment, traffic: Traffic) -> int: ...


def completion_id(vote: int) -> str:
    return f"chatcmpl-{vote:032x}"


def message_id(vote: int) -> str:
    """Return the front end's id of the reply, which its chat was sent with."""
    return f"m-{vote}"


def to_value(change: Change) -> Body:
    """Return the fields of feedback for a change that is no withdrawal."""
    kind = "comment" if isinstance(change.value, str) else "binary"
    return {"kind": kind, "value": change.value, "source": to_person(change.vote)}


def body_by_id(change: Change) -> Body:
    body = {"id": f"{change.vote}-{change.revision}", "completion_id": completion_id(change.vote)}
    return body | to_value(change)


def body_by_key(change: Change) -> Body:
    body = {"key": to_key(change), "sent_at": change.sent_at, "completion_id": completion_id(change.vote)}
    return body | to_value(change)


def to_key(change: Change) -> str:
    return f"front-end:{change.vote}"


class Client:
    """Sends each request until the service has answered it, and counts the changes in them."""

    def __init__(self, target: Deployment, headers: dict[str, str] | None = None) -> None:
        self.num_sent = 0
        self._http = httpx2.AsyncClient(
            base_url=target.url, headers=headers or target.headers, timeout=30, trust_env=False
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, *, num_changes: int = 1, **options: Any) -> httpx2.Response:
        """Return the answer. Raises ValueError for one that says that the request is wrong."""
        while True:
            try:
                answer = await self._http.request(method, path, **options)
                self.num_sent += num_changes
            except httpx2.TransportError as error:
                self.num_sent += 0 if isinstance(error, httpx2.ConnectError) else num_changes
                await asyncio.sleep(REPEAT_SECONDS)
                continue
            if answer.status_code < 300 or is_expected(answer.status_code):
                return answer
            if not is_passing(answer.status_code):
                raise ValueError(f"{method} {path}: {answer.status_code} {answer.text}")
            await asyncio.sleep(REPEAT_SECONDS)


def is_expected(status: int) -> bool:
    """404: what is withdrawn has not come yet. 409: a later change of the vote came first."""
    return status in (404, 409)


def is_passing(status: int) -> bool:
    return status == 429 or status >= 500


async def send_in_lanes(
    arrivals: Sequence[Change], options: TrafficOptions, send: Callable[[list[Change]], Coroutine[None, None, None]]
) -> None:
    """Let several senders share the changes. Where the order counts, all changes of a vote are one sender's."""
    lanes: list[list[Change]] = [[] for _ in range(NUM_SENDERS)]
    for number, change in enumerate(arrivals):
        lanes[(change.vote if options.in_order else number) % NUM_SENDERS].append(change)
    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(send(lane))


def chunk(lane: Iterable[Change], size: int) -> Iterator[tuple[list[Change], list[Change]]]:
    """Yield votes, `size` at most, and withdrawals that come after them. No vote comes after its withdrawal there."""
    votes: list[Change] = []
    withdrawals: list[Change] = []
    for change in lane:
        if len(votes) == size or change.vote in {one.vote for one in withdrawals}:
            yield votes, withdrawals
            votes, withdrawals = [], []
        (votes if change.value is not None else withdrawals).append(change)
    yield votes, withdrawals


async def send_votes(
    client: Client, changes: Sequence[Change], to_body: Callable[[Change], Body], size: int
) -> list[Body]:
    """Send feedback, one by one or as a batch. Returns the views of what was recorded, or nothing of what was not."""
    if size > 1:
        return [result.get("feedback") or {} for result in await send_items(client, changes, to_body)]
    answers = [await client.request("POST", "/v1/feedback", json=to_body(change)) for change in changes]
    return [answer.json() for answer in answers]


async def send_items(client: Client, changes: Sequence[Change], to_body: Callable[[Change], Body]) -> list[Body]:
    """Send a batch of feedback, and again those items that the service could not take. Returns their results."""
    results: dict[int, Body] = {}
    while missing := [index for index in range(len(changes)) if index not in results]:
        items = [to_body(changes[index]) for index in missing]
        answer = await client.request("POST", "/v1/feedback/batch", num_changes=len(items), json={"items": items})
        for index, result in zip(missing, answer.json()["data"], strict=True):
            if not is_passing(result["status"]):
                results[index] = result
            if result["status"] >= 400 and not is_passing(result["status"]) and not is_expected(result["status"]):
                raise ValueError(f"{items[0]}: {result}")
    return [results[index] for index in range(len(changes))]


@dataclass(frozen=True)
class ById:
    """New feedback with an id of its own for each change; a withdrawal names the server's id of the one before."""

    name: str
    size: int  # of a batch; 1: each by itself
    options = TrafficOptions(in_order=True, comments=False)

    async def send(self, target: Deployment, traffic: Traffic) -> int:
        recorded: dict[tuple[int, int], str] = {}  # the server's id by vote and revision

        async def send_lane(lane: list[Change]) -> None:
            for votes, withdrawals in chunk(lane, self.size):
                views = await send_votes(client, votes, body_by_id, self.size)
                recorded.update(((one.vote, one.revision), view["id"]) for one, view in zip(votes, views, strict=True))
                for one in withdrawals:
                    await client.request("DELETE", f"/v1/feedback/{recorded[one.vote, one.revision - 1]}")

        async with Client(target) as client:
            await send_in_lanes(traffic.arrivals, self.options, send_lane)
            return client.num_sent


@dataclass(frozen=True)
class ByKey:
    """Feedback by the sender's key, with the times of its changes; they arrive in any order."""

    name: str
    size: int
    options = TrafficOptions()

    async def send(self, target: Deployment, traffic: Traffic) -> int:
        async def send_lane(lane: list[Change]) -> None:
            for votes, withdrawals in chunk(lane, self.size):
                await send_votes(client, votes, body_by_key, self.size)
                for one in withdrawals:
                    params: Body = {"key": to_key(one), "sent_at": one.sent_at}
                    await client.request("DELETE", "/v1/feedback", params=params)

        async with Client(target) as client:
            await send_in_lanes(traffic.arrivals, self.options, send_lane)
            return client.num_sent


@dataclass(frozen=True)
class LibreChat:
    """A score of Langfuse for each thumb, without a time; the reply is found by its message."""

    name = "Langfuse `/scores`, one by one"
    options = TrafficOptions(in_order=True, repeats_late=False, comments=False)

    async def send(self, target: Deployment, traffic: Traffic) -> int:
        async def send_lane(lane: list[Change]) -> None:
            for one in lane:
                score = librechat_score(message_id(one.vote), "thumbsUp" if one.value else "thumbsDown")
                score["metadata"]["userId"] = to_person(one.vote)
                if one.value is None:
                    await client.request("DELETE", f"/api/public/scores/{score['id']}")
                else:
                    await client.request("POST", "/api/public/scores", json=score)

        async with Client(target, basic(target.key)) as client:
            await send_in_lanes(traffic.arrivals, self.options, send_lane)
            return client.num_sent


@dataclass(frozen=True)
class LangfuseBatches:
    """Scores as Langfuse's SDKs send them: SDK 5 as an array, 3 and 4 as events. A deletion has no time."""

    name: str
    path: str
    options = TrafficOptions(returns=False)

    async def send(self, target: Deployment, traffic: Traffic) -> int:
        async def send_lane(lane: list[Change]) -> None:
            for votes, deletions in chunk(lane, BATCH_SIZE):
                await self._send_scores(client, votes)
                for one in deletions:
                    await client.request("DELETE", f"/api/public/scores/s-{one.vote}")

        async with Client(target, basic(target.key)) as client:
            await send_in_lanes(traffic.arrivals, self.options, send_lane)
            return client.num_sent

    async def _send_scores(self, client: Client, changes: list[Change]) -> None:
        """Send scores, and all of them again where the service could not take one."""
        scores = [to_score(one) for one in changes]
        events = [
            {
                "id": f"e-{one.vote}-{one.revision}",
                "type": "score-create",
                "timestamp": score["timestamp"],
                "body": score,
            }
            for one, score in zip(changes, scores, strict=True)
        ]
        body = {"batch": events} if self.path == "ingestion" else scores
        while changes:
            answer = await client.request("POST", f"/api/public/{self.path}", num_changes=len(changes), json=body)
            errors = answer.json().get("errors", [])
            if not errors:
                return
            if not all(is_passing(error.get("status", 400)) for error in errors):
                raise ValueError(f"{self.path}: {errors}")


def to_score(change: Change) -> Body:
    is_comment = isinstance(change.value, str)
    return {
        "id": f"s-{change.vote}",
        "name": "user-feedback",
        "value": change.value if is_comment else float(bool(change.value)),
        "dataType": "TEXT" if is_comment else "BOOLEAN",
        "timestamp": datetime.fromtimestamp(change.sent_at, UTC).isoformat(),
        "metadata": {"completion_id": completion_id(change.vote), "user_id": to_person(change.vote)},
    }


ROUTES: tuple[Route, ...] = (
    ById("`/v1/feedback` by `id`", 1),
    ById("`/v1/feedback/batch` by `id`", BATCH_SIZE),
    ByKey("`/v1/feedback` by `key`", 1),
    ByKey("`/v1/feedback/batch` by `key`", BATCH_SIZE),
    LibreChat(),
    LangfuseBatches("Langfuse `/scores`, arrays", "scores"),
    LangfuseBatches("Langfuse `/ingestion`", "ingestion"),
)
