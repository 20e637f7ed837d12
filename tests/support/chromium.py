"""The machine's own Chromium, driven by Playwright."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright, expect

from tests.conftest import skip_or_fail

TIMEOUT_MS = 60_000  # after which what a page does not do fails a test, however busy the machine is


@asynccontextmanager
async def run_chromium() -> AsyncIterator[Browser]:
    """Run Chromium until the block ends. Skips the test where there is none."""
    chromium = shutil.which("chromium")
    if chromium is None:
        skip_or_fail("no chromium (Debian: apt-get install chromium)")
    expect.set_options(timeout=TIMEOUT_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        await browser.close()
