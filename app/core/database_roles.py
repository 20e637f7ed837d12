"""Two roles on PostgreSQL: one owns the tables, the service's own reads and writes rows and can change no table.

Whoever holds the service's password can so neither drop nor switch off the triggers that keep the audit log.
"""

from sqlalchemy import Connection, create_engine, literal, make_url, text
from sqlalchemy.pool import NullPool

from app.core.database_url import blocking_url
from app.core.settings import Settings

READ_ONLY = ("alembic_version", "schema_compatibility")
GRANTS = (
    "GRANT USAGE ON SCHEMA public TO {role}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
    "GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA public TO {role}",
    "REVOKE CREATE ON SCHEMA public FROM PUBLIC, {role}",
)


def grant_service(settings: Settings) -> None:
    """Let the service's role read and write the tables that the owner's role has created, and create it if missing.

    Without `database.owner_url` one role does everything, and nothing happens. Raises ValueError if the service's role
    could change tables nevertheless.
    """
    owner_url = settings.database.owner_url
    if owner_url is None:
        return
    service = make_url(settings.database_url)
    if not service.drivername.startswith("postgresql") or service.username is None:
        raise ValueError("database.owner_url needs a database.url of PostgreSQL with the user of the service")
    engine = create_engine(blocking_url(owner_url), poolclass=NullPool)
    with engine.begin() as connection:
        _create_role(connection, service.username, service.password)
        _require_no_rights(connection, service.username)
        role = _quote(connection, service.username)
        for grant in GRANTS:
            connection.exec_driver_sql(grant.format(role=role))
        for table in READ_ONLY:
            connection.exec_driver_sql(f"REVOKE INSERT, UPDATE, DELETE ON {table} FROM {role}")


def _create_role(connection: Connection, name: str, password: str | None) -> None:
    exists = text("SELECT count(*) FROM pg_roles WHERE rolname = :name")
    if connection.scalar(exists, {"name": name}) == 0:
        value = literal(password or "").compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
        connection.exec_driver_sql(f"CREATE ROLE {_quote(connection, name)} LOGIN PASSWORD {value}")


def _require_no_rights(connection: Connection, name: str) -> None:
    """Raise ValueError if the role is a superuser, or is or may become the owner of a table."""
    may_change = text("""
        SELECT rolsuper OR EXISTS (
            SELECT 1 FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'
            AND pg_has_role(:name, relowner, 'MEMBER'))
        FROM pg_roles WHERE rolname = :name
    """)
    if connection.scalar(may_change, {"name": name}):
        raise ValueError(
            f"the role '{name}' of database.url may change the tables: it must be neither a superuser nor their owner, "
            "nor a member of the owner"
        )


def _quote(connection: Connection, name: str) -> str:
    return connection.dialect.identifier_preparer.quote_identifier(name)
