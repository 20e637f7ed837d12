"""Alembic migrations: expand, backfill, contract."""
