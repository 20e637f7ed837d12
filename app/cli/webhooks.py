"""`attune webhooks`: where events of your project are sent, and what became of each delivery."""

from typing import Annotated

import typer

from app.cli.client import Api, drop_unset
from app.cli.options import Json
from app.cli.output import Column, Row, format_time, print_list, print_object

webhooks = typer.Typer(no_args_is_help=True, help="Send events to URLs of yours. Your key needs the scope admin.")
WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="whk-…, as `attune webhooks list` shows it")]
Event = Annotated[list[str] | None, typer.Option("--event", help="an event, such as deployment.deployed; repeatable")]
Url = Annotated[str | None, typer.Option(help="the new URL")]
Description = Annotated[str | None, typer.Option(help="a note of your own")]


@webhooks.command("create")
def create_webhook(
    url: Annotated[str, typer.Argument(help="an https URL")],
    event: Event = None,
    description: Description = None,
    json: Json = False,
) -> None:
    """Create an endpoint, for all events unless some are named. The secret is shown this once."""
    row = Api().post("/v1/webhooks", drop_unset(url=url, events=event or None, description=description))
    print_object(row, json, lambda row: [f"{row['id']}: {', '.join(row['events'])}", f"secret: {row['secret']}"])


@webhooks.command("list")
def list_webhooks(json: Json = False) -> None:
    """List the endpoints of your project."""
    print_list("webhooks", WEBHOOK_COLUMNS, Api().get("/v1/webhooks")["data"], json)


@webhooks.command("update")
def update_webhook(
    id: WebhookId, url: Url = None, event: Event = None, description: Description = None, json: Json = False
) -> None:
    """Change the URL, the events or the description."""
    _change(id, json, url=url, events=event or None, description=description)


@webhooks.command("enable")
def enable_webhook(id: WebhookId, json: Json = False) -> None:
    """Send events to this endpoint again, from now on."""
    _change(id, json, enabled=True)


@webhooks.command("disable")
def disable_webhook(id: WebhookId, json: Json = False) -> None:
    """Send nothing to this endpoint until it is enabled."""
    _change(id, json, enabled=False)


@webhooks.command("rotate-secret")
def rotate_secret(id: WebhookId, json: Json = False) -> None:
    """Create a new secret. For a day deliveries are signed with the old one, too."""
    row = Api().post(f"/v1/webhooks/{id}/rotate-secret", {})
    print_object(row, json, lambda row: f"secret (shown this once): {row['secret']}")


@webhooks.command("delete")
def delete_webhook(id: WebhookId, json: Json = False) -> None:
    """Delete an endpoint with its deliveries."""
    print_object(Api().delete(f"/v1/webhooks/{id}"), json, lambda row: f"{row['id']} is deleted")


@webhooks.command("deliveries")
def list_deliveries(
    id: WebhookId,
    state: Annotated[str | None, typer.Option(help="open, done, skipped or failed; default: all")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="the maximum number, the newest")] = 20,
    json: Json = False,
) -> None:
    """List what was sent to an endpoint, the newest first."""
    rows = Api().get(f"/v1/webhooks/{id}/deliveries", state=state, limit=limit)["data"]
    print_list("deliveries", DELIVERY_COLUMNS, rows, json)


@webhooks.command("redeliver")
def redeliver(
    id: WebhookId,
    delivery: Annotated[str, typer.Argument(help="msg-…, as `attune webhooks deliveries` shows it")],
    json: Json = False,
) -> None:
    """Send a delivery again, with the same id and body."""
    row = Api().post(f"/v1/webhooks/{id}/deliveries/{delivery}/redeliver", {})
    print_object(row, json, lambda row: f"{row['id']} ({row['event']}) is sent again")


def _change(id: str, json: bool, **changes: object) -> None:
    row = Api().patch(f"/v1/webhooks/{id}", drop_unset(**changes))
    print_object(row, json, lambda row: f"{row['id']}: {row['url']}, {_state(row)}")


def _state(row: Row) -> str:
    if row["disabled_at"] is not None:
        return f"disabled: {row['disabled_reason']}"
    return "enabled" if row["failing_since"] is None else f"failing since {format_time(row['failing_since'])}"


WEBHOOK_COLUMNS = (
    Column("id", "id", no_wrap=True),
    Column("url", "url"),
    Column("events", lambda row: ", ".join(row["events"])),
    Column("state", _state),
    Column("description", lambda row: row["description"] or None),
)
DELIVERY_COLUMNS = (
    Column("id", "id", no_wrap=True),
    Column("event", "event"),
    Column("entry", "number", right=True),
    Column("state", "state"),
    Column("attempts", "attempts", right=True),
    Column("status", "status_code", right=True),
    Column("due", lambda row: format_time(row["due_at"]) if row["state"] == "open" else None),
    Column("reason", lambda row: row["reason"] or None),
)
