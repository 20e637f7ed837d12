"""Somebody to ask: a service and a judge on a real socket, with a script; and short ways to put questions."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import update
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from alignment.config.rewards import RewardsConfig
from app.core.settings import Settings
from app.models import Judgement
from tests.support.deployment import Harness
from tests.support.scripted_engine import serving
from workers.feedback.curate import curate
from workers.judging.judge import judge


@dataclass
class Oracle:
    """`answer` makes an answer of each body it gets."""

    answer: Callable[[dict[str, Any]], Any] = lambda body: {"reward": 1.0}
    status: int = 200
    hang: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    heard: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    async def _ask(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.heard.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.paths.append(request.url.path)
        if self.hang:
            await asyncio.Event().wait()
        told = self.answer(body)
        if isinstance(told, Response):
            return told
        if isinstance(told, bytes):
            return Response(told, self.status, self.headers)
        return JSONResponse(told, self.status, self.headers)

    @contextmanager
    def at(self) -> Iterator[str]:
        app = Starlette(routes=[Route("/{path:path}", self._ask, methods=["POST", "GET"])])
        with serving(app) as url:
            yield url


def completion(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    """A judge's answer on OpenAI's wire."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 123}}


def graded(grade: int, reason: str = "so it is") -> dict[str, Any]:
    return completion(orjson.dumps({"reason": reason, "grade": grade}).decode())


def listening(harness: Harness, *sources: dict[str, Any], **more: Any) -> Settings:
    """The ring's settings, with these sources of rewards."""
    config = RewardsConfig.model_validate({"sources": [{"type": "explicit"}, *sources]})
    return harness.settings.model_copy(update={"rewards": config, **more})


async def judged(harness: Harness, settings: Settings, *, owner: str = "me") -> list[Judgement]:
    """What becomes of the questions about all turns that have ended."""
    await curate(harness.db, settings)
    await judge(harness.db, settings, owner)
    return await harness.all(Judgement)


async def due(harness: Harness) -> None:
    """The pauses are over, and so are the leases of the dead."""
    async with harness.db.write() as session:
        await session.execute(update(Judgement).values(due_at=0.0, lease_until=None))
