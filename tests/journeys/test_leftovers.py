"""What killed test runs leave in PostgreSQL and Redis is found and removed, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from sqlalchemy import make_url

from tests.conftest import POSTGRES
from tests.journeys.brokers import LEASE, OwnRedis, take_database
from tests.support.old_databases import find_old_databases


def test_databases_are_found_by_their_names_and_age(postgres: str) -> None:
    with psycopg.connect(POSTGRES, autocommit=True) as server:
        name = make_url(postgres).database
        assert name in find_old_databases(server, max_age_seconds=-60.0)
        assert "test" not in find_old_databases(server, max_age_seconds=-60.0)
        assert name not in find_old_databases(server)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[redis.Redis]:
    """Yield a client of a database of a private Redis."""
    server = OwnRedis(tmp_path)
    server.start()
    yield redis.Redis.from_url(server.url)
    server.kill()


def test_database_of_a_killed_run_is_emptied_when_its_lease_is_over(client: redis.Redis) -> None:
    assert take_database(client)
    client.set("celery", "messages of the killed run")
    assert not take_database(client), "the run may be alive"
    client.delete(LEASE)  # as when it expires
    assert take_database(client)
    assert client.get("celery") is None and client.ttl(LEASE) > 0


def test_database_with_other_data_is_left_alone(client: redis.Redis) -> None:
    client.set("session", "of an application")
    assert not take_database(client)
    assert client.keys() == [b"session"]
