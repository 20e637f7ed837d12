"""`attune import votes`: the votes of a file, sent as feedback that counts once."""

from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from time import sleep
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from app.cli.annotation_exports import read_argilla, read_labelstudio
from app.cli.client import Api, CommandError, ConnectionLost
from app.cli.options import Json
from app.cli.output import Row, print_object
from app.cli.vote_files import DEFAULT_SCALE, KINDS, FileVote, Questions, VoteFile, read_csv

BATCH_SIZE = 500
MAX_ATTEMPTS = 20  # of a batch, and of an item, while the service is busy or away
MAX_WAIT_SECONDS = 30.0  # between two attempts while it is away: with the first, shorter ones, seven minutes in all
SHOWN_PROBLEMS = 20
RESULTS = {200: "unchanged", 201: "new", 404: "unmatched"}  # by the status of an item; all others: refused


class VoteFormat(StrEnum):
    CSV = "csv"
    ARGILLA = "argilla"
    LABELSTUDIO = "labelstudio"


READERS: dict[VoteFormat, Callable[[Path, Questions], VoteFile]] = {
    VoteFormat.CSV: lambda path, questions: read_csv(path, questions.scale),
    VoteFormat.ARGILLA: read_argilla,
    VoteFormat.LABELSTUDIO: read_labelstudio,
}


def import_votes(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="the file of votes")],
    form: Annotated[VoteFormat, typer.Option("--format", help="what wrote the file")] = VoteFormat.CSV,
    question: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=KIND", help=f"the kind of feedback that a question asks for: {', '.join(KINDS)}"),
    ] = None,
    scale: Annotated[tuple[float, float], typer.Option(help="the ends of ratings")] = DEFAULT_SCALE,
    target: Annotated[str, typer.Option(help="the field of a record with the completion's id")] = "completion_id",
    json: Json = False,
) -> None:
    """Import votes from CSV, Argilla or Label Studio. To import a file again, or a later export, counts nothing twice.

    Ends with status 1 if a vote was not taken.
    """
    votes = READERS[form](file, Questions(_parse_kinds(question or []), scale, target))
    counts, problems = Counter(drafts=votes.num_drafts), [vote for vote in votes.votes if vote.problem]
    counts["refused"] = len(problems)
    api = Api()
    for number, batch in enumerate(_iterate_batches(votes.votes, json)):
        for vote, result in _send(api, batch, has_answered=number > 0):
            name = "superseded" if _code(result) == "superseded" else RESULTS.get(result["status"], "refused")
            counts[name] += 1
            if name in ("unmatched", "refused"):
                problems.append(FileVote(vote.place, problem=result["error"]["message"]))
    names = ("new", "unchanged", "superseded", "drafts", "unmatched", "refused")
    listed = [{"place": one.place, "reason": one.problem} for one in problems]
    print_object({"file": str(file)} | {name: counts[name] for name in names} | {"problems": listed}, json, _render)
    if problems:
        raise typer.Exit(1)


def _parse_kinds(questions: list[str]) -> dict[str, str]:
    kinds = dict(one.rpartition("=")[::2] for one in questions)
    for name, kind in kinds.items():
        if not name or kind not in KINDS:
            raise typer.BadParameter(f"write --question NAME=KIND, with one of {', '.join(KINDS)}")
    return kinds


def _iterate_batches(votes: list[FileVote], is_quiet: bool) -> Iterator[list[FileVote]]:
    items = [vote for vote in votes if vote.item is not None]
    batches = [items[start : start + BATCH_SIZE] for start in range(0, len(items), BATCH_SIZE)]
    console = Console(stderr=True)
    yield from track(batches, "votes", console=console, transient=True, disable=is_quiet or not console.is_terminal)


def _send(api: Api, votes: list[FileVote], *, has_answered: bool) -> Iterator[tuple[FileVote, Row]]:
    """Yield each vote with its result. Votes that the service cannot take just now are sent again.

    A service that is away is waited for if it has answered before; else its address may be wrong.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            results = api.post("/v1/feedback/batch", {"items": [vote.item for vote in votes]})["data"]
        except CommandError as error:
            seconds = error.retry_after
            if isinstance(error, ConnectionLost) and has_answered:
                seconds = min(2.0 ** (attempt - 1), MAX_WAIT_SECONDS)
            if seconds is None or attempt == MAX_ATTEMPTS:
                raise
            sleep(seconds)
            continue
        has_answered = True
        waiting = []
        for vote, result in zip(votes, results, strict=True):
            if result["status"] == 503 and attempt < MAX_ATTEMPTS:
                waiting.append(vote)
            else:
                yield vote, result
        if not waiting:
            return
        votes = waiting
        sleep(1.0)


def _code(result: Row) -> str | None:
    return None if result.get("error") is None else result["error"].get("code")


def _render(result: Row) -> Iterator[str]:
    counted = [f"{result[name]} {name}" for name in ("new", "unchanged", "superseded") if result[name] or name == "new"]
    yield f"{result['file']}: {', '.join(counted)}"
    if result["drafts"]:
        yield f"left out: {result['drafts']} drafts, discarded or cancelled answers"
    problems = result["problems"]
    if problems:
        unmatched = f", {result['unmatched']} of them about replies that this project does not have"
        yield f"not taken: {len(problems)}{unmatched if result['unmatched'] else ''}"
    for one in problems[:SHOWN_PROBLEMS]:
        yield f"  {one['place']}: {one['reason']}"
    if len(problems) > SHOWN_PROBLEMS:
        yield f"  … and {len(problems) - SHOWN_PROBLEMS} more; --json lists all"
