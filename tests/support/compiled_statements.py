"""Compiled statements of tests, which all databases of a process share, as all requests of a deployment do.

Each test opens a database of its own. With a cache of its own, it would compile every statement again, which takes
more than a third of the processor time of tests with a database.
"""

from functools import partial

from sqlalchemy import create_engine
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg, PGDialectAsync_psycopg
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.engine.interfaces import CompiledCacheType
from sqlalchemy.ext.asyncio import create_async_engine

from app.core import database

DIALECTS = (PGDialect_psycopg, PGDialectAsync_psycopg, SQLiteDialect_pysqlite, SQLiteDialect_aiosqlite)


def share_compiled_statements() -> None:
    """Let all databases that this process opens use one cache of compiled statements."""
    cache: CompiledCacheType = {}
    for create in (create_engine, create_async_engine):
        setattr(database, create.__name__, partial(create, execution_options={"compiled_cache": cache}))
    # The dialect is a part of each key, also in the caches of mappers. All of one class have the same options here.
    for dialect in DIALECTS:
        for name, method in (("__eq__", _is_same_dialect), ("__hash__", _hash_dialect)):
            setattr(dialect, name, method)


def _is_same_dialect(self: Dialect, other: object) -> bool:
    return type(self) is type(other)


def _hash_dialect(self: Dialect) -> int:
    return hash(type(self))
