"""The command line of those who hold somebody on a version: pin."""

import json

import pytest

from app.models import ApiKey, Audit, Pin, VersionState
from tests.app.cli.test_commands import at, run
from tests.support.deployment import Harness

from app.cli.main import app  # isort: skip

__all__ = ["at"]


async def test_a_user_is_held_moved_seen_and_let_go(at: Harness) -> None:
    await at.version(VersionState.SUPERSEDED)
    told = run(app, ["pin", "set", "v0", "--user", "team [red]/ada", "--reason", "a [dim] tester"])
    assert told.output.strip() == "user team [red]/ada is held on shop@v0"
    moved = json.loads(run(app, ["pin", "set", "1", "--user", "team [red]/ada", "--policy", "shop", "--json"]).stdout)
    assert (moved["version"], moved["loaded"]) == ("shop@v1", False)
    run(app, ["pin", "set", "0", "--conversation", "c-1", "--reason", "a [dim] trial"])
    soon = run(app, ["pin", "set", "v1", "--user", "bob"]).output
    assert "bob is held on shop@v1; it is not loaded yet" in soon
    rows = json.loads(run(app, ["pin", "list", "--json"]).stdout)
    assert [row["subject"] for row in rows] == ["bob", "c-1", "team [red]/ada"], "the latest first"
    shown = run(app, ["pin", "list"]).output
    assert "user team [red]/ada" in shown and "a [dim] trial" in shown and "not yet" in shown
    talks = run(app, ["pin", "list", "--kind", "conversation"]).output
    assert "c-1" in talks and "bob" not in talks
    assert f"{moved['id']} is removed" in run(app, ["pin", "remove", moved["id"]]).output
    again = run(app, ["pin", "remove", moved["id"]])
    assert again.exit_code == 1 and "There is no pin" in again.output
    assert {row.subject for row in await at.all(Pin)} == {"bob", "c-1"}
    assert [row.action for row in await at.all(Audit)] == ["pin"] * 4 + ["unpin"]


async def test_a_key_is_held_as_it_is_shown(at: Harness) -> None:
    [key] = await at.all(ApiKey)
    told = json.loads(run(app, ["pin", "set", "0", "--key", f"{key.prefix}…", "--json"]).stdout)
    assert (told["kind"], told["subject"]) == ("key", key.id)


async def test_more_pins_than_a_page_are_all_listed(at: Harness) -> None:
    serving, policy = await at.serving(), await at.policy()
    same = {"project_id": policy.project_id, "policy_id": policy.id, "version_id": serving.id, "actor": "test"}
    async with at.db.write() as session:
        for number in range(101):
            session.add(Pin(id=f"pin-{number:032}", kind="user", subject=f"user-{number}", **same))
    rows = json.loads(run(app, ["pin", "list", "--json"]).stdout)
    assert {row["subject"] for row in rows} == {f"user-{number}" for number in range(101)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "name one of --user, --conversation and --key"),
        (["--user", "bob", "--key", "key-1"], "name one of --user, --conversation and --key"),
        (["--key", "key-1"], "There is no such key"),
    ],
)
async def test_what_cannot_be_held_is_refused_with_a_sentence(at: Harness, options: list[str], sentence: str) -> None:
    answer = run(app, ["pin", "set", "0", *options])
    assert answer.exit_code == 1 and sentence in answer.output
    assert await at.all(Pin) == []


@pytest.mark.parametrize(("version", "sentence"), [("v9", "has no version v9"), ("latest", "12 or v12")])
async def test_a_version_that_is_none_is_refused(at: Harness, version: str, sentence: str) -> None:
    answer = run(app, ["pin", "set", version, "--user", "bob"])
    assert answer.exit_code != 0 and sentence in answer.output
