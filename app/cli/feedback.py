"""`attune feedback`: one piece of feedback and what became of it."""

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import quote

import typer

from app.cli.client import Api
from app.cli.options import Json
from app.cli.output import Row, format_time, print_object

feedback = typer.Typer(no_args_is_help=True, help="Look up feedback and what became of it.")


@feedback.command("show")
def show_feedback(id: Annotated[str, typer.Argument(help="fb-…, as the API returned it")], json: Json = False) -> None:
    """Show one piece of feedback: learned from, waiting, or not learned from, and why."""
    print_object(Api().get(f"/v1/feedback/{quote(id, safe='')}"), json, _render_feedback)


def _render_feedback(row: Row) -> Iterator[str]:
    source = row["source"]
    target = row["completion_id"] or row["conversation_id"] or "several completions"
    sender = "/".join(part for part in (source["kind"], source["id"]) if part)
    yield f"{row['id']}: {row['kind']} {row['raw_value']} on {target} by {sender}, {format_time(row['created_at'])}"
    outcome = row["outcome"]
    reason = outcome["waiting_for"] or outcome["rule"]
    suffix = f" ({reason})" if reason else ""
    yield f"{outcome['state'].replace('_', ' ')}{suffix}: {outcome['sentence']}"
    if outcome["until"] is not None:
        yield f"it waits until {format_time(outcome['until'])}"
