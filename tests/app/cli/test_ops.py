"""Commands audit and versions: the audit's entries and their hash chain, and another load of a version that crashed."""

import asyncio
import json

from sqlalchemy import text

from app.cli.main import app
from app.engines import load_errors
from app.models import Engine
from app.ops import audit_chain
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.trained_versions import publish


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


async def test_version_that_crashed_an_engine_is_loaded_again(cli_harness: Harness) -> None:
    version = await publish(cli_harness)
    name = version.adapter_name or ""
    refused = await asyncio.to_thread(run, app, ["versions", "retry", name])
    assert refused.exit_code != 0 and "no engine has stopped to load" in str(refused.exception)
    async with cli_harness.db.write() as session:
        load_errors.record_crash(await session.get_one(Engine, "engine-0"), name, "f" * 64)
    answer = await asyncio.to_thread(run, app, ["versions", "retry", name])
    assert answer.exit_code == 0 and "1 engine(s)" in answer.output
    assert load_errors.count_crashes(await cli_harness.get(Engine, "engine-0"), name, "f" * 64) == 0
