"""Votes read from files, as items of `POST /v1/feedback/batch`: CSV, and what the readers of other formats share."""

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.cli.client import CommandError
from app.cli.feedback import THUMBS
from app.cli.output import Row

TARGETS = ("completion_id", "request_id", "conversation_id", "episode_id")
CSV_COLUMNS = (*TARGETS, "choice_index", "kind", "value", "name", "comment", "source", "id", "key", "sent_at")
DEFAULT_SCALE = (1.0, 5.0)  # the service's own
TEXT_KINDS = ("correction", "comment", "categorical")
KINDS = ("binary", "rating", "score", *TEXT_KINDS)


@dataclass(frozen=True)
class Questions:
    """What the answers of an annotation tool mean.

    `kinds` has the kind of feedback by the question's name, `scale` the ends of ratings, and `target` the field of a
    record that holds the completion's id.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    scale: tuple[float, float] = DEFAULT_SCALE
    target: str = "completion_id"

    def to_feedback(self, question: str, value: object) -> Row:
        """Return name, kind and value of an answer. Raises ValueError if its kind is neither given nor clear.

        The feedback has the question's name, so that answers to different questions do not replace each other.
        """
        kind = self.kinds.get(question) or guess_kind(value)
        if kind is None:
            raise ValueError(f"what '{question}' asks for is not clear: add --question {question}=KIND")
        if kind == "binary":
            value = THUMBS.get(str(value).strip().lower(), value)
        feedback: Row = {"name": to_name(question), "kind": kind, "value": value}
        return feedback | ({"scale": list(self.scale)} if kind == "rating" else {})


@dataclass(frozen=True)
class FileVote:
    """A vote of a file: an item to send, or the reason why there is none. `place` says where it stands in the file."""

    place: str
    item: Row | None = None
    problem: str | None = None


@dataclass
class VoteFile:
    """The votes of a file, and how many answers are drafts, discarded or cancelled, and so no votes."""

    votes: list[FileVote] = field(default_factory=list)
    num_drafts: int = 0

    def add(self, place: str, read: Callable[..., Row], *args: Any) -> None:
        """Add the item that `read(*args)` returns. A ValueError is the reason why it is no vote."""
        try:
            self.votes.append(FileVote(place, read(*args)))
        except ValueError as error:
            self.votes.append(FileVote(place, problem=str(error)))


def to_name(question: str) -> str:
    """Return the name of feedback for that of a question. Example: "How good?" -> "How-good-" """
    return re.sub(r"[^\w.-]", "-", question)[:63] or "default"


def guess_kind(value: object) -> str | None:
    """Return the kind of a thumb or a number; None for other answers."""
    if isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in THUMBS):
        return "binary"
    return "rating" if isinstance(value, int | float) else None


def read_text(path: Path) -> str:
    """Return a file's text. Raises CommandError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is not in UTF-8: save it with that encoding ({error})") from error
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error}") from error


def read_csv(path: Path, scale: tuple[float, float]) -> VoteFile:
    """Read a CSV file whose columns are fields of feedback; `scale` has the ends of ratings.

    Raises CommandError if its columns are others.

    Spreadsheets of many languages separate values by semicolons, and copied cells by tabs: the first line tells.
    """
    text = read_text(path)
    header = text.partition("\n")[0]
    # Not `splitlines`, which would cut a text at the line breaks of Unicode.
    lines = io.StringIO(text, newline="")
    csv.field_size_limit(max(len(text), 1))
    reader = csv.DictReader(lines, restkey="", delimiter=max(",;\t", key=header.count))
    columns = [name.strip().lower() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    if unknown := sorted(set(columns) - set(CSV_COLUMNS)):
        raise CommandError(f"{path}: unknown columns {', '.join(unknown)}; known are {', '.join(CSV_COLUMNS)}")
    if "value" not in columns or not set(columns) & set(TARGETS):
        raise CommandError(f"{path}: the first line must name the columns: 'value', and one of {', '.join(TARGETS)}")
    file = VoteFile()
    for row in reader:
        file.add(f"line {reader.line_num}", _csv_item, row, scale)
    return file


def parse_seconds(name: str, text: str) -> float:
    """Return a time in seconds since the epoch; one without a time zone is in UTC. Example: "1970-01-01T00:00:09Z" -> 9

    Raises ValueError for other texts.
    """
    try:
        return _parse_number(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{name} '{text}' is neither seconds nor a date and time") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _csv_item(row: dict[str, str | None], scale: tuple[float, float]) -> Row:
    if "" in row:
        raise ValueError("it has more values than there are columns")
    cells = {name: value.strip() for name, value in row.items() if value is not None and value.strip()}
    kind, text = cells.pop("kind", "binary"), cells.pop("value", "")
    item: Row = {"kind": kind, "value": _csv_value(kind, text)}
    if kind == "rating" and scale != DEFAULT_SCALE:
        item["scale"] = list(scale)
    named = [name for name in TARGETS if name in cells]
    if len(named) != 1:
        raise ValueError(f"it must name one of {', '.join(TARGETS)}")
    if named[0] in ("conversation_id", "episode_id"):
        item["target"] = {named[0]: cells.pop(named[0])}
    if "choice_index" in cells:
        choice = cells.pop("choice_index")
        if not choice.isdecimal():
            raise ValueError(f"choice_index '{choice}' is not a number")
        item["choice_index"] = int(choice)
    if "sent_at" in cells:
        item["sent_at"] = parse_seconds("sent_at", cells.pop("sent_at"))
    item |= cells
    if "id" not in item and "key" not in item:  # the same line counts once, however often the file is imported
        item["id"] = f"csv-{hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()[:40]}"
    return item


def _csv_value(kind: str, text: str) -> str | bool | float:
    if not text:
        raise ValueError("it has no value")
    if kind not in KINDS:
        raise ValueError(f"its kind '{kind}' is none of {', '.join(KINDS)}")
    if kind == "binary":
        return THUMBS.get(text.lower(), text)
    if kind in TEXT_KINDS:
        return text
    try:
        return _parse_number(text)
    except ValueError:
        raise ValueError(f"its value '{text}' is not a number") from None


def _parse_number(text: str) -> float:
    """Return a finite number. Raises ValueError for other texts."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number
