"""/v1/webhooks: the webhook endpoints of a project and their deliveries, for its admins."""

from typing import Annotated, Literal, get_args

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field, StrictBool, StringConstraints, field_validator

from app.core.encryption import load_cipher
from app.core.errors import ERROR_RESPONSES
from app.core.http import RowView, StrictModel, json_body, settings_of
from app.core.pagination import Page
from app.models import WebhookDelivery
from app.ops import webhooks
from app.projects.auth import AdminCaller, DatabaseDep
from app.projects.idempotency import SHOWS_SECRET, IdempotentRoute

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], route_class=IdempotentRoute, responses=ERROR_RESPONSES)
Id = Annotated[str, Path(min_length=1, max_length=255)]
Url = Annotated[str, StringConstraints(min_length=1, max_length=2048, pattern=r"^[!-~]+$")]
Description = Annotated[str, StringConstraints(max_length=255)]
State = Literal["open", "done", "skipped", "failed"]
Event = Literal[
    "batch.quarantined",
    "canary.began",
    "canary.ended",
    "deployment.deployed",
    "deployment.rolled_back",
    "subject.erased",
    "training.halted",
    "version.rejected",
]
Events = Annotated[list[Event], Field(min_length=1, max_length=len(get_args(Event)))]


class EventsRequest(StrictModel):
    """A request that names events."""

    @field_validator("events", check_fields=False)
    @classmethod
    def remove_duplicates(cls, events: list[str]) -> list[str]:
        return sorted(set(events))


class WebhookRequest(EventsRequest):
    url: Url = Field(description="an https URL; http only for hosts in ATTUNE_SERVER__PRIVATE_HOSTS")
    events: Events = Field(list(get_args(Event)), description="audit actions; all of these when left out")
    description: Description | None = None


class WebhookChange(EventsRequest):
    """Fields that are left out stay as they are."""

    url: Url = Field("", description="as when it is created")
    events: Events = Field([], description="audit actions")
    description: Description | None = None
    enabled: StrictBool = Field(True, description="true sends the events from now on")


class WebhookView(RowView):
    object: Literal["webhook"] = "webhook"
    id: str
    url: str
    description: str | None
    events: list[str]
    created_at: float
    failing_since: float | None = Field(description="since when every attempt has failed")
    retry_at: float | None = Field(description="nothing is sent before, because attempts failed")
    previous_secret_until: float | None = Field(description="until when the secret before the last rotation signs too")
    disabled_at: float | None
    disabled_reason: str | None


class NewWebhookView(WebhookView):
    secret: str = Field(description="verifies the signatures; it cannot be read again")


class WebhookList(BaseModel):
    object: Literal["list"] = "list"
    data: list[WebhookView] = Field(description="all of them, the oldest first")


class DeliveryView(RowView):
    object: Literal["webhook.delivery"] = "webhook.delivery"
    id: str = Field(description="the webhook-id of every attempt")
    event: str
    number: int = Field(description="of the audit entry")
    state: State
    attempts: int
    status_code: int | None = Field(description="of the last answer")
    reason: str | None = Field(description="why the last attempt failed")
    due_at: float
    created_at: float
    settled_at: float | None


class DeliveryList(Page[DeliveryView]):
    pass


def _view(row: WebhookDelivery) -> DeliveryView:
    return DeliveryView.from_row(row, number=row.audit_seq, attempts=row.attempt)


@router.post("", status_code=201, dependencies=[SHOWS_SECRET])
async def create_webhook(
    request: Request, caller: AdminCaller, db: DatabaseDep, body: Annotated[WebhookRequest, json_body(WebhookRequest)]
) -> NewWebhookView:
    """Create an endpoint. It receives the events from now on."""
    webhooks.check_url(body.url, settings_of(request).server.private_hosts)
    cipher = load_cipher(settings_of(request))
    async with db.write() as session:
        row, secret = await webhooks.create_endpoint(
            session, caller.project_id, actor=caller.key_prefix, cipher=cipher, **body.model_dump()
        )
    return NewWebhookView.from_row(row, secret=secret)


@router.get("")
async def list_webhooks(caller: AdminCaller, db: DatabaseDep) -> WebhookList:
    async with db.read() as session:
        rows = await webhooks.list_endpoints(session, caller.project_id)
    return WebhookList(data=[WebhookView.from_row(row) for row in rows])


@router.get("/{webhook_id}")
async def get_webhook(webhook_id: Id, caller: AdminCaller, db: DatabaseDep) -> WebhookView:
    async with db.read() as session:
        return WebhookView.from_row(await webhooks.get_endpoint(session, caller.project_id, webhook_id))


@router.patch("/{webhook_id}")
async def change_webhook(
    request: Request,
    webhook_id: Id,
    caller: AdminCaller,
    db: DatabaseDep,
    body: Annotated[WebhookChange, json_body(WebhookChange)],
) -> WebhookView:
    changes = body.model_dump(exclude_unset=True)
    if "url" in changes:
        webhooks.check_url(body.url, settings_of(request).server.private_hosts)
    async with db.write() as session:
        row = await webhooks.change_endpoint(session, caller.project_id, webhook_id, actor=caller.key_prefix, **changes)
    return WebhookView.from_row(row)


@router.delete("/{webhook_id}")
async def delete_webhook(webhook_id: Id, caller: AdminCaller, db: DatabaseDep) -> WebhookView:
    """Delete an endpoint with its deliveries."""
    async with db.write() as session:
        row = await webhooks.delete_endpoint(session, caller.project_id, webhook_id, actor=caller.key_prefix)
    return WebhookView.from_row(row)


@router.post("/{webhook_id}/rotate-secret", dependencies=[SHOWS_SECRET])
async def rotate_webhook_secret(
    request: Request, webhook_id: Id, caller: AdminCaller, db: DatabaseDep
) -> NewWebhookView:
    """Create a new secret. For a day deliveries carry a signature of the old one, too."""
    cipher = load_cipher(settings_of(request))
    async with db.write() as session:
        row, secret = await webhooks.rotate_secret(
            session, caller.project_id, webhook_id, actor=caller.key_prefix, cipher=cipher
        )
    return NewWebhookView.from_row(row, secret=secret)


@router.get("/{webhook_id}/deliveries")
async def list_deliveries(
    webhook_id: Id,
    caller: AdminCaller,
    db: DatabaseDep,
    state: State | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1, max_length=255)] = None,
) -> DeliveryList:
    """The newest first. Settled deliveries can be listed for 30 days."""
    async with db.read() as session:
        endpoint = await webhooks.get_endpoint(session, caller.project_id, webhook_id)
        rows = await webhooks.list_deliveries(session, endpoint.id, state, after, limit)
    return DeliveryList.from_rows([_view(row) for row in rows], limit)


@router.post("/{webhook_id}/deliveries/{delivery_id}/redeliver")
async def redeliver(webhook_id: Id, delivery_id: Id, caller: AdminCaller, db: DatabaseDep) -> DeliveryView:
    """Send a delivery again, with the same id and body."""
    async with db.write() as session:
        row = await webhooks.redeliver(session, caller.project_id, webhook_id, delivery_id, actor=caller.key_prefix)
    return _view(row)
