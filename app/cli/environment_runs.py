"""`attune environments runs`, `show`, `attempts` and `cancel`: how far the runs of environments are, and their end."""

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

ATTEMPT_COLUMNS = (
    Column("attempt", "id", no_wrap=True),
    Column("task", "task_index", right=True),
    Column("name of the task", lambda row: (row["episode"] or {}).get("task")),
    Column("state", lambda row: "under way" if row["is_under_way"] else row["state"]),
    Column("reason", "reason"),
    Column("lost tries", lambda row: row["num_failed"] + row["num_expired"], right=True),
    Column("episode", lambda row: (row["episode"] or {}).get("id"), no_wrap=True),
    Column("end", lambda row: (row["episode"] or {}).get("end_reason")),
    Column("outcome", lambda row: (row["episode"] or {}).get("outcome"), "{:.3f}", right=True),
)
RunName = Annotated[str, typer.Argument(help="its name")]


def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=100, help="how many, the newest first")] = 20, json: Json = False
) -> None:
    """List the newest runs, with their attempts by state."""
    print_list("runs", LIST_COLUMNS, Api().get(RUNS, limit=limit, order="desc")["data"], json)


def show_run(run: RunName, json: Json = False) -> None:
    """Show one run: its plan, and its attempts by state."""
    print_object(Api().get(_path(run)), json, _render)


def list_attempts(
    run: RunName,
    limit: Annotated[int, typer.Option(min=1, max=100, help="how many")] = 20,
    after: Annotated[str | None, typer.Option(help="the id of an attempt: those that follow it")] = None,
    json: Json = False,
) -> None:
    """List the attempts of a run that were claimed, in the order of tasks."""
    print_list("attempts", ATTEMPT_COLUMNS, Api().get(f"{_path(run)}/attempts", limit=limit, after=after)["data"], json)


def cancel_run(run: RunName, json: Json = False) -> None:
    """Cancel a run: no attempt of it begins any more. Those under way go on, and count."""
    print_object(Api().post(f"{_path(run)}/cancel", {}), json, _render)


def _path(run: str) -> str:
    return f"{RUNS}/{quote(run, safe='')}"


def describe_counts(attempts: Mapping[str, int]) -> str:
    """Example: "3 waiting, 2 under way, 11 done, 0 lost, 0 cancelled" """
    return ", ".join(f"{number} {state.replace('_', ' ')}" for state, number in attempts.items())


def _render(row: Row) -> Iterator[str]:
    state = "complete" if row["is_complete"] else "not complete"
    if row["cancelled_at"] is not None:
        state += f", cancelled {format_time(row['cancelled_at'])}"
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
