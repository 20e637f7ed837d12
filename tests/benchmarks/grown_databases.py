"""PostgreSQL databases of several sizes, for benchmarks of what grows with the turns."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg

from app.core.migrate import upgrade
from app.core.settings import Settings

SERVER = os.environ.get("ATTUNE_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/test")


def database_url(name: str) -> str:
    """Return the URL of the server's database of this name, as settings take it."""
    return SERVER.rpartition("/")[0].replace("postgresql://", "postgresql+psycopg://") + f"/{name}"


def add_arguments(parser: argparse.ArgumentParser, turns: list[int]) -> None:
    """Add the options that `iterate_databases` reads; `turns` are the default sizes."""
    parser.add_argument("--turns", nargs="+", type=int, default=turns)
    parser.add_argument("--keep", action="store_true", help="do not drop the databases")
    parser.add_argument("--existing", nargs="+", default=[], help="measure these databases, which were kept before")


def iterate_databases(
    args: argparse.Namespace, prefix: str, prepare: Callable[[Settings, int], Awaitable[object]]
) -> Iterator[tuple[str, Settings]]:
    """Yield the name and the settings of each database: new ones that `prepare` has filled, or existing ones.

    A new one is dropped when the next is asked for, unless it is kept.
    """
    databases = [(name, None) for name in args.existing] or [(f"{prefix}_{turns}", turns) for turns in args.turns]
    with TemporaryDirectory() as home, psycopg.connect(SERVER, autocommit=True) as server:
        for name, turns in databases:
            url = database_url(name)
            settings = Settings(
                database={"url": url}, policy="shop", home=Path(home), workers={"reconcile_seconds": 3600}
            )
            try:
                if turns is not None:
                    server.execute(f"CREATE DATABASE {name}")
                upgrade(url)
                if turns is not None:
                    asyncio.run(prepare(settings, turns))
                yield name, settings
            finally:
                if turns is not None and not args.keep:
                    server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
