"""Votes of annotation tools: exports of Argilla and of Label Studio, as items of `POST /v1/feedback/batch`.

The key of a vote is made of the ids of the annotation, so that a later export with changed answers replaces them.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from app.cli.client import CommandError
from app.cli.output import Row
from app.cli.vote_files import Questions, VoteFile, guess_kind, parse_seconds, read_text, to_name

LABELSTUDIO_VALUES = {"rating": "rating", "choices": "choices", "textarea": "text", "number": "number"}  # by type


def read_argilla(path: Path, questions: Questions) -> VoteFile:
    """Read what `dataset.records.to_list(flatten=True)` returned, saved as JSON. Only submitted responses are votes."""
    file = VoteFile()
    for index, record in enumerate(_read_records(path)):
        names = [column.removesuffix(".responses") for column in record if column.endswith(".responses")]
        if not names and "responses" in record:
            raise CommandError(
                f"{path} has no status of its responses, so that drafts cannot be told from answers: save what "
                "dataset.records.to_list(flatten=True) returns"
            )
        for name in names:
            columns = (record.get(f"{name}.responses{part}") or () for part in ("", ".users", ".status"))
            for value, user, status in zip(*columns, strict=True):
                if status == "submitted":
                    place = f"record {record.get('id', index)}, {name} of {user}"
                    file.add(place, _argilla_item, record, name, value, user, questions)
                else:
                    file.num_drafts += 1
    return file


def _argilla_item(record: Row, name: str, value: object, user: str, questions: Questions) -> Row:
    return {
        # A user has one response to a question of a record.
        "key": f"argilla:{record.get('_server_id') or record.get('id')}:{name}:{user}",
        "source": f"argilla:{user}",
        "completion_id": _find_target(record, questions, fallback=record.get("id")),
        **questions.to_feedback(name, value),
    }


def read_labelstudio(path: Path, questions: Questions) -> VoteFile:
    """Read Label Studio's export of the format JSON. Drafts and cancelled annotations are no votes."""
    file = VoteFile()
    for index, task in enumerate(_read_records(path)):
        file.num_drafts += len(task.get("drafts") or ())
        if "annotations" not in task:
            raise CommandError(f"{path} has no annotations: export from Label Studio as JSON, not as JSON-MIN")
        for annotation in task["annotations"]:
            if annotation.get("was_cancelled"):
                file.num_drafts += 1
                continue
            for result in annotation.get("result") or ():
                place = f"task {task.get('id', index)}, {result.get('from_name')} of annotation {annotation.get('id')}"
                file.add(place, _labelstudio_item, task.get("data") or {}, annotation, result, questions)
    return file


def _labelstudio_item(data: Row, annotation: Row, result: Row, questions: Questions) -> Row:
    name, kind, value = str(result.get("from_name")), str(result.get("type")), result.get("value") or {}
    by = annotation.get("completed_by")
    user = (by.get("email") or by.get("id")) if isinstance(by, dict) else by
    item: Row = {"key": f"labelstudio:{annotation.get('id')}:{name}", "source": f"labelstudio:{user}"}
    if changed_at := annotation.get("updated_at") or annotation.get("created_at"):
        item["sent_at"] = parse_seconds("updated_at", str(changed_at))
    if kind == "pairwise":
        return item | {"name": to_name(name), "kind": "comparison", "value": _order_pair(data, value, questions.target)}
    answer = value.get(LABELSTUDIO_VALUES.get(kind, ""))
    if isinstance(answer, list):
        if len(answer) != 1:
            raise ValueError(f"it has {len(answer)} answers, and a vote has one")
        [answer] = answer
    if answer is None:
        raise ValueError(f"its type '{kind}' says nothing about a reply")
    if kind == "choices" and name not in questions.kinds and guess_kind(answer) is None:
        item |= {"name": to_name(name), "kind": "categorical", "value": answer}
    else:
        item |= questions.to_feedback(name, answer)
    return item | {"completion_id": _find_target(data, questions)}


def _order_pair(data: Row, value: Row, target: str) -> list[str]:
    """Return the ids of the two completions of a task, the selected one first."""
    ids = [data.get(f"{side}_{target}") for side in ("left", "right")]
    if None in ids:
        raise ValueError(f"its task has no left_{target} and right_{target}")
    if value.get("selected") not in ("left", "right"):
        raise ValueError("its pairwise answer selects neither left nor right")
    return [str(id) for id in (ids if value["selected"] == "left" else ids[::-1])]


def _find_target(record: Row, questions: Questions, fallback: object = None) -> str:
    metadata = record.get("metadata")
    places = [record, metadata] if isinstance(metadata, Mapping) else [record]
    ids = [place[questions.target] for place in places if place.get(questions.target)]
    if not ids and not fallback:
        raise ValueError(f"it has no {questions.target}: --target names the field with the completion's id")
    return str(ids[0] if ids else fallback)


def _read_records(path: Path) -> list[Row]:
    """Read a JSON array, or JSON lines. Raises CommandError unless it holds objects."""
    text = read_text(path)
    lines = [text] if text.lstrip().startswith("[") else [line for line in text.split("\n") if line.strip()]
    try:
        parsed = [json.loads(line) for line in lines]
    except ValueError as error:
        raise CommandError(f"{path} is not JSON: {error}") from error
    records = parsed[0] if parsed and isinstance(parsed[0], list) else parsed
    if not all(isinstance(record, dict) for record in records):
        raise CommandError(f"{path} is not a list of records")
    return list(records)
