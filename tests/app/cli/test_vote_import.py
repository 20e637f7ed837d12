"""attune import votes: CSV, exports of Argilla and of Label Studio; each vote counts once, the last state holds."""

import csv
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from app.cli import vote_import
from app.cli.annotation_exports import _read_records
from app.cli.client import Api
from app.cli.data import imports
from app.cli.vote_files import DEFAULT_SCALE, read_csv
from app.models import Feedback
from tests.support.cli import run
from tests.support.deployment import Harness


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def import_votes(*args: str) -> dict[str, Any]:
    result = run(imports, ["votes", *args, "--json"])
    assert result.stdout, result.output
    return {**json.loads(result.stdout), "exit_code": result.exit_code}


async def effective(harness: Harness) -> list[tuple[str, Any, str | None]]:
    """Return kind, value and source of the feedback that counts, in the order of arrival."""
    async with harness.db.read() as session:
        rows = list(await session.scalars(select(Feedback).order_by(Feedback.seq)))
    views = [(await harness.api.get(f"/v1/feedback/{row.id}")).json() for row in rows if row.kind != "withdrawal"]
    return [(view["kind"], view["raw_value"], view["source"]["id"]) for view in views if view["effective"]]


async def test_csv_is_imported_and_counts_once(cli_harness: Harness, tmp_path: Path) -> None:
    first, second = await cli_harness.turn(), await cli_harness.turn(conversation_id="c-7")
    file = write(
        tmp_path / "votes.csv",
        "\ufeffcompletion_id, kind,value,source,comment,conversation_id\n"
        f"{first.completion_id},,UP,ada,\n"
        f'{first.completion_id},rating,4,bob,"a bit long,\nreally"\n'
        ",score,-0.5,ada,,c-7\n"
        f"{second.completion_id},correction,We open at 8.,ada,,\n",
    )
    assert run(imports, ["votes", file]).stdout == f"{file}: 4 new\n"
    assert await effective(cli_harness) == [
        ("binary", True, "ada"),
        ("rating", 4.0, "bob"),
        ("score", -0.5, "ada"),
        ("correction", "We open at 8.", "ada"),
    ]
    again = import_votes(file)
    assert (again["new"], again["unchanged"], again["exit_code"]) == (0, 4, 0)
    changed = write(tmp_path / "later.csv", f"completion_id,value,source\n{first.completion_id},down,ada\n")
    assert import_votes(changed)["new"] == 1
    assert ("binary", False, "ada") in await effective(cli_harness)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c"])
def test_text_is_not_cut_at_a_line_break_of_unicode(tmp_path: Path, mark: str) -> None:
    text, file = f"We open at 8.{mark}On Sunday we are closed.", tmp_path / "votes.csv"
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([["completion_id", "kind", "value"], ["chatcmpl-1", "correction", text]])
    assert [vote.item and vote.item["value"] for vote in read_csv(file, DEFAULT_SCALE).votes] == [text]
    record = {"id": "r-1", "status": "completed", "text": text}
    file.write_text(json.dumps(record, ensure_ascii=False) + "\n")
    assert _read_records(file) == [record]


async def test_ratings_have_the_scale_that_was_named(cli_harness: Harness, tmp_path: Path) -> None:
    turn = await cli_harness.turn()
    lines = ["completion_id,kind,value", f"{turn.completion_id},rating,5", f"{turn.completion_id},rating,nan"]
    result = import_votes(write(tmp_path / "votes.csv", "\n".join(lines)), "--scale", "0", "10")
    assert (result["new"], result["refused"], result["exit_code"]) == (1, 1, 1)
    assert [row.value for row in await cli_harness.all(Feedback)] == [0.0]


async def test_long_cells_are_read(cli_harness: Harness, tmp_path: Path) -> None:
    turn = await cli_harness.turn()
    lines = [
        "completion_id,kind,value",
        f"{turn.completion_id},comment,{'long ' * 40_000}",
        f"{turn.completion_id},,up",
    ]
    result = import_votes(write(tmp_path / "votes.csv", "\n".join(lines)))
    assert (result["new"], result["refused"]) == (1, 1)


@pytest.mark.parametrize("delimiter", [";", "\t"])
async def test_files_of_spreadsheets_are_read(cli_harness: Harness, tmp_path: Path, delimiter: str) -> None:
    turn = await cli_harness.turn()
    lines = [("Completion_ID", "Value", "Comment"), (turn.completion_id, "down", '"1,5 km, not 15"')]
    file = write(tmp_path / "votes.csv", "\r\n".join(delimiter.join(line) for line in lines))
    assert run(imports, ["votes", file]).stdout == f"{file}: 1 new\n"
    assert [row.comment for row in await cli_harness.all(Feedback)] == ["1,5 km, not 15"]


async def test_other_encodings_are_refused(cli_harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "votes.csv"
    file.write_bytes("completion_id,value,comment\nchatcmpl-1,up,schön\n".encode("latin-1"))
    result = run(imports, ["votes", str(file)])
    assert result.exit_code == 1 and "is not in UTF-8: save it with that encoding" in result.output


async def test_lines_that_are_no_votes_are_named_and_the_others_are_taken(cli_harness: Harness, tmp_path: Path) -> None:
    turn = await cli_harness.turn()
    id = turn.completion_id
    lines = [f"{id},,up,,", f"{id},,,,", f"{id},stars,4,,", f"{id},rating,four,,", "chatcmpl-nowhere,,up,,"]
    lines += [
        f"{id},binary,maybe,,",
        ",,up,,",
        f"{id},,up,yesterday,k",
        f"{id},,up,2026-11-26T10:00:00Z,k-2",
        f"{id},,up,,,9",
    ]
    file = write(tmp_path / "votes.csv", "\n".join(["completion_id,kind,value,sent_at,key", *lines]))
    result = run(imports, ["votes", file])
    assert result.exit_code == 1
    assert f"{file}: 2 new\nnot taken: 8, 1 of them about replies that this project does not have" in result.stdout
    reasons = {one["place"]: one["reason"] for one in import_votes(file)["problems"]}
    assert {place: reason.partition(":")[0][:40] for place, reason in reasons.items()} == {
        "line 3": "it has no value",
        "line 4": "its kind 'stars' is none of binary, rati",
        "line 5": "its value 'four' is not a number",
        "line 6": "There is no completion 'chatcmpl-nowhere",
        "line 7": "value",
        "line 8": "it must name one of completion_id, reque",
        "line 9": "sent_at 'yesterday' is neither seconds n",
        "line 11": "it has more values than there are column",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("reply,value\nchatcmpl-1,up\n", "unknown columns reply; known are completion_id,"),
        ("completion_id,kind\n", "the first line must name the columns: 'value', and one of completion_id"),
        ("", "the first line must name the columns"),
    ],
)
async def test_other_columns_are_refused(cli_harness: Harness, tmp_path: Path, content: str, message: str) -> None:
    result = run(imports, ["votes", write(tmp_path / "votes.csv", content)])
    assert result.exit_code == 1 and message in result.output
    assert await cli_harness.all(Feedback) == []


def argilla_record(completion_id: str, quality: list[Any], users: list[str], status: list[str]) -> dict[str, Any]:
    """Return a record as `to_list(flatten=True)` of Argilla 2.8.0 does."""
    answers = {"quality.responses": quality, "quality.responses.users": users, "quality.responses.status": status}
    return {
        "id": "r-1",
        "status": "completed",
        "_server_id": "0f3a",
        "prompt": "Hi",
        "completion_id": completion_id,
        **answers,
    }


async def test_submitted_responses_of_argilla_are_votes(cli_harness: Harness, tmp_path: Path) -> None:
    turn = await cli_harness.turn()
    record = argilla_record(turn.completion_id, [5, 1, 2], ["u-1", "u-2", "u-3"], ["submitted", "draft", "discarded"])
    record |= {
        "fix.responses": ["We open at 8."],
        "fix.responses.users": ["u-1"],
        "fix.responses.status": ["submitted"],
    }
    file = write(tmp_path / "argilla.json", [record, {**dict.fromkeys(record), "id": "r-2"}])
    unclear = import_votes(file, "--format", "argilla")
    assert (unclear["new"], unclear["drafts"], unclear["refused"], unclear["exit_code"]) == (1, 2, 1, 1)
    assert unclear["problems"][0]["reason"] == "what 'fix' asks for is not clear: add --question fix=KIND"
    named = import_votes(file, "--format", "argilla", "--question", "fix=correction")
    assert (named["new"], named["unchanged"], named["exit_code"]) == (1, 1, 0)
    record["quality.responses"][0] = 2
    assert (
        import_votes(write(tmp_path / "later.json", [record]), "--format", "argilla", "--question", "fix=correction")[
            "new"
        ]
        == 1
    )
    assert await effective(cli_harness) == [
        ("correction", "We open at 8.", "argilla:u-1"),
        ("rating", {"value": 2, "scale": [1.0, 5.0]}, "argilla:u-1"),
    ]


async def test_nested_export_of_argilla_is_refused(cli_harness: Harness, tmp_path: Path) -> None:
    record = {"id": "r-1", "fields": {}, "responses": {"quality": [{"value": 5, "user_id": "u-1"}]}}
    result = run(imports, ["votes", write(tmp_path / "a.json", [record]), "--format", "argilla"])
    assert result.exit_code == 1 and "to_list(flatten=True)" in result.output


def annotation(id: int, *results: dict[str, Any], **fields: Any) -> dict[str, Any]:
    defaults = {"completed_by": 7, "was_cancelled": False, "updated_at": "2026-11-20T10:00:00.5Z"}
    return {"id": id, "result": list(results), **defaults, **fields}


def result_of(name: str, type: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"id": "x", "from_name": name, "to_name": "reply", "type": type, "value": value}


async def test_annotations_of_label_studio_are_votes(cli_harness: Harness, tmp_path: Path) -> None:
    turn, other = await cli_harness.turn(), await cli_harness.turn()
    results = [
        result_of("thumb", "choices", {"choices": ["👍"]}),
        result_of("tone", "choices", {"choices": ["rude"]}),
        result_of("stars", "rating", {"rating": 4}),
        result_of("fix", "textarea", {"text": ["We open at 8."]}),
    ]
    pair = {"left_completion_id": turn.completion_id, "right_completion_id": other.completion_id}
    tasks = [
        {
            "id": 1,
            "data": {"completion_id": turn.completion_id},
            "annotations": [annotation(11, *results), annotation(12, results[0], was_cancelled=True)],
            "drafts": [{"id": 5}],
        },
        {"id": 2, "data": pair, "annotations": [annotation(13, result_of("best", "pairwise", {"selected": "right"}))]},
    ]
    options = ("--format", "labelstudio", "--question", "fix=correction", "--scale", "0", "4")
    file = write(tmp_path / "project.json", tasks)
    assert import_votes(file, *options)["exit_code"] == 0
    assert await effective(cli_harness) == [
        ("binary", True, "labelstudio:7"),
        ("categorical", "rude", "labelstudio:7"),
        ("rating", {"value": 4, "scale": [0.0, 4.0]}, "labelstudio:7"),
        ("correction", "We open at 8.", "labelstudio:7"),
        ("comparison", [other.completion_id, turn.completion_id], "labelstudio:7"),
    ]
    [stars] = [row for row in await cli_harness.all(Feedback) if row.kind == "rating"]
    assert stars.value == 1.0
    again = import_votes(file, *options)
    assert (again["new"], again["unchanged"], again["drafts"]) == (0, 5, 2)


async def test_an_older_export_changes_nothing(cli_harness: Harness, tmp_path: Path) -> None:
    turn = await cli_harness.turn()

    def export(thumb: str, updated_at: str) -> str:
        results = [result_of("thumb", "choices", {"choices": [thumb]})]
        task = {"id": 1, "data": {"completion_id": turn.completion_id}}
        return write(tmp_path / "p.json", [{**task, "annotations": [annotation(11, *results, updated_at=updated_at)]}])

    assert import_votes(export("👎", "2026-11-21T10:00:00Z"), "--format", "labelstudio")["new"] == 1
    older = import_votes(export("👍", "2026-11-20T10:00:00Z"), "--format", "labelstudio")
    assert (older["superseded"], older["exit_code"], older["problems"]) == (1, 0, [])
    assert await effective(cli_harness) == [("binary", False, "labelstudio:7")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{]", "is not JSON"),
        ("[1]", "is not a list of records"),
        ([{"id": 1, "thumb": "👍"}], "export from Label Studio as JSON, not as JSON-MIN"),
    ],
)
async def test_other_files_are_refused(cli_harness: Harness, tmp_path: Path, content: Any, message: str) -> None:
    result = run(imports, ["votes", write(tmp_path / "p.json", content), "--format", "labelstudio"])
    assert result.exit_code == 1 and message in result.output


async def test_busy_service_is_waited_for(
    cli_harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [await cli_harness.turn() for _ in range(3)]
    file = write(tmp_path / "votes.csv", "\n".join(["completion_id,value", *(f"{t.completion_id},up" for t in turns)]))
    assert (await cli_harness.api.patch("/v1/project", json={"limits": {"feedback_per_minute": 5}})).status_code == 200
    waits: list[float] = []
    send = Api.post

    def send_too_many_at_first(api: Api, path: str, body: dict[str, Any]) -> Any:
        return send(api, path, body if waits else {"items": body["items"] * 2})

    monkeypatch.setattr(Api, "post", send_too_many_at_first)
    monkeypatch.setattr(vote_import, "sleep", waits.append)
    assert import_votes(file)["new"] == 3
    assert waits == [60.0]


async def test_service_that_goes_away_is_waited_for(
    cli_harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [await cli_harness.turn() for _ in range(4)]
    file = write(tmp_path / "votes.csv", "\n".join(["completion_id,value", *(f"{t.completion_id},up" for t in turns)]))
    waits: list[float] = []
    outage: list[httpx2.TransportError | None] = [None, httpx2.ReadError("reset"), httpx2.ConnectError("refused")]
    send = httpx2.Client.send

    def send_with_an_outage(client: httpx2.Client, *args: Any, **options: Any) -> Any:
        if outage and (error := outage.pop(0)) is not None:
            raise error
        return send(client, *args, **options)

    monkeypatch.setattr(httpx2.Client, "send", send_with_an_outage)
    monkeypatch.setattr(vote_import, "BATCH_SIZE", 2)
    monkeypatch.setattr(vote_import, "sleep", waits.append)
    assert import_votes(file)["new"] == 4
    assert waits == [1.0, 2.0]


async def test_service_that_is_not_there_is_not_waited_for(
    cli_harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = await cli_harness.turn()
    file = write(tmp_path / "votes.csv", f"completion_id,value\n{turn.completion_id},up\n")

    def refuse(*_: Any, **__: Any) -> Any:
        raise httpx2.ConnectError("refused")

    monkeypatch.setattr(httpx2.Client, "send", refuse)
    result = run(imports, ["votes", file])
    assert result.exit_code == 1 and "is `attune up` running?" in result.output
