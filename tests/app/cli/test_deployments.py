"""Commands deploy, canary, shadow, delivery and pin."""

import asyncio
import json
import re

import pytest

from app.cli.main import app
from app.models import ApiKey, Audit, Pin, VersionState
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.trained_versions import publish


async def test_canary_is_deployed_shown_and_promoted(cli_harness: Harness) -> None:
    for _ in range(2):
        await publish(cli_harness)
    out = run(app, ["deploy", "v1", "--share", "0.1", "--reason", "kinder"]).output
    assert "shop@v2 serves" in out and "shop@v1 for 10.0% of the conversations, watched" in out
    output = " ".join(run(app, ["canary", "show"]).output.split())
    assert "wait: not decided after" in output
    assert "evidence that people approve of it less: 0% of the amount for a rollback" in output
    assert re.search(r"it is watched and ends by itself: in [\d,]+ s at the latest", output)
    assert "canary: shop@v1 for 10.0% of the conversations" in run(app, ["status"]).output
    assert json.loads(run(app, ["canary", "promote", "--json"]).stdout)["serving"] == "shop@v1"
    output = " ".join(run(app, ["canary", "show"]).output.split())
    assert "the last canary, shop@v1, went live at" in output
    none = run(app, ["canary", "abort"])
    assert none.exit_code == 1 and "Policy 'shop' has no canary." in none.output


async def test_canary_show_explains_how_the_last_canary_ended(cli_harness: Harness) -> None:
    assert "the last canary" not in run(app, ["canary", "show"]).output
    for _ in range(2):
        await publish(cli_harness)
    output_without_watch = run(app, ["deploy", "1", "--share", "0.1", "--no-watch"]).output
    assert (
        "0% of the amount for a decision, if it were watched" in output_without_watch
        and "by itself" not in output_without_watch
    )
    run(app, ["canary", "abort", "--reason", "too curt"])
    output = " ".join(run(app, ["canary", "show"]).output.split())
    assert "the last canary, shop@v1, was rolled back at" in output and output.endswith(": too curt")
    assert "canary" in json.loads(run(app, ["canary", "show", "--json"]).stdout)


async def test_deploy_by_version_number(cli_harness: Harness) -> None:
    for _ in range(2):
        await publish(cli_harness)
    assert "shop@v1 serves; conversations follow; new versions: at once" in run(app, ["deploy", "1"]).output
    for wrong, message in (("latest", "is not a version number"), ("7", "has never served a version v7")):
        refused = run(app, ["deploy", wrong])
        assert refused.exit_code != 0 and message in " ".join(refused.output.split())


async def test_shadow_deployment_is_shown_and_aborted(cli_harness: Harness) -> None:
    version = await cli_harness.version(VersionState.SHADOW, shadow_since=0.0)
    out = run(app, ["shadow", "show"]).output
    assert "shop@v0 serves" in out and "shop@v1 runs in shadow beside 20.0% of the replies" in " ".join(out.split())
    assert "runs in shadow: shop@v1 (attune shadow show)" in run(app, ["status"]).output
    assert "lapse: no reward source of the policy can score" in " ".join(out.split())
    ended = json.loads(run(app, ["shadow", "abort", "--reason", "too bold", "--json"]).stdout)
    row = await cli_harness.get(type(version), version.id)
    assert ended["shadow"] is None and (row.state, row.reason) == (VersionState.REJECTED, "too bold")
    none = run(app, ["shadow", "promote"])
    assert none.exit_code == 1 and "No version of 'shop' is in shadow." in none.output


async def test_delivery_is_shown_and_set_by_option(cli_harness: Harness) -> None:
    assert "conversations follow; new versions: at once" in run(app, ["delivery"]).output
    output = run(app, ["delivery", "--canary", '{"share": 0.05, "min_rated": 50}']).output
    assert "each new version answers 5.0% first" in output
    row = json.loads(run(app, ["delivery", "--conversations", "sticky", "--json"]).stdout)
    assert (row["conversations"], row["canary_overridden"], row["canary_config"]["min_rated"]) == (
        "sticky",
        True,
        50,
    )
    assert "at once" in run(app, ["delivery", "--canary", "default"]).output
    output = run(app, ["delivery", "--shadow", '{"share": 0.5, "min_rated": 0}']).output
    assert "new versions: a shadow deployment beside 50.0% of the replies, then at once" in output
    row = json.loads(run(app, ["delivery", "--canary", '{"share": 0.05}', "--json"]).stdout)
    assert (row["shadow_overridden"], row["shadow_config"]["share"], row["canary_config"]["share"]) == (
        True,
        0.5,
        0.05,
    )
    assert "shadow" not in run(app, ["delivery", "--shadow", "default"]).output
    refused = run(app, ["delivery", "--shadow", "{}"])
    assert refused.exit_code == 1 and "No version could run in shadow" in refused.output
    for option, wrong, message in (
        ("--canary", "{", "is not valid JSON"),
        ("--canary", '{"share": 2}', "share"),
        ("--shadow", "{", "--shadow is not valid JSON"),
    ):
        refused = run(app, ["delivery", option, wrong])
        assert refused.exit_code == 1 and message in refused.output
    refused = run(app, ["delivery", "--conversations", "sometimes"])
    assert refused.exit_code == 1 and "conversations" in refused.output


async def test_user_is_pinned_moved_listed_and_unpinned(cli_harness: Harness) -> None:
    await cli_harness.version(VersionState.SUPERSEDED)
    output = run(app, ["pin", "set", "v0", "--user", "team [red]/ada", "--reason", "a [dim] tester"]).output
    assert output.strip() == "user team [red]/ada is pinned to shop@v0"
    moved = json.loads(run(app, ["pin", "set", "1", "--user", "team [red]/ada", "--policy", "shop", "--json"]).stdout)
    assert (moved["version"], moved["loaded"]) == ("shop@v1", False)
    run(app, ["pin", "set", "0", "--conversation", "c-1", "--reason", "a [dim] trial"])
    not_loaded = run(app, ["pin", "set", "v1", "--user", "bob"]).output
    assert "bob is pinned to shop@v1; it is not loaded yet" in not_loaded
    rows = json.loads(run(app, ["pin", "list", "--json"]).stdout)
    assert [row["subject"] for row in rows] == ["bob", "c-1", "team [red]/ada"], "the newest pin is first"
    output = run(app, ["pin", "list"]).output
    assert "user team [red]/ada" in output and "a [dim] trial" in output and "not yet" in output
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


async def test_dry_run_of_a_rollback_changes_nothing(cli_harness: Harness) -> None:
    await publish(cli_harness)
    result = await asyncio.to_thread(run, app, ["rollback", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "shop@v1 → shop@v0" in result.output and "training would continue from shop@v0" in result.output
    assert (await cli_harness.serving()).number == 1
    result = await asyncio.to_thread(run, app, ["rollback", "--dry-run", "--to", "1"])
    assert "nothing would change: shop@v1 serves" in result.output
