"""Plan: everything about a completion that is known before the engine is asked."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson
from sqlalchemy import exists, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from app.chat import conversations, prefix_reuse
from app.chat.sampling_params import sampling_exclusion_reason, sampling_of
from app.chat.schemas import ChatRequest
from app.chat.turn_writer import Holder, TurnStart
from app.core.database import Database, now
from app.core.errors import BadRequest
from app.core.settings import Settings
from app.deployments.resolution import Route
from app.deployments.router import RequestIdentity, VersionRouter
from app.inference.client import BASE_WEIGHTS, EngineClient
from app.inference.pool import EnginePool
from app.inference.request import ChatCall, Sampling
from app.models import Sample, Turn, new_id
from app.projects.auth import Caller
from app.projects.consent import NO_CONSENT, withholds

RETRY_SECONDS = 1800.0  # a stock client gives up on a reply after ten minutes, three times


@dataclass(frozen=True)
class Asked:
    """A request as it came, with what its headers add."""

    request: ChatRequest
    sha256: str
    conversation_id: str | None
    retries: int

    @classmethod
    def of(cls, request: ChatRequest, headers: Mapping[str, str]) -> "Asked":
        named = request.metadata.get(conversations.CONVERSATION_ID) or headers.get("x-conversation-id") or None
        if named is not None and (len(named) > 255 or "\x00" in named):
            raise BadRequest("A conversation's id holds at most 255 characters.", param="x-conversation-id")
        body = orjson.dumps(request.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)
        count = headers.get("x-stainless-retry-count", "0")
        retries = int(count) if count.isdecimal() and len(count) < 4 else 0
        return cls(request, hashlib.sha256(body).hexdigest(), named, retries)


@dataclass(frozen=True)
class Plan:
    """`calls`, one a choice, are named by their turns' ids; the first gives the completion its own."""

    label: str
    created: int
    client: EngineClient
    calls: tuple[ChatCall, ...]
    conversation_id: str
    opening: TurnStart
    length_range: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        return self.calls[0].rid

    @property
    def headers(self) -> dict[str, str]:
        shown = self.conversation_id if self.conversation_id.isascii() and self.conversation_id.isprintable() else ""
        named = {"x-completion-id": self.id, "x-policy-version": self.label}
        return named | ({"x-conversation-id": shown} if shown else {})


@dataclass(frozen=True)
class Past:
    """What is on record that bears on this request: the turn before, and turns that it may repeat."""

    parent: conversations.Parent | None = None
    earlier: tuple[Any, ...] = ()

    @property
    def judged(self) -> str | None:
        return next((row.id for row in self.earlier if row.judged), None)


async def plan(
    db: Database,
    pool: EnginePool,
    settings: Settings,
    caller: Caller,
    routes: VersionRouter,
    found: Route,
    asked: Asked,
) -> Plan:
    """`found` is what the request's `model` names; which version of it answers is decided here."""
    request = asked.request
    sampling = sampling_of(request, settings)
    messages = [message.plain() for message in request.messages]
    past = await _past(db, caller, asked, messages)
    conversation_id = conversations.conversation(asked.conversation_id, past.parent)
    route = await routes.choose(found, _speaker(caller, asked, conversation_id, past.parent, found))
    engine, url = route.engines[conversations.opening(messages) % len(route.engines)]
    client = pool.at(url)
    call = ChatCall(
        rid=new_id("chatcmpl"),
        messages=messages,
        sampling=sampling,
        adapter=route.named.adapter,
        tools=request.plain_tools(),
        tool_choice=request.plain_choice(),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        response_format=request.plain_format(),
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        include_usage=request.wants_usage,
        extra_key=route.named.weights or route.named.base_model,
        weights=(route.named.weights or BASE_WEIGHTS) if settings.adaptation == "full" else None,
    )
    note = None
    if past.parent is not None:
        continued = await prefix_reuse.go_on(client, call, messages, past.parent, route.named.policy_id)
        call, note = replace(call, prompt_ids=continued.prompt_ids), continued.note
    exclusion_reason = _exclusion_reason(caller, asked, sampling, past.judged)
    calls = (call, *(_choice(call, index) for index in range(1, request.n)))
    shaped_by = request.asked()
    turns = [
        {
            "id": choice.rid,
            "completion_id": call.rid,
            "choice_index": index,
            "project_id": caller.project_id,
            "key_id": caller.key_id,
            "policy_id": route.named.policy_id,
            "version_id": route.named.version_id,
            "route_reason": route.route_reason,
            "engine": engine,
            "stream": request.stream,
            "messages": messages,
            "sampling": choice.sampling.body(),
            "request_params": shaped_by,
            "conversation_id": conversation_id,
            "parent_id": past.parent.id if past.parent else None,
            "prefix_reuse": note,
            "end_user": request.end_user,
            "request_sha256": asked.sha256,
            "request_metadata": request.metadata,
            "exclusion_reason": exclusion_reason,
        }
        for index, choice in enumerate(calls)
    ]
    pairs = [
        {"turn_id": call.rid, "project_id": caller.project_id, "key": key, "value": value}
        for key, value in request.metadata.items()
    ]
    holder = Holder(engine, route.named.weights, route.named.label)
    replaced = () if past.judged else tuple(row.id for row in past.earlier)
    return Plan(
        label=route.named.label,
        created=int(time.time()),
        client=client,
        calls=calls,
        conversation_id=conversation_id,
        opening=TurnStart(turns, pairs, replaced, holder if settings.adaptation == "full" else None),
        length_range=settings.length_range,
    )


def _speaker(
    caller: Caller, asked: Asked, conversation_id: str, parent: conversations.Parent | None, found: Route
) -> RequestIdentity:
    before = parent.version_id if parent is not None and parent.policy_id == found.named.policy_id else None
    return RequestIdentity(caller.key_id, conversation_id, asked.request.end_user, before)


async def _past(db: Database, caller: Caller, asked: Asked, messages: list[dict[str, Any]]) -> Past:
    goes_on = asked.conversation_id is not None or any(message["role"] == "assistant" for message in messages)
    if not goes_on and not asked.retries:
        return Past()  # the first of its kind: nothing to look up

    def look(connection: Connection) -> Past:
        parent = conversations.parent_of(
            connection,
            messages,
            project_id=caller.project_id,
            key_id=caller.key_id,
            end_user=asked.request.end_user,
            conversation_id=asked.conversation_id,
        )
        return Past(parent, tuple(_earlier(connection, caller, asked)) if asked.retries else ())

    return await db.run_read(look)


def _earlier(connection: Connection, caller: Caller, asked: Asked) -> list[Any]:
    """The latest turns of the same body from the same key: what an automatic retry repeats.

    As many as it says it has tried, and none that was followed up: that reply had arrived.
    """
    here = [] if asked.conversation_id is None else [Turn.conversation_id == asked.conversation_id]
    child = aliased(Turn)
    rows = connection.execute(
        select(Turn.id, exists().where(Sample.turn_id == Turn.id).label("judged"))
        .where(
            Turn.key_id == caller.key_id,
            Turn.request_sha256 == asked.sha256,
            Turn.created_at > now() - RETRY_SECONDS,
            Turn.deleted_at.is_(None),
            ~exists().where(child.parent_id == Turn.id),
            *here,
        )
        .order_by(Turn.created_at.desc())
        .limit(asked.retries * asked.request.n)
    )
    return list(rows)


def _choice(first: ChatCall, index: int) -> ChatCall:
    """Another choice of the same completion. A seed must not make all choices the same."""
    seed = None if first.sampling.seed is None else first.sampling.seed + index
    return replace(first, rid=new_id("chatcmpl"), sampling=replace(first.sampling, seed=seed))


def _exclusion_reason(caller: Caller, asked: Asked, sampling: Sampling, judged: str | None) -> str | None:
    """Why these turns must not be trained on, as far as the request alone tells."""
    if withholds(asked.request.metadata) or not caller.train:
        return NO_CONSENT
    if judged is not None:
        return f"its client asked again after {judged}, which was judged"
    return sampling_exclusion_reason(sampling)
