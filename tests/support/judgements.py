"""A scripted judge or reward service on a real socket, and short ways to run the judge stage."""

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
from tests.support.scripted_engine import serve
from tests.support.settings import by_path
from workers.curate import curate
from workers.judging.judge import judge


@dataclass
class ScriptedEndpoint:
    """An HTTP endpoint that records its requests. `answer` returns the response to a request body."""

    answer: Callable[[dict[str, Any]], Any] = lambda body: {"reward": 1.0}
    status: int = 200
    hang: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    async def _handle(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.paths.append(request.url.path)
        if self.hang:
            await asyncio.Event().wait()
        answer = self.answer(body)
        if isinstance(answer, Response):
            return answer
        if isinstance(answer, bytes):
            return Response(answer, self.status, self.headers)
        return JSONResponse(answer, self.status, self.headers)

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve the endpoint and yield its URL."""
        app = Starlette(routes=[Route("/{path:path}", self._handle, methods=["POST", "GET"])])
        with serve(app) as url:
            yield url


def completion_response(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    """Return a judge's answer as a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 123}}


def grade_response(grade: int, reason: str = "it is polite") -> dict[str, Any]:
    """Return a judge's chat completion with this grade."""
    return completion_response(orjson.dumps({"reason": reason, "grade": grade}).decode())


def settings_with_sources(harness: Harness, *sources: dict[str, Any], **updates: Any) -> Settings:
    """Return the harness's settings with explicit feedback and these reward sources."""
    config = RewardsConfig.model_validate({"sources": [{"type": "explicit"}, *sources]})
    return harness.settings.replace(by_path({"rewards": config, **updates}))


async def run_judging(harness: Harness, settings: Settings, *, owner: str = "me") -> list[Judgement]:
    """Run the curate and judge stages once, and return all judgements."""
    await curate(harness.db, settings)
    await judge(harness.db, settings, owner)
    return await harness.all(Judgement)


async def make_judgements_due(harness: Harness) -> None:
    """End all back-offs and leases."""
    async with harness.db.write() as session:
        await session.execute(update(Judgement).values(due_at=0.0, lease_until=None))
