"""`attune backup`: create, verify and restore from the command line."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from app.cli.main import app
from app.core.settings import get_settings
from app.models import Base
from tests.support.backups import create_sealed_version, empty_home
from tests.support.cli import run
from tests.support.deployment import Harness


@pytest.mark.parametrize(
    "url", ["sqlite+aiosqlite:///{home}/bad.db", "postgresql+psycopg://postgres@127.0.0.1:1/attune"]
)
def test_error_of_the_database_is_one_sentence(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.db").write_text("no database" * 1000)
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setenv("ATTUNE_DATABASE__URL", url.format(home=tmp_path))
    get_settings.cache_clear()
    failed = run(app, ["backup", "create", str(tmp_path / "one")])
    get_settings.cache_clear()
    assert isinstance(failed.exception, SystemExit)
    message = str(failed.exception)
    assert message.startswith("attune: the database cannot be used: ") and "check ATTUNE_DATABASE__URL" in message
    assert "\n" not in message


async def test_file_that_cannot_be_copied_is_one_sentence(
    cli_harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_sealed_version(cli_harness, 1, live=True)

    def fail(source: Path, *args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(source))

    monkeypatch.setattr("app.ops.backup.copy_file", fail)
    failed = run(app, ["backup", "create", str(tmp_path / "one")])
    assert isinstance(failed.exception, SystemExit)
    assert str(failed.exception).endswith(": No space left on device") and "\n" not in str(failed.exception)
    assert not (tmp_path / "one").exists() and list(tmp_path.glob(".attune-backup-*")) == []


async def test_backup_without_a_policy_names_no_base_model(cli_harness: Harness, tmp_path: Path) -> None:
    async with cli_harness.db.write() as session:
        for table in reversed(Base.metadata.sorted_tables):
            await session.execute(delete(table))
    created = run(app, ["backup", "create", str(tmp_path / "one")])
    assert created.exit_code == 0, created.output
    assert "not in it: the settings and the encryption keys" in created.stdout


async def test_backup_is_created_verified_and_restored(
    cli_harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await create_sealed_version(cli_harness, 1, live=True)
    assert run(app, ["webhooks", "create", "https://hooks.example"]).exit_code == 0
    folder = tmp_path / "back ups" / "mon'day"
    created = run(app, ["backup", "create", str(folder), "--json"])
    assert created.exit_code == 0, created.output
    row = json.loads(created.stdout)
    assert (row["rows"]["versions"], row["artifacts"], row["absent"]) == (2, 1, {})
    verified = run(app, ["backup", "verify", str(folder)])
    assert verified.exit_code == 0 and "every file is intact" in verified.stdout
    [key] = row["webhook_secrets"]
    assert f"signing secrets of webhooks: 1 encrypted with the key {key}" in " ".join(verified.stdout.split())
    with empty_home(cli_harness.settings, tmp_path / "other") as settings:
        monkeypatch.setenv("ATTUNE_HOME", str(settings.home))
        monkeypatch.setenv("ATTUNE_DATABASE__URL", settings.database_url)
        get_settings.cache_clear()
        restored = run(app, ["backup", "restore", str(folder)])
        assert restored.exit_code == 0 and "restored" in restored.stdout, restored.output
        output = " ".join(restored.stdout.split())
        assert f"the encryption key {key} is not here" in output and "attune webhooks rotate-secret" in output
        assert (settings.versions_dir / Path(version.adapter_path or "").name).is_dir()
        again = run(app, ["backup", "restore", str(folder)])
        assert again.exit_code != 0 and "empty" in str(again.exception)
    (folder / "versions" / Path(version.adapter_path or "").name / "manifest.json").unlink()
    damaged = run(app, ["backup", "verify", str(folder)])
    assert damaged.exit_code == 1 and "manifest.json is missing" in damaged.stdout
