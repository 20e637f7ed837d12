"""A page of the console in Chromium: signs in, checks accessibility and width, and collects the errors."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, BrowserContext, Page

from tests.support.chromium import TIMEOUT_MS

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
RUN_AXE = "async () => (await axe.run()).violations.map(({ id, nodes }) => [id, nodes.map((node) => node.html)])"
# The elements that reach beyond the right edge of a page that scrolls sideways.
FIND_WIDE = """() => {
  const { scrollWidth, clientWidth } = document.documentElement;
  if (scrollWidth <= clientWidth) return [];
  const isWide = (one) => one.getBoundingClientRect().right > clientWidth + 1;
  const wide = [...document.querySelectorAll("body *")].filter(isWide);
  return [`${scrollWidth} px`, ...wide.map((one) => one.outerHTML.slice(0, 120))];
}"""
# Where screenshots are written, for the documentation; without it there are none.
SCREENSHOTS = os.environ.get("ATTUNE_TEST_SCREENSHOTS")


@dataclass
class ConsolePage:
    page: Page
    url: str
    problems: list[str] = field(default_factory=list)  # errors in the browser's console, CSP violations included

    @property
    def context(self) -> BrowserContext:
        return self.page.context

    async def open(self, path: str = "") -> None:
        """Go to a page of the console, whose status must be 200."""
        answer = await self.page.goto(f"{self.url}/console/{path}")
        assert answer is not None and answer.status == 200, f"{path}: {answer and answer.status}"

    async def sign_in(self, key: str) -> None:
        await self.open("sign-in")
        await self.page.get_by_label("API key").fill(key)
        await self.page.keyboard.press("Enter")
        await self.page.wait_for_url("**/console/")

    async def find_violations(self) -> list[Any]:
        """Return the rules of axe-core that the page violates, with the elements."""
        await self.page.evaluate(AXE)
        violations: list[Any] = await self.page.evaluate(RUN_AXE)
        return violations

    async def find_wide(self) -> list[str]:
        """Return the elements that make the page scroll sideways."""
        wide: list[str] = await self.page.evaluate(FIND_WIDE)
        return wide

    async def screenshot(self, name: str) -> None:
        if SCREENSHOTS is not None:
            await self.page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)


async def open_page(browser: Browser, url: str, **options: Any) -> ConsolePage:
    context = await browser.new_context(viewport={"width": 1280, "height": 860}, **options)
    page = await context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    console = ConsolePage(page, url)
    page.on("console", lambda message: console.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: console.problems.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith((url, "data:")) else console.problems.append(request.url),
    )
    return console
