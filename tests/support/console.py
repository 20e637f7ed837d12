"""A browser without JavaScript that is signed in to the console of a harness."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from app.models import ApiKey
from app.projects import service
from tests.support.deployment import Harness

ORIGIN = "http://127.0.0.1:8700"
CSRF = re.compile(r'name="csrf" value="([^"]+)"')
TAG = re.compile(r"<[^>]+>")


@dataclass
class ConsoleClient:
    """Sends requests as a browser does: with its cookies, and with Origin on each form."""

    http: httpx2.AsyncClient

    async def get(self, path: str = "", **options: Any) -> httpx2.Response:
        return await self.http.get(f"/console/{path}", **options)

    async def text(self, path: str = "") -> str:
        """Return what a page says, without its elements. The status must be 200."""
        answer = await self.get(path)
        assert answer.status_code == 200, answer.text
        return to_text(answer.text)

    async def csrf(self) -> str:
        found = CSRF.search((await self.get()).text) or CSRF.search((await self.get("annotate")).text)
        assert found is not None, "nobody is signed in"
        return found[1]

    async def post(self, path: str, fields: dict[str, Any] | None = None, **options: Any) -> httpx2.Response:
        """Send a form of this session."""
        form = {"csrf": await self.csrf(), **(fields or {})}
        return await self.send(path, form, **options)

    async def send(self, path: str, form: dict[str, Any], origin: str | None = ORIGIN) -> httpx2.Response:
        """Send a form as it is. The answer to a good one is a redirect, which is not followed."""
        headers = {} if origin is None else {"origin": origin}
        return await self.http.post(f"/console/{path}", data=form, headers=headers)

    async def sign_in(self, key: str) -> httpx2.Response:
        return await self.send("sign-in", {"key": key})


def to_text(page: str) -> str:
    return " ".join(html.unescape(TAG.sub(" ", page)).split())


def open_console(harness: Harness, base_url: str = ORIGIN) -> ConsoleClient:
    """Return a client that is not signed in."""
    transport = harness.api._transport
    return ConsoleClient(httpx2.AsyncClient(transport=transport, base_url=base_url))


async def create_key(harness: Harness, scopes: Sequence[str], **values: Any) -> tuple[ApiKey, str]:
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        return await service.create_key(session, project_id, scopes, **values)


async def sign_in(harness: Harness, *scopes: str) -> ConsoleClient:
    """Return a client that is signed in with a new key of these scopes; `admin` by default."""
    _, key = await create_key(harness, scopes or ("admin",))
    client = open_console(harness)
    answer = await client.sign_in(key)
    assert answer.status_code == 303, answer.text
    return client
