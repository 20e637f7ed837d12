"""A webhook receiver on a real socket, and short ways to create events and to send them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import update
from standardwebhooks import Webhook
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.core.settings import Settings
from app.models import WebhookDelivery, WebhookEndpoint
from app.ops import audit_chain, webhook_events
from tests.support.deployment import Harness
from tests.support.scripted_engine import serve
from tests.support.settings import change_in_place
from workers.webhooks import send_webhooks

Received = tuple[dict[str, str], bytes]  # headers and body


@dataclass
class Receiver:
    """Answers with the next of `statuses`, then with 200."""

    statuses: list[int] = field(default_factory=list)
    hang: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)

    async def _handle(self, request: Request) -> Response:
        self.received.append((dict(request.headers), await request.body()))
        if self.hang:
            await asyncio.Event().wait()
        return Response(b"x", self.statuses.pop(0) if self.statuses else 200, self.headers)

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve the receiver and yield its URL."""
        with serve(Starlette(routes=[Route("/{path:path}", self._handle, methods=["POST", "GET"])])) as url:
            yield f"{url}/hook"

    def events(self, secret: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the id and the content of each request, after the public library has verified its signature."""
        return [(headers["webhook-id"], Webhook(secret).verify(body, headers)) for headers, body in self.received]


def allow_private(harness: Harness, **updates: Any) -> Settings:
    """Return the settings with 127.0.0.1 as a private host, for the deliveries and for the API of the harness."""
    change_in_place(harness.settings, {"private_hosts": ["127.0.0.1"], **updates})  # the API holds this object
    return harness.settings


async def create_webhook(harness: Harness, url: str, **fields: Any) -> dict[str, Any]:
    answer = await harness.api.post("/v1/webhooks", json={"url": url, **fields})
    assert answer.status_code == 201, answer.text
    row: dict[str, Any] = answer.json()
    return row


async def pause_training(harness: Harness) -> None:
    """Create the event training.halted."""
    for verb in ("resume", "pause"):
        answer = await harness.api.post(f"/v1/policies/shop/training/{verb}", json={"reason": "a secret prompt"})
        assert answer.status_code == 200, answer.text


async def create_deliveries(harness: Harness) -> None:
    """Run the steps of the reconciler that turn audit entries into deliveries."""
    await audit_chain.seal_entries(harness.db)
    await webhook_events.create_deliveries(harness.db)


async def send(harness: Harness) -> int:
    return await send_webhooks(harness.db, harness.settings, "me")


async def make_due(harness: Harness) -> None:
    """Let the pauses of all open deliveries and of all endpoints end."""
    async with harness.db.write() as session:
        await session.execute(update(WebhookDelivery).where(WebhookDelivery.state == "open").values(due_at=0.0))
        await session.execute(update(WebhookEndpoint).values(retry_at=None))
