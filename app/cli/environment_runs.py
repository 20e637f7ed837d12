"""`attune environments runs` and `show`: how far the runs of environments are."""

from collections.abc import Iterator, Mapping
from typing import Annotated
from urllib.parse import quote

import typer

from app.cli.client import Api
from app.cli.options import Json
from app.cli.output import Column, Row, format_time, print_list, print_object

RUNS = "/v1/environments/runs"
LIST_COLUMNS = (
    Column("run", "name", no_wrap=True),
    Column("policy", "policy"),
    Column("environment", lambda row: row["metadata"].get("environment")),
    Column("tasks", "num_tasks", right=True),
    Column("group", "group_size", right=True),
    Column("waiting", lambda row: row["attempts"]["waiting"], right=True),
    Column("under way", lambda row: row["attempts"]["under_way"], right=True),
    Column("done", lambda row: row["attempts"]["done"], right=True),
    Column("lost", lambda row: row["attempts"]["lost"], right=True),
    Column("cancelled", lambda row: row["attempts"]["cancelled"], right=True),
    Column("mean outcome", "mean_outcome", "{:.3f}", right=True),
    Column("created", lambda row: format_time(row["created_at"])),
)


def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=100, help="how many, the newest first")] = 20, json: Json = False
) -> None:
    """List the newest runs, with their attempts by state."""
    print_list("runs", LIST_COLUMNS, Api().get(RUNS, limit=limit, order="desc")["data"], json)


def show_run(run: Annotated[str, typer.Argument(help="its name")], json: Json = False) -> None:
    """Show one run: its plan, and its attempts by state."""
    print_object(Api().get(f"{RUNS}/{quote(run, safe='')}"), json, _render)


def describe_counts(attempts: Mapping[str, int]) -> str:
    """Example: "3 waiting, 2 under way, 11 done, 0 lost, 0 cancelled" """
    return ", ".join(f"{number} {state.replace('_', ' ')}" for state, number in attempts.items())


def _render(row: Row) -> Iterator[str]:
    state = "complete" if row["is_complete"] else "not complete"
    yield f"run {row['name']} of {row['policy']}, created {format_time(row['created_at'])}: {state}"
    yield f"attempts: {describe_counts(row['attempts'])}"
    yield f"{row['num_tasks']} tasks, each {row['group_size']} times; split {row['split']!r}, seed {row['seed']}"
    if row["mean_outcome"] is not None:
        yield f"mean outcome {row['mean_outcome']:.3f}"
    if row["ends"]:
        yield "ends: " + ", ".join(f"{reason} {number}" for reason, number in row["ends"].items())
    limits = [f"{name} {value:g}" for name, value in row["limits"].items() if value is not None]
    yield f"version {row['version']}; limits of an attempt: {', '.join(limits)}"
    yield from (f"{name}: {value}" for name, value in row["metadata"].items())
