"""Commands deploy, canary, shadow and delivery."""

import json
import re

from app.cli.main import app
from app.models import VersionState
from tests.app.deployments.test_rollback import publish
from tests.support.cli import run
from tests.support.deployment import Harness


async def test_canary_is_deployed_shown_and_promoted(cli_harness: Harness) -> None:
    for _ in range(2):
        await publish(cli_harness)
    out = run(app, ["deploy", "v1", "--share", "0.1", "--reason", "kinder"]).output
    assert "shop@v2 serves" in out and "shop@v1 for 10.0% of the conversations, watched" in out
    shown = " ".join(run(app, ["canary", "show"]).output.split())
    assert "wait: not decided after" in shown
    assert "evidence that people approve of it less: 0% of what takes it back" in shown
    assert re.search(r"it is watched and ends by itself: in [\d,]+ s at the latest", shown)
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
    unwatched = run(app, ["deploy", "1", "--share", "0.1", "--no-watch"]).output
    assert "0% of what would end a watched one" in unwatched and "by itself" not in unwatched
    run(app, ["canary", "abort", "--reason", "too curt"])
    output = " ".join(run(app, ["canary", "show"]).output.split())
    assert "the last canary, shop@v1, was taken back at" in output and output.endswith(": too curt")
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
