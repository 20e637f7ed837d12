"""`attune episodes`: the attempts of agents, and the chats of one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated
from urllib.parse import quote

import typer

from app.cli.client import Api, drop_unset
from app.cli.episode_replay import replay_episode
from app.cli.options import Json, Yes
from app.cli.output import Column, Renderable, Row, format_time, make_table, print_list, print_object

episodes = typer.Typer(no_args_is_help=True, help="Look at the episodes of agents: how they ended, and their chats.")
episodes.command("replay")(replay_episode)
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
    Column("chat", "tree", no_wrap=True),
    Column("step", "step", right=True),
    Column("follows", "follows"),
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
    """Show one episode with its chats as a tree: each branch as one block, indented below the one that it left."""
    api = Api()
    episode = api.get(f"/v1/episodes/{quote(id, safe='')}")
    turns = {turn["id"]: turn for turn in api.list_all("/v1/turns", episode_id=id)}
    nodes = [{**turns[node["id"]], **node} for node in episode["turns"] if node["id"] in turns]
    print_object({**episode, "turns": nodes}, json, _render)


@episodes.command("delete")
def delete_episode(id: Annotated[str, typer.Argument(help="ep-…")], yes: Yes = False, json: Json = False) -> None:
    """Erase the content of an episode and of all its chats. An open one ends as abandoned."""
    api, path = Api(), f"/v1/episodes/{quote(id, safe='')}"
    if not yes:
        typer.confirm(f"Erase {api.get(path)['num_turns']} chats permanently?", abort=True, err=True)
    deleted = api.delete(path)
    print_object(deleted, json, lambda row: f"deleted {row['id']} with all its chats")


def _render(row: Row) -> Iterator[Renderable]:
    state = row["state"] if row["end_reason"] is None else f"ended ({row['end_reason']}) {format_time(row['ended_at'])}"
    yield f"{row['id']} of {row['policy']}, created {format_time(row['created_at'])}: {state}"
    outcome = "no outcome" if row["outcome"] is None else f"outcome {row['outcome']:g}"
    yield f"task {row['task'] or '–'}, {outcome}, {row['num_turns']} chats with {row['num_tokens']} tokens"
    if row["group"] is not None:
        yield f"one of {row['group']['size']} attempts of the group {row['group']['id']}"
    if row["state"] == "open":
        yield f"it ends at {format_time(row['deadline_at'])} at the latest"
    yield make_table("chats", TURN_COLUMNS, _tree(row["turns"]))
    if row["has_more_turns"]:
        yield f"its first {len(row['turns'])} chats; GET /v1/turns?episode_id={row['id']} has all of them"


def _tree(nodes: Sequence[Row]) -> list[Row]:
    """Return the turns by branch, each branch below the one that it left, with what their columns show."""
    by_id = {node["id"]: node for node in nodes}
    branches: dict[int, list[Row]] = {}
    for node in nodes:
        branches.setdefault(node["branch"], []).append(node)
    below: dict[int, list[int]] = {}  # by branch; 0 has the roots
    for branch, turns in branches.items():
        parent = by_id.get(turns[0]["parent_turn_id"])
        below.setdefault(0 if parent is None else parent["branch"], []).append(branch)
    rows: list[Row] = []
    waiting = [(branch, 0) for branch in reversed(below.get(0, []))]
    while waiting:
        branch, depth = waiting.pop()
        rows += [
            {**node, "tree": "  " * depth + node["id"], "follows": _follows(node, by_id)} for node in branches[branch]
        ]
        waiting += [(other, depth + 1) for other in reversed(below.get(branch, []))]
    return rows


def _follows(node: Row, by_id: Mapping[str, Row]) -> str | None:
    """Example: "3", or "3 (compaction)"; None for a root."""
    parent = by_id.get(node["parent_turn_id"])
    if parent is None:
        return None
    return f"{parent['step']}" if node["edge"] == "exact" else f"{parent['step']} ({node['edge']})"
