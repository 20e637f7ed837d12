"""A process starts only on a schema that its code can use, and no process but `attune db upgrade` migrates."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
import uvicorn
from alembic import command

from app.cli import server
from app.cli.main import app
from app.core.migrate import alembic_config, downgrade, require_compatible_schema, upgrade
from app.core.settings import get_settings
from tests.migrations.extra import NewerRelease, head_revision
from tests.migrations.test_migrations import REVISIONS, connect
from tests.support.cli import run

ROLES = (["serve"], ["engine"], ["worker", "--queue", "judge"], ["trainer"])
EXPAND = 'op.add_column("projects", sa.Column("plan", sa.String(20)))'


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, empty_database: str, tmp_path: Path) -> Iterator[list[str]]:
    """Return the list of roles that have begun to run on the empty database; nothing is really started."""
    started: list[str] = []
    monkeypatch.setattr(server, "exec_module", lambda *command: started.append(command[0]))
    monkeypatch.setattr(uvicorn.Server, "run", lambda *args, **options: started.append("api"))
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setenv("ATTUNE_DATABASE__URL", empty_database)
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    get_settings.cache_clear()
    yield started
    get_settings.cache_clear()


def num_tables(url: str) -> int:
    with connect(url) as connection:
        return len(sa.inspect(connection).get_table_names())


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role[0])
def test_role_refuses_an_empty_database_and_does_not_migrate(
    role: list[str], started: list[str], empty_database: str
) -> None:
    refused = run(app, role)
    assert isinstance(refused.exception, ValueError) and "run `attune db upgrade` first" in str(refused.exception)
    assert started == [] and num_tables(empty_database) == 0
    assert run(app, ["db", "upgrade"]).exit_code == 0
    assert run(app, role).exit_code == 0 and len(started) == 1


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role[0])
def test_role_refuses_the_schema_of_an_older_release(role: list[str], started: list[str], empty_database: str) -> None:
    command.upgrade(alembic_config(empty_database), REVISIONS[-2])
    refused = run(app, role)
    expected = f"schema {REVISIONS[-2]} and this release needs {REVISIONS[-1]}: run `attune db upgrade` first"
    assert expected in str(refused.exception) and started == []
    run(app, ["db", "upgrade"])
    assert run(app, role).exit_code == 0 and len(started) == 1


def test_refusal_is_one_sentence(tmp_path: Path) -> None:
    environment = {**os.environ, "ATTUNE_HOME": str(tmp_path), "ATTUNE_DATABASE__URL": ""}
    environment["ATTUNE_DATABASE__URL"] = f"sqlite+aiosqlite:///{tmp_path}/attune.db"
    process = [sys.executable, "-m", "app.cli.main", "serve"]
    result = subprocess.run(process, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr == "attune: the database has no tables yet: run `attune db upgrade` first\n"
    assert not (tmp_path / "attune.db").exists()


def test_unreachable_database_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the database cannot be reached"):
        require_compatible_schema("postgresql+psycopg://postgres@127.0.0.1:9/nothing")


def test_code_runs_on_the_schema_of_a_newer_release_that_only_expands(empty_database: str, tmp_path: Path) -> None:
    newer = NewerRelease(empty_database, tmp_path / "versions")
    newer.add(EXPAND, 'op.drop_column("projects", "plan")')
    newer.add('op.create_table("plans", sa.Column("id", sa.String(20), primary_key=True))', 'op.drop_table("plans")')
    newer.upgrade()
    require_compatible_schema(empty_database)
    upgrade(empty_database)  # as `attune up` and the set-up service of an older release do when it starts again
    assert revision_of(empty_database) == "newer_2"
    newer.downgrade(head_revision())
    require_compatible_schema(empty_database)
    command.check(alembic_config(empty_database))


def test_code_refuses_the_schema_of_a_newer_release_that_takes_something_away(
    empty_database: str, tmp_path: Path
) -> None:
    newer = NewerRelease(empty_database, tmp_path / "versions")
    newer.add(EXPAND)
    newer.add('op.drop_column("projects", "token_secret")', header='oldest_code = "newer_1"')
    newer.add('op.create_table("plans", sa.Column("id", sa.String(20), primary_key=True))')
    newer.upgrade()
    for refused in (require_compatible_schema, upgrade):
        with pytest.raises(ValueError, match=r"schema newer_3 of a newer release, .* install the newer release"):
            refused(empty_database)


def test_downgrade_takes_one_migration_after_the_other_back(empty_database: str) -> None:
    upgrade(empty_database)
    downgrade(empty_database, REVISIONS[-2])
    assert revision_of(empty_database) == REVISIONS[-2]
    with pytest.raises(ValueError, match=r"no migration 'unknown'; this release has 20261123_0400, .*0900"):
        downgrade(empty_database, "unknown")


def revision_of(url: str) -> str | None:
    with connect(url) as connection:
        return connection.scalar(sa.text("SELECT version_num FROM alembic_version"))


def test_unknown_schema_without_a_record_is_refused(empty_database: str) -> None:
    upgrade(empty_database)
    with connect(empty_database) as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'unknown'"))
    with pytest.raises(ValueError, match="schema unknown of a newer release"):
        require_compatible_schema(empty_database)
