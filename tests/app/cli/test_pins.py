"""Command pin."""

import json

import pytest

from app.cli.main import app
from app.models import ApiKey, Audit, Pin, VersionState
from tests.support.cli import run
from tests.support.deployment import Harness


async def test_user_is_pinned_moved_listed_and_unpinned(cli_harness: Harness) -> None:
    await cli_harness.version(VersionState.SUPERSEDED)
    output = run(app, ["pin", "set", "v0", "--user", "team [red]/ada", "--reason", "a [dim] tester"])
    assert output.output.strip() == "user team [red]/ada is pinned to shop@v0"
    moved = json.loads(run(app, ["pin", "set", "1", "--user", "team [red]/ada", "--policy", "shop", "--json"]).stdout)
    assert (moved["version"], moved["loaded"]) == ("shop@v1", False)
    run(app, ["pin", "set", "0", "--conversation", "c-1", "--reason", "a [dim] trial"])
    not_loaded = run(app, ["pin", "set", "v1", "--user", "bob"]).output
    assert "bob is pinned to shop@v1; it is not loaded yet" in not_loaded
    rows = json.loads(run(app, ["pin", "list", "--json"]).stdout)
    assert [row["subject"] for row in rows] == ["bob", "c-1", "team [red]/ada"], "the latest first"
    shown = run(app, ["pin", "list"]).output
    assert "user team [red]/ada" in shown and "a [dim] trial" in shown and "not yet" in shown
    conversations = run(app, ["pin", "list", "--kind", "conversation"]).output
    assert "c-1" in conversations and "bob" not in conversations
    assert f"{moved['id']} is removed" in run(app, ["pin", "remove", moved["id"]]).output
    again = run(app, ["pin", "remove", moved["id"]])
    assert again.exit_code == 1 and "There is no pin" in again.output
    assert {row.subject for row in await cli_harness.all(Pin)} == {"bob", "c-1"}
    assert [row.action for row in await cli_harness.all(Audit)] == ["pin.set"] * 4 + ["pin.removed"]


async def test_key_is_pinned_by_its_prefix(cli_harness: Harness) -> None:
    [key] = await cli_harness.all(ApiKey)
    output = json.loads(run(app, ["pin", "set", "0", "--key", f"{key.prefix}…", "--json"]).stdout)
    assert (output["kind"], output["subject"]) == ("key", key.id)


async def test_list_follows_all_pages(cli_harness: Harness) -> None:
    serving, policy = await cli_harness.serving(), await cli_harness.policy()
    same = {"project_id": policy.project_id, "policy_id": policy.id, "version_id": serving.id, "actor": "test"}
    async with cli_harness.db.write() as session:
        for number in range(101):
            session.add(Pin(id=f"pin-{number:032}", kind="user", subject=f"user-{number}", **same))
    rows = json.loads(run(app, ["pin", "list", "--json"]).stdout)
    assert {row["subject"] for row in rows} == {f"user-{number}" for number in range(101)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give exactly one of --user, --conversation and --key"),
        (["--user", "bob", "--key", "key-1"], "give exactly one of --user, --conversation and --key"),
        (["--key", "key-1"], "There is no such API key"),
    ],
)
async def test_invalid_pin_is_refused(cli_harness: Harness, options: list[str], message: str) -> None:
    answer = run(app, ["pin", "set", "0", *options])
    assert answer.exit_code == 1 and message in answer.output
    assert await cli_harness.all(Pin) == []


@pytest.mark.parametrize(("version", "message"), [("v9", "has no version v9"), ("latest", "12 or v12")])
async def test_unknown_version_is_refused(cli_harness: Harness, version: str, message: str) -> None:
    answer = run(app, ["pin", "set", version, "--user", "bob"])
    assert answer.exit_code != 0 and message in answer.output
