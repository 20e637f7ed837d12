"""Empty databases of both kinds, for the migrations."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from tests.conftest import POSTGRES, skip_or_fail


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path}/attune.db"
        return
    name = f"attune_{uuid4().hex[:12]}"
    try:
        server = psycopg.connect(POSTGRES, autocommit=True, connect_timeout=3)
    except psycopg.OperationalError as error:
        skip_or_fail(f"no PostgreSQL at {POSTGRES} ({error})")
    server.execute(f"CREATE DATABASE {name}")
    yield POSTGRES.rpartition("/")[0].replace("postgresql://", "postgresql+psycopg://") + f"/{name}"
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")
    server.close()
