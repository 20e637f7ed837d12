"""ContractHarness: a deployment in this process that synchronous tests call with raw bytes, as a server would."""

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
import pytest
import requests
from anyio.from_thread import BlockingPortal, start_blocking_portal
from requests.adapters import HTTPAdapter
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession
from urllib3 import HTTPResponse

from app.core.database import Database
from app.core.settings import Settings
from app.main import Api, create_app
from app.models import ApiKey, Engine, EngineState, Policy, Project, Turn, Version
from app.projects.auth import ApiKeyCache
from app.projects.service import bootstrap, digest_key
from tests.support.scripted_engine import ScriptedEngine, serve
from tests.support.turns import make_turn

ANSWER_SECONDS = 120.0
BASE_URL = "http://attune"
ERROR_KEYS = {"message", "type", "param", "code"}
COMPLETION_ID = "chatcmpl-" + "0" * 32  # a finished turn that tests may name


UNLIMITED: dict[str, Any] = {  # rate limits are not under test
    "requests_per_minute": 10**9,
    "max_concurrency": 10**6,
    "unknown_keys_per_minute": 10**9,
    "max_admin_concurrency": 10**6,
    "max_long_requests": 10**6,
    "project": {"admin_requests_per_minute": 10**9},
}
CHANGES_OF_ACCESS = (("PATCH", ["project"]), ("DELETE", ["keys"]))
KNOWN_NAMES = {"name": "shop", "completion_id": COMPLETION_ID, "model": "shop"}


def fill_path(path: str) -> str:
    """Fill a path's parameters with existing names. Example: "/v1/models/{name}" -> "/v1/models/shop"."""
    return re.sub(r"{(\w+)}", lambda match: KNOWN_NAMES.get(match[1], "1"), path)


@dataclass(frozen=True)
class RawResponse:
    status: int
    headers: list[tuple[str, str]]
    content: bytes


@dataclass
class ContractHarness:
    app: Api
    key: str
    engine: ScriptedEngine
    _portal: BlockingPortal
    statuses: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)  # "POST /v1/feedback 2xx"

    def request(
        self, method: str, target: str, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> RawResponse:
        """Send a request with the harness's key. No client is in between, so any bytes arrive unchanged."""
        return self.send(method, target, content, {"authorization": f"Bearer {self.key}", **(headers or {})})

    def send(self, method: str, target: str, content: bytes, headers: dict[str, str]) -> RawResponse:
        answer = self._portal.call(self._send, method, target, content, headers)
        self.statuses[f"{answer.status // 100}xx"] += 1
        if answer.status < 300 and (method, target.split("/")[2:3]) in CHANGES_OF_ACCESS:
            self._portal.call(self._restore_access)
        return answer

    async def _restore_access(self) -> None:
        """Undo what would refuse all later cases: limits that only an operator can raise, and the harness's key."""
        async with self.app.services.get(Database).write() as session:
            await session.execute(update(Project).values(limits=None))
            own_key = ApiKey.sha256 == digest_key(self.key)
            await session.execute(update(ApiKey).where(own_key).values(revoked_at=None, expires_at=None))
        self.app.services.get(ApiKeyCache).forget()

    async def _send(self, method: str, target: str, content: bytes, headers: dict[str, str]) -> RawResponse:
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
            "headers": [(encode_latin(name.lower()), encode_latin(value)) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("attune", 80),
        }
        pending, sent = [{"type": "http.request", "body": content, "more_body": False}], []

        async def receive() -> Any:
            return pending.pop() if pending else await asyncio.Event().wait()  # the client stays connected

        async def send(message: Any) -> None:
            sent.append(message)

        async with asyncio.timeout(ANSWER_SECONDS):
            try:
                await self.app(scope, receive, send)
            except Exception:  # the server's last handler has sent a 500 response, which the test checks
                if not sent:
                    raise
        route = getattr(scope.get("route"), "path", "no route")
        self.routes[f"{method if route != 'no route' else ''} {route} {sent[0]['status'] // 100}xx".strip()] += 1
        heads = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent[0].get("headers", [])]
        return RawResponse(sent[0]["status"], heads, b"".join(message.get("body", b"") for message in sent[1:]))


class HarnessAdapter(HTTPAdapter):
    """Sends every request of `requests`, which schemathesis uses, to the harness."""

    def __init__(self, contract_harness: ContractHarness) -> None:
        super().__init__()
        self.contract_harness = contract_harness

    def send(self, request: requests.PreparedRequest, *args: Any, **kw: Any) -> requests.Response:
        address = urlsplit(request.url or "")
        target = address.path + (f"?{address.query}" if address.query else "")
        body = request.body or b""
        content = body.encode() if isinstance(body, str) else body
        assert isinstance(content, bytes), "the harness takes no streamed bodies"
        headers = {as_text(name): as_text(value) for name, value in request.headers.items()}
        answer = self.contract_harness.send(request.method or "GET", target, content, headers)
        raw = HTTPResponse(
            BytesIO(answer.content), dict(answer.headers), answer.status, version=11, preload_content=False
        )
        response = self.build_response(request, raw)
        response.elapsed = timedelta()
        return response


@contextmanager
def requests_sent_to(contract_harness: ContractHarness) -> Iterator[None]:
    """Send every request of `requests` to the harness, those of schemathesis's own sessions too."""
    adapter = HarnessAdapter(contract_harness)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests.Session, "get_adapter", lambda session, url: adapter)
        yield


def encode_latin(text: str) -> bytes:
    return text.encode("latin-1", "replace")


def as_text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


@contextmanager
def contract_harness(settings: Settings) -> Iterator[ContractHarness]:
    engine = ScriptedEngine(record_requests=False)
    with serve(engine) as url, start_blocking_portal() as portal:
        app = create_app(settings)
        with portal.wrap_async_context_manager(app.router.lifespan_context(app)):
            key = portal.call(create_deployment, app.services.get(Database), settings, url)
            yield ContractHarness(app, key, engine, portal)


async def create_deployment(db: Database, settings: Settings, engine_url: str) -> str:
    """Create a policy, an engine and a finished turn. Returns the API key."""
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
    return make_turn(policy, version, COMPLETION_ID, num_prompt_tokens=3, finished_at=1.0)


def find_body_error(answer: bytes, path: str) -> str | None:
    """Return why a body is not an error of OpenAI's form, or on its routes of Anthropic's; None if it is."""
    try:
        body = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return f"not JSON: {answer[:200]!r}"
    if path.startswith("/v1/messages"):
        is_valid = isinstance(body, dict) and set(body) == {"type", "error", "request_id"}
        is_valid = is_valid and set(body["error"]) == {"type", "message"}
        return None if is_valid else f"not Anthropic's form: {answer[:200]!r}"
    if not isinstance(body, dict) or set(body) != {"error"} or set(body["error"]) != ERROR_KEYS:
        return f"not the four keys: {answer[:200]!r}"
    error = body["error"]
    is_valid = isinstance(error["message"], str) and isinstance(error["type"], str)
    is_valid = is_valid and all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    return None if is_valid else f"not strings: {answer[:200]!r}"
