"""`attune feedback`: give feedback on a completion, and see what became of it."""

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import quote
from uuid import uuid4

import typer

from app.cli.client import Api, drop_unset
from app.cli.options import Json, parse_json
from app.cli.output import Column, Row, format_time, print_list, print_object

feedback = typer.Typer(no_args_is_help=True, help="Give feedback on replies, and look up what became of it.")
CompletionId = Annotated[str, typer.Argument(metavar="COMPLETION", help="chatcmpl-…, resp_… or msg_…")]
THUMBS = {
    **dict.fromkeys(("up", "+1", "1", "true", "👍", "thumbs up"), True),
    **dict.fromkeys(("down", "-1", "false", "👎", "thumbs down"), False),
}
LIST_COLUMNS = (
    Column("id", "id", no_wrap=True),
    Column("choice", "choice_index", right=True),
    Column("kind", "kind"),
    Column("value", "raw_value"),
    Column("source", lambda row: _format_source(row["source"])),
    Column("time", lambda row: format_time(row["created_at"])),
    Column("outcome", lambda row: row["outcome"]["state"].replace("_", " ")),
    Column("comment", "comment"),
)


@feedback.command("give", context_settings={"ignore_unknown_options": True})  # the value may be -1
def give_feedback(
    completion: CompletionId,
    value: Annotated[str, typer.Argument(help="up or down; a number or a text with --kind")],
    kind: Annotated[str, typer.Option(help="binary, rating, score, correction, comment or categorical")] = "binary",
    choice: Annotated[int, typer.Option(min=0, help="which of several choices")] = 0,
    source: Annotated[str | None, typer.Option(help="the id of the person who says it")] = None,
    comment: Annotated[str | None, typer.Option(help="a note")] = None,
    id: Annotated[str | None, typer.Option(help="an id of your own: the same id again counts once")] = None,
    json: Json = False,
) -> None:
    """Give feedback on a reply. Example: attune feedback give chatcmpl-… up --source ada"""
    body = {
        "id": id or f"cli-{uuid4().hex}",
        "completion_id": completion,
        "choice_index": choice,
        "kind": kind,
        "value": parse_value(value, kind),
    }
    more = drop_unset(comment=comment, source=None if source is None else {"id": source})
    row = Api().post("/v1/feedback", body | more)
    print_object(row, json, _render_answer)


def parse_value(text: str, kind: str) -> object:
    """Return the value of a command line for this kind. Example: ("4", "rating") -> 4, ("4", "comment") -> "4"."""
    if kind == "binary":
        return THUMBS.get(text.lower(), text)
    return parse_json(text, "VALUE") if kind in ("rating", "score") else text


@feedback.command("list")
def list_feedback(completion: CompletionId, json: Json = False) -> None:
    """List the feedback on a completion, the oldest first, with its outcome."""
    rows = Api().list_all("/v1/feedback", completion_id=completion)
    print_list("feedback", LIST_COLUMNS, rows, json)


@feedback.command("show")
def show_feedback(id: Annotated[str, typer.Argument(help="fb-…, as the API returned it")], json: Json = False) -> None:
    """Show one piece of feedback: learned from, waiting, or not learned from, and why."""
    print_object(Api().get(f"/v1/feedback/{quote(id, safe='')}"), json, _render_feedback)


def _render_answer(row: Row) -> Iterator[str]:
    yield f"{row['id']}: {_describe(row)}"
    if row.get("effective") is False or row.get("withdrawn"):  # only if the id was used before
        yield f"it does not count: {row['exclusion_reason']}"


def _render_feedback(row: Row) -> Iterator[str]:
    yield f"{row['id']}: {_describe(row)}, {format_time(row['created_at'])}"
    outcome = row["outcome"]
    reason = outcome["waiting_for"] or outcome["rule"]
    suffix = f" ({reason})" if reason else ""
    yield f"{outcome['state'].replace('_', ' ')}{suffix}: {outcome['sentence']}"
    if outcome["until"] is not None:
        yield f"it waits until {format_time(outcome['until'])}"


def _describe(row: Row) -> str:
    """Example: "binary up on chatcmpl-… by HUMAN/ada" """
    target = row["completion_id"] or row["conversation_id"] or row["episode_id"] or "several completions"
    return f"{row['kind']} {row['raw_value']} on {target} by {_format_source(row['source'])}"


def _format_source(source: Row) -> str:
    return "/".join(part for part in (source["kind"], source["id"]) if part)
