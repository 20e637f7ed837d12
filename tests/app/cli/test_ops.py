"""Command audit: the list of entries, and the verification of their hash chain."""

import json

from sqlalchemy import text

from app.cli.main import app
from app.ops import audit_chain
from tests.support.cli import run
from tests.support.deployment import Harness


async def test_audit_is_verified(cli_harness: Harness) -> None:
    for verb in ("pause", "resume"):
        assert run(app, ["train", verb, "--reason", "why"]).exit_code == 0
    assert "0 entries are intact, 2 wait to be sealed" in run(app, ["audit", "verify"]).output
    await audit_chain.seal_entries(cli_harness.db)
    body = json.loads(run(app, ["audit", "verify", "--json"]).stdout)
    assert (body["ok"], body["entries"]) == (True, 2)
    result = run(app, ["audit", "verify", "--known-hash", body["head"]])
    assert result.exit_code == 0 and f"2 entries are intact, 0 wait to be sealed; head {body['head']}" in result.output
    assert "training.halted shop why" in run(app, ["audit", "--limit", "5"]).output


async def test_changed_entry_ends_with_an_error(cli_harness: Harness) -> None:
    assert run(app, ["train", "pause"]).exit_code == 0
    await audit_chain.seal_entries(cli_harness.db)
    async with cli_harness.db.write() as session:
        if cli_harness.db.embedded:
            await session.execute(text("DROP TRIGGER audit_update"))
        else:
            await session.execute(text("SET LOCAL session_replication_role = replica"))
        await session.execute(text("UPDATE audit SET actor = 'nobody'"))
    result = run(app, ["audit", "verify"])
    assert result.exit_code == 1 and "entry 1: it was changed or moved" in result.output
    result = run(app, ["audit", "verify", "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["number"] == 1
