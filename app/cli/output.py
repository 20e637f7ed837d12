"""Output of commands: tables and sentences for people, JSON for programs."""

import json as jsonlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.cli.client import Answer, Api
from app.cli.options import policy_path

Row = Answer
Renderable = str | Text | Table
Render = Callable[[Any], str | Iterable[Renderable]]

console = Console(highlight=False)
if not console.is_terminal:
    console.width = 140  # output to a file or a pipe


@dataclass(frozen=True)
class Column:
    """A column of a table. `value` is a key of the row, or a function of the row; None is shown as a dash.

    Example: Column("approval", "approval", "{:.0%}", right=True)
    """

    heading: str
    value: str | Callable[[Row], object]
    form: str = "{}"
    right: bool = False
    no_wrap: bool = False

    def cell(self, row: Row) -> Text:
        value = row[self.value] if isinstance(self.value, str) else self.value(row)
        return Text(format_optional(value, self.form))


def make_table(title: str, columns: Sequence[Column], rows: Iterable[Row]) -> Table:
    table = Table(title=title)
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(column.heading, justify=justify, no_wrap=column.no_wrap, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def print_list(title: str, columns: Sequence[Column], rows: Sequence[Row], json: bool) -> None:
    """Print rows as a table, or as a JSON array."""
    print_object(rows, json, lambda rows: [make_table(title, columns, rows)])


def print_object(body: object, json: bool, render: Render) -> None:
    """Print one object as the lines and tables that `render` returns, or as JSON."""
    if json:
        print(jsonlib.dumps(body, indent=2))
        return
    parts = render(body)
    for part in [parts] if isinstance(parts, str) else parts:
        if isinstance(part, str):
            typer.echo(part)
        else:
            console.print(part, soft_wrap=isinstance(part, Text))


def post_action(path: str, policy: str | None, reason: str | None, json: bool, render: Render) -> None:
    """Post a reason to an endpoint of a policy, and print the object that it returns."""
    print_object(Api().post(policy_path(policy, path), {"reason": reason}), json, render)


def format_optional(value: object, form: str = "{}") -> str:
    """Format a value, or return a dash for None."""
    return "–" if value is None else form.format(value)


def format_time(timestamp: float | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Format Unix seconds as local time."""
    return "–" if timestamp is None else time.strftime(form, time.localtime(timestamp))


def parenthesize(reason: str | None) -> str:
    """Example: "lunch" -> " (lunch)", None -> "" """
    return f" ({reason})" if reason else ""


def format_votes(totals: Row) -> str:
    """Example: "812 votes: 790 learned from, 14 waiting, 8 not learned from" """
    states = f"{totals['learned']} learned from, {totals['waiting']} waiting, {totals['not_learned']} not learned from"
    return f"{totals['total']} votes: {states}"


def format_approval(row: Row) -> str | None:
    """Format an approval with its 95 % interval. Example: "87% (82–91)"; None without votes"""
    if row["approval"] is None:
        return None
    return f"{row['approval']:.0%} ({100 * row['approval_low']:.0f}–{100 * row['approval_high']:.0f})"
