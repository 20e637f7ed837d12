"""The console in Chromium, over HTTP from this machine."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from app.main import create_app
from tests.support.chromium import run_chromium
from tests.support.console_browser import ConsolePage, open_page
from tests.support.deployment import Harness
from tests.support.scripted_engine import serve


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """Return SQLite's alone: a browser cannot see which database the service has."""
    return sqlite_url


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with run_chromium() as browser:
        yield browser


@pytest.fixture
async def console(harness: Harness, browser: Browser) -> AsyncIterator[ConsolePage]:
    """Yield a page of the console that is not signed in. The test fails if a page logs an error."""
    with serve(create_app(harness.settings), lifespan="on") as url:
        page = await open_page(browser, url)
        yield page
        await page.context.close()
    assert page.problems == []
