"""`attune episodes`: the attempts of agents, and the chats of one."""

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import quote

import typer

from app.cli.client import Api, drop_unset
from app.cli.options import Json
from app.cli.output import Column, Renderable, Row, format_time, make_table, print_list, print_object

episodes = typer.Typer(no_args_is_help=True, help="Look at the episodes of agents: how they ended, and their chats.")
LIST_COLUMNS = (
    Column("id", "id", no_wrap=True),
    Column("task", "task"),
    Column("group", lambda row: row["group"] and row["group"]["id"]),
    Column("state", lambda row: row["end_reason"] or row["state"]),
    Column("outcome", "outcome", "{:g}", right=True),
    Column("chats", "num_turns", right=True),
    Column("tokens", "num_tokens", right=True),
    Column("start version", "start_version"),
    Column("created", lambda row: format_time(row["created_at"])),
)
TURN_COLUMNS = (
    Column("chat", "id", no_wrap=True),
    Column("agent", "agent"),
    Column("version", "version"),
    Column("state", "state"),
    Column("tokens", "num_output_tokens", right=True),
    Column("sample", "sample_state"),
    Column("reply", "reply"),
)


@episodes.command("list")
def list_episodes(
    policy: Annotated[str | None, typer.Option(help="of this policy; default: all")] = None,
    task: Annotated[str | None, typer.Option(help="of this task; default: all")] = None,
    group: Annotated[str | None, typer.Option(help="of this group of attempts; default: all")] = None,
    state: Annotated[str | None, typer.Option(help="open or ended; default: both")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="how many, the newest first")] = 20,
    json: Json = False,
) -> None:
    """List the newest episodes."""
    filters = drop_unset(policy=policy, task=task, group=group, state=state)
    rows = Api().get("/v1/episodes", limit=limit, order="desc", **filters)["data"]
    print_list("episodes", LIST_COLUMNS, rows, json)


@episodes.command("show")
def show_episode(id: Annotated[str, typer.Argument(help="ep-…")], json: Json = False) -> None:
    """Show one episode with its chats, the oldest first."""
    api = Api()
    episode = api.get(f"/v1/episodes/{quote(id, safe='')}")
    turns = api.list_all("/v1/turns", episode_id=id)[::-1]
    print_object({**episode, "turns": turns}, json, _render)


def _render(row: Row) -> Iterator[Renderable]:
    state = row["state"] if row["end_reason"] is None else f"ended ({row['end_reason']}) {format_time(row['ended_at'])}"
    yield f"{row['id']} of {row['policy']}, created {format_time(row['created_at'])}: {state}"
    outcome = "no outcome" if row["outcome"] is None else f"outcome {row['outcome']:g}"
    yield f"task {row['task'] or '–'}, {outcome}, {row['num_turns']} chats with {row['num_tokens']} tokens"
    if row["group"] is not None:
        yield f"one of {row['group']['size']} attempts of the group {row['group']['id']}"
    if row["state"] == "open":
        yield f"it ends at {format_time(row['deadline_at'])} at the latest"
    yield make_table("chats", TURN_COLUMNS, row["turns"])
