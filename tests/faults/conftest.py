"""One parent process that these tests fork from, so that imports happen once; and a proxy in front of PostgreSQL."""

from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import make_url

from tests.faults.suite.nursery import Nursery
from tests.faults.suite.proxy import Proxy
from tests.support.deployment import Harness


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    opened = Nursery.open()
    yield opened
    opened.close()


@pytest.fixture
async def door(harness: Harness) -> AsyncIterator[Proxy]:
    async with Proxy(make_url(harness.settings.database).port or 5432) as door:
        yield door
