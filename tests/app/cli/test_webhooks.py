"""`attune webhooks`: endpoints and deliveries from the command line."""

import json

from app.cli.main import app
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.webhooks import create_deliveries, make_due, pause_training


async def test_webhook_is_created_changed_and_deleted(cli_harness: Harness) -> None:
    created = run(app, ["webhooks", "create", "https://hooks.example/a", "--event", "training.halted", "--json"])
    assert created.exit_code == 0, created.output
    row = json.loads(created.stdout)
    assert row["events"] == ["training.halted"] and row["secret"].startswith("whsec_")
    await pause_training(cli_harness)
    await create_deliveries(cli_harness)
    await make_due(cli_harness)
    deliveries = json.loads(run(app, ["webhooks", "deliveries", row["id"], "--json"]).stdout)
    assert [one["event"] for one in deliveries] == ["training.halted"]
    again = run(app, ["webhooks", "redeliver", row["id"], deliveries[0]["id"]])
    assert again.exit_code == 0 and "is sent again" in again.output
    rotated = run(app, ["webhooks", "rotate-secret", row["id"]])
    assert "whsec_" in rotated.output and row["secret"] not in rotated.output
    assert "disabled" in run(app, ["webhooks", "disable", row["id"]]).output
    assert "enabled" in run(app, ["webhooks", "enable", row["id"]]).output
    assert "hooks.example/b" in run(app, ["webhooks", "update", row["id"], "--url", "https://hooks.example/b"]).output
    assert row["id"] in run(app, ["webhooks", "list", "--json"]).output
    assert "is deleted" in run(app, ["webhooks", "delete", row["id"]]).output
    assert json.loads(run(app, ["webhooks", "list", "--json"]).stdout) == []
