"""`attune policies`: create, show, update, pause, archive and delete."""

import json
from pathlib import Path

from app.cli.main import app
from tests.support.cli import run
from tests.support.deployment import Harness


async def test_policy_is_created_from_a_file_and_options_and_changed(cli_harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('algorithm = "kto"\n[trainer]\nbatch_size = 4\n[trainer.optim]\nlr = 1e-3\n')
    options = ["--from-file", str(file), "--set", "trainer.optim.lr=2e-3", "--set", "algorithm.beta=0.3"]
    out = run(app, ["policies", "create", "support", *options, "--traffic-from", "shop", "--share", "0.25"]).output
    assert "support is active: serves support@v0, trains from support@v0, answers 25% of shop" in out
    own = ["algorithm.type", "algorithm.beta", "trainer.batch_size", "trainer.optim.lr"]
    assert all(f"  {path} = " in out for path in own) and "trainer.optim.lr = 0.002" in out
    assert 'algorithm.type = "kto"  # its own' in run(app, ["policies", "show", "support"]).output
    listed = " ".join(run(app, ["policies", "list"]).output.split())
    assert "support" in listed and "shop@v0" in listed and "25% of shop" in listed

    changes = ["--unset", "trainer.batch_size", "--set", "algorithm=dpo", "--own-traffic"]
    view = json.loads(run(app, ["policies", "update", "support", *changes, "--json"]).stdout)
    assert (view["own"], view["traffic"]) == (["algorithm.type", "trainer.optim.lr"], None)
    wrong = run(app, ["policies", "update", "support", "--set", "trainer.lora.r=4"])
    assert wrong.exit_code == 1 and "it cannot differ between policies" in wrong.output
    for arguments, message in (
        (["--set", "trainer.batch_size"], "must be SETTING=VALUE"),
        (["--share", "0.1"], "belong together"),
        ([], "nothing to change"),
    ):
        refused = run(app, ["policies", "update", "support", *arguments])
        assert refused.exit_code == 1 and message in refused.output


async def test_policy_is_paused_archived_and_deleted(cli_harness: Harness) -> None:
    run(app, ["policies", "create", "support"])
    for verb, state in (
        ("pause", "paused (a trial)"),
        ("resume", "active (a trial)"),
        ("archive", "archived (a trial)"),
        ("unarchive", "active (a trial)"),
        ("archive", "archived (a trial)"),
    ):
        assert f"support is {state}" in run(app, ["policies", verb, "support", "--reason", "a trial"]).output
    assert "support" not in run(app, ["policies", "list"]).output
    assert "support" in run(app, ["policies", "list", "--archived"]).output
    assert run(app, ["policies", "delete", "support"], input="n\n").exit_code == 1
    assert "support is deleted" in run(app, ["policies", "delete", "support", "--yes"]).output
