"""Fixtures: a fork server, which imports all modules before it forks, and a proxy in front of PostgreSQL."""

from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import make_url

from tests.faults.suite.fork_server_client import ForkServerClient
from tests.faults.suite.proxy import Proxy
from tests.support.deployment import Harness


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServerClient]:
    server = ForkServerClient.open()
    yield server
    server.close()


@pytest.fixture
async def proxy(harness: Harness) -> AsyncIterator[Proxy]:
    async with Proxy(make_url(harness.settings.database_url).port or 5432) as proxy:
        yield proxy
