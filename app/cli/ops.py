"""`attune status` and `attune audit`: the state of the deployment, and who changed it."""

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.text import Text

from app.cli import output
from app.cli.client import Api
from app.cli.options import Json, drop_unset
from app.cli.output import Renderable
from app.core.settings import get_settings

Exact = Annotated[str | None, typer.Option(help="only entries with exactly this value")]


def status(json: Json = False) -> None:
    """Show what serves, what is being trained, and what is queued."""
    output.print_object(Api(get_settings()).get("/v1/status"), json, _render_status)


def audit(
    action: Exact = None,
    subject: Exact = None,
    actor: Exact = None,
    since: Annotated[float | None, typer.Option(help="from this time on (Unix seconds)")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="the maximum number of entries, the newest")] = 20,
    json: Json = False,
) -> None:
    """Show who changed what, when and why."""
    params = drop_unset(action=action, subject=subject, actor=actor, since=since, limit=limit)
    rows = Api(get_settings()).get("/v1/audit", **params)["data"]
    output.print_object(rows, json, lambda rows: (_format_event(row, "%Y-%m-%d %H:%M:%S") for row in rows))


def _render_status(body: dict[str, Any]) -> Iterator[Renderable]:
    for policy in body["policies"]:
        line = f" serves {policy['serving']}, trains from {policy['head']}, {policy['mode']}"
        yield Text.assemble((policy["name"], "bold"), line)
        if policy["canary"]:
            yield f"  canary: {policy['canary']} for {policy['canary_share']:.1%} of the conversations"
        if policy["shadow"]:
            yield f"  runs in shadow: {policy['shadow']} (attune shadow show)"
        if policy["mode_reason"]:
            yield f"  since {output.format_time(policy['mode_since'], '%H:%M:%S')}: {policy['mode_reason']}"
    for engine in body["engines"]:
        heartbeat = engine["heartbeat_at"]
        age = f", last heartbeat {time.time() - heartbeat:.0f} s ago" if heartbeat else ""
        yield f"engine {engine['name']}: {engine['state']}, {len(engine['loaded'])} adapters{age}"
        if engine["reason"]:
            yield f"  {engine['reason']}"
    for name in ("turns", "rollouts", "feedback", "samples", "batches"):
        counts = ", ".join(f"{count} {state}" for state, count in body[name].items()) or "none"
        yield f"{name}: {counts}"
    for row in body["reward_models"]:
        reason = f": {row['reason']}" if row["reason"] else ""
        newest = "" if row["serving"] == row["newest"] else f"; {row['newest']} is {row['state']}{reason}"
        yield f"reward model: {row['serving'] or 'none serves'}{newest}"
    for reason, count in body["not_learned_from"].items():
        yield f"  excluded from training: {count} × {reason}"
    for event in body["events"]:
        yield f"  {_format_event(event, '%H:%M:%S')}"


def _format_event(row: dict[str, Any], time_format: str) -> str:
    created_at = output.format_time(row["created_at"], time_format)
    return f"{created_at}  {row['actor']}: {row['action']} {row['subject']} {row['reason'] or ''}".rstrip()
