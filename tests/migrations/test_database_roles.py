"""The service's role on PostgreSQL writes rows, and can neither change tables nor switch off triggers."""

from collections.abc import Iterator
from typing import NamedTuple
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from app.cli.server import migrate_database
from app.core.settings import Settings
from tests.migrations import rows
from tests.migrations.test_migrations import connect

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("empty_database", ["postgres"], indirect=True),
]
FORBIDDEN = (
    "ALTER TABLE audit DISABLE TRIGGER ALL",
    "DROP TRIGGER audit_row ON audit",
    "ALTER TABLE audit DROP COLUMN reason",
    "ALTER TABLE audit OWNER TO CURRENT_USER",
    "CREATE OR REPLACE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NEW; END$$",
    "CREATE TRIGGER other BEFORE UPDATE ON audit FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()",
    "TRUNCATE audit",
    "DROP TABLE audit",
    "CREATE TABLE other (id int)",
    "SET session_replication_role = replica",
    "DELETE FROM alembic_version",
)


class Roles(NamedTuple):
    settings: Settings
    service_url: str


@pytest.fixture
def roles(empty_database: str) -> Iterator[Roles]:
    name = f"service_{uuid4().hex[:12]}"
    url = make_url(empty_database).set(username=name, password="it's-100%-secret").render_as_string(hide_password=False)
    yield Roles(Settings(database={"url": url, "owner_url": empty_database}), url)
    with psycopg.connect(empty_database.replace("+psycopg", ""), autocommit=True) as owner:
        role = sql.Identifier(name)
        if owner.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [name]).fetchone():
            owner.execute(sql.SQL("DROP OWNED BY {role}").format(role=role))
            owner.execute(sql.SQL("DROP ROLE {role}").format(role=role))


def test_service_role_writes_rows_and_changes_no_table(roles: Roles) -> None:
    migrate_database(roles.settings)
    with connect(roles.service_url) as service:
        rows.insert_rows(service, "mark")
    with psycopg.connect(roles.service_url.replace("+psycopg", ""), autocommit=True) as service:
        for statement in FORBIDDEN:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                service.execute(statement)
        with pytest.raises(psycopg.errors.RaiseException, match="cannot be changed"):
            service.execute("UPDATE audit SET actor = 'other'")
        assert service.execute("SELECT count(*) FROM audit").fetchone() == (1,)


def test_roles_are_granted_again_after_an_upgrade(roles: Roles) -> None:
    migrate_database(roles.settings)
    with psycopg.connect(roles.settings.owner_database_url.replace("+psycopg", ""), autocommit=True) as owner:
        owner.execute("CREATE TABLE later (id int)")
    migrate_database(roles.settings)
    with psycopg.connect(roles.service_url.replace("+psycopg", "")) as service:
        service.execute("INSERT INTO later VALUES (1)")


def test_service_role_that_may_change_tables_is_refused(roles: Roles, empty_database: str) -> None:
    with pytest.raises(ValueError, match="neither a superuser nor their owner"):
        migrate_database(Settings(database={"url": empty_database, "owner_url": empty_database}))
