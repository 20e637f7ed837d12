"""`attune retention`: how long data is kept. `attune versions prune`: delete the files of old versions."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer

from app.cli.client import Api, drop_unset
from app.cli.options import Json, PolicyName, policy_path
from app.cli.output import Column, Renderable, Row, make_table, print_list, print_object

retention = typer.Typer(no_args_is_help=True, help="How long turns, feedback, the audit log and files are kept.")
DAYS = ("turns", "feedback", "audit", "datasets")
EXPIRED_COLUMNS = (
    Column("kind", "kind"),
    Column("rows", "rows", "{:,}", right=True),
    Column("MB", lambda row: row["bytes"] / 1e6, "{:,.1f}", right=True),
)
Days = Annotated[float | None, typer.Option(help="days; 0: for ever")]
Count = Annotated[int | None, typer.Option(help="the newest versions of each policy; 0: all")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="only show what would be removed")]


@retention.command("show")
def show(json: Json = False) -> None:
    """Show how long each kind of data is kept, and which values are the project's own."""
    print_object(Api().get("/v1/retention"), json, _render)


@retention.command("set")
def set_values(
    turns: Days = None,
    feedback: Days = None,
    audit: Days = None,
    datasets: Days = None,
    versions: Count = None,
    optimizer_states: Count = None,
    reset: Annotated[bool, typer.Option(help="forget the project's own values first")] = False,
    json: Json = False,
) -> None:
    """Set the project's own values; the others stay as they are."""
    api = Api()
    own = {} if reset else api.get("/v1/retention")["own"]
    values = {"turns": turns, "feedback": feedback, "audit": audit, "datasets": datasets}
    own |= drop_unset(**values, versions=versions, optimizer_states=optimizer_states)
    print_object(api.put("/v1/retention", own), json, _render)


@retention.command("run")
def run(dry_run: DryRun = False, json: Json = False) -> None:
    """Remove the expired rows now, in steps. Without this the reconciler removes them, a step at a time."""
    api = Api()
    if dry_run:
        print_list("expired", EXPIRED_COLUMNS, api.get("/v1/retention/preview")["data"], json)
        return
    total: Counter[str] = Counter()
    while any((removed := api.post("/v1/retention/run", {})["removed"]).values()):
        total.update(removed)
        if not json:
            typer.echo(", ".join(f"{count:,} {kind}" for kind, count in total.items()))
        time.sleep(0.05)  # chats come between two steps
    print_object({"removed": dict(total)}, json, lambda _: f"{total.total():,} rows removed")


def prune(
    keep: Annotated[int, typer.Option(min=1, help="the newest versions whose files stay")],
    dry_run: DryRun = False,
    policy: PolicyName = None,
    json: Json = False,
) -> None:
    """Delete the files of old versions that nothing needs. They stay in the list and cannot be deployed any more."""
    body = {"keep": keep, "dry_run": dry_run}
    print_object(Api().post(policy_path(policy, "/versions/prune"), body), json, _render_pruned)


def _render_pruned(body: Row) -> str:
    verb = "would be deleted" if body["dry_run"] else "are deleted"
    names = f": {', '.join(body['versions'])}" if body["versions"] else ""
    more = "; repeat the command for more" if body["has_more"] else ""
    return f"the files of {len(body['versions'])} versions {verb}, {body['bytes'] / 1e6:,.1f} MB{names}{more}"


def _render(body: Row) -> Iterator[Renderable]:
    rows: list[Row] = [
        {"name": name, "value": _describe(name, value), "own": "own" if name in body["own"] else "default"}
        for name, value in body["effective"].items()
    ]
    yield make_table("retention", (Column("data", "name"), Column("kept", "value"), Column("", "own")), rows)


def _describe(name: str, value: float | None) -> str:
    if value is None:
        return "for ever"
    return f"{value:g} days" if name in DAYS else f"the newest {value} of each policy"
