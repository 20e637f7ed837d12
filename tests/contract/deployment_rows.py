"""House: a whole deployment in this process that synchronous tests call, byte for byte, as a server would."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import orjson
import requests
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI
from requests.adapters import HTTPAdapter
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from urllib3 import HTTPResponse

from app.core.database import Database
from app.core.settings import Settings
from app.main import create_app
from app.models import Engine, EngineState, Policy, Turn, Version
from app.projects.bootstrap import bootstrap
from tests.support.scripted_engine import ScriptedEngine, serving
from tests.support.turns import finished

ANSWER_SECONDS = 120.0
ERROR_KEYS = {"message", "type", "param", "code"}
KNOWN = "chatcmpl-" + "0" * 32  # a finished turn that tests may name


HOME = {"name": "shop", "completion_id": KNOWN, "model": "shop"}


def homely(path: str) -> str:
    """A path's parameters, filled with what there is: "/v1/models/{name}" -> "/v1/models/shop"."""
    return re.sub(r"{(\w+)}", lambda found: HOME.get(found[1], "1"), path)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    content: bytes


@dataclass
class House:
    app: FastAPI
    key: str
    engine: ScriptedEngine
    _portal: BlockingPortal
    statuses: Counter[str] = field(default_factory=Counter)

    def ask(self, method: str, target: str, content: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        """With our key. No client stands between: hostile bytes arrive as they were written."""
        return self.pass_on(method, target, content, {"authorization": f"Bearer {self.key}", **(headers or {})})

    def pass_on(self, method: str, target: str, content: bytes, headers: dict[str, str]) -> Answer:
        answer = self._portal.call(self._ask, method, target, content, headers)
        self.statuses[f"{answer.status // 100}xx"] += 1
        return answer

    async def _ask(self, method: str, target: str, content: bytes, headers: dict[str, str]) -> Answer:
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote_to_bytes(path).decode("utf-8", "replace"),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(latin(name.lower()), latin(value)) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("attune", 80),
        }
        given, said = [{"type": "http.request", "body": content, "more_body": False}], []

        async def receive() -> Any:
            return given.pop() if given else await asyncio.Event().wait()  # the client stays on the line

        async def send(message: Any) -> None:
            said.append(message)

        async with asyncio.timeout(ANSWER_SECONDS):
            try:
                await self.app(scope, receive, send)
            except Exception:  # the server's last resort has answered 500 by now; a test judges that
                if not said:
                    raise
        heads = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in said[0].get("headers", [])]
        return Answer(said[0]["status"], heads, b"".join(message.get("body", b"") for message in said[1:]))


class Door(HTTPAdapter):
    """What `requests`, and so schemathesis, sends to any address goes to the house."""

    def __init__(self, house: House) -> None:
        super().__init__()
        self.house = house

    def send(self, request: requests.PreparedRequest, *args: Any, **kw: Any) -> requests.Response:
        address = urlsplit(request.url or "")
        target = address.path + (f"?{address.query}" if address.query else "")
        body = request.body or b""
        content = body.encode() if isinstance(body, str) else body
        headers = {as_text(name): as_text(value) for name, value in request.headers.items()}
        answer = self.house.pass_on(request.method or "GET", target, content, headers)
        raw = HTTPResponse(
            BytesIO(answer.content), dict(answer.headers), answer.status, version=11, preload_content=False
        )
        response = self.build_response(request, raw)
        response.elapsed = timedelta()
        return response


def latin(text: str) -> bytes:
    return text.encode("latin-1", "replace")


def as_text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


@contextmanager
def house(settings: Settings) -> Iterator[House]:
    engine = ScriptedEngine(remember=False)
    with serving(engine) as url, start_blocking_portal() as portal:
        app = create_app(settings)
        with portal.wrap_async_context_manager(app.router.lifespan_context(app)):
            key = portal.call(furnish, app.services.get(Database), settings, url)
            yield House(app, key, engine, portal)


async def furnish(db: Database, settings: Settings, engine_url: str) -> str:
    """A policy that serves, an engine behind it and one finished turn."""
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model)
        session.add(Engine(name="engine-0", url=engine_url, state=EngineState.READY, incarnation=1, loaded=[]))
    assert key is not None
    async with db.write() as session:
        session.add(await finished_turn(session))
    return key


async def finished_turn(session: AsyncSession) -> Turn:
    policy = (await session.scalars(select(Policy))).one()
    version = (await session.scalars(select(Version))).one()
    return finished(policy, version, KNOWN, num_prompt_tokens=3, finished_at=1.0)


def exclusion_reason(answer: bytes) -> str | None:
    """What keeps an error's body from being in OpenAI's shape, if anything does."""
    try:
        body = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return f"not JSON: {answer[:200]!r}"
    if not isinstance(body, dict) or set(body) != {"error"} or set(body["error"]) != ERROR_KEYS:
        return f"not the four keys: {answer[:200]!r}"
    error = body["error"]
    right = isinstance(error["message"], str) and isinstance(error["type"], str)
    right = right and all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    return None if right else f"not strings: {answer[:200]!r}"
