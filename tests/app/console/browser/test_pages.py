"""Pages in Chromium: no error and no CSP report, axe-core finds nothing, 390 px are wide enough, and keys do all."""

from typing import Literal

import httpx2
import pytest
from playwright.async_api import Page, ViewportSize, expect

from app.models import Feedback
from tests.support.console_browser import ConsolePage
from tests.support.console_data import add_history
from tests.support.deployment import Harness

PAGES = {
    "overview": "",
    "live": "live",
    "conversation": "conversations/talk-v3-1",
    "annotate": "annotate",
    "versions": "versions",
    "version": "versions/3",
    "comparison": "versions/compare?a=0&b=6",
    "release": "release",
    "rollback": "release/rollback?to=4",
    "learning": "learning",
    "settings": "settings",
}
NARROW, WIDE = ViewportSize(width=390, height=844), ViewportSize(width=1280, height=860)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
async def test_pages_are_accessible_and_fit_a_telephone(
    harness: Harness, console: ConsolePage, scheme: Literal["light", "dark"]
) -> None:
    await add_history(harness)
    await console.page.emulate_media(color_scheme=scheme)
    await console.open("sign-in")
    assert await console.find_violations() == []
    await console.screenshot(f"sign-in-{scheme}")
    await console.sign_in(harness.key)
    for name, path in PAGES.items():
        await console.page.set_viewport_size(WIDE)
        await console.open(path)
        await expect(console.page.get_by_role("heading", level=1)).to_be_visible()
        assert await console.find_violations() == [], name
        await console.screenshot(f"{name}-{scheme}")
        await console.page.set_viewport_size(NARROW)
        assert await console.find_wide() == [], name
        await console.screenshot(f"{name}-{scheme}-narrow")
    assert console.problems == []


async def expect_page(page: Page, heading: str) -> None:
    """Wait for a page with this heading, and until its scripts have run: keys that are pressed before do nothing."""
    await expect(page.get_by_role("heading", name=heading, exact=True).first).to_be_visible()
    await page.wait_for_load_state("load")


async def test_link_keys_labels_and_a_rollback_by_keyboard(harness: Harness, console: ConsolePage) -> None:
    """A person with a keyboard signs in by a link, labels a reply, and rolls back."""
    await add_history(harness, talks_by_version=2)
    page, press = console.page, console.page.keyboard.press
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=console.url, headers=headers) as http:
        link = (await http.post("/v1/console/links")).json()["url"]
    await page.goto(link)
    await page.wait_for_url("**/console/")
    await page.wait_for_load_state("load")
    assert "link=" not in page.url
    await press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await press("Escape")
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    await press("g")
    await press("v")
    await expect_page(page, "Versions")
    await expect(page.locator("canvas").first).to_be_visible()
    before = len(await harness.all(Feedback))
    await press("3")
    await expect_page(page, "Is this reply good?")
    await press("u")
    await expect(page.get_by_role("status")).to_have_text("Saved.")
    assert len(await harness.all(Feedback)) == before + 1
    await press("z")
    await expect(page.get_by_role("status")).to_have_text("Taken back.")
    await press("g")
    await press("r")
    await expect_page(page, "Release")
    await press("b")
    await expect_page(page, "Roll back to v5?")
    button = page.get_by_role("button", name="Roll back to v5")
    await expect(button).to_be_disabled()
    await page.get_by_label("Reason").fill("v6 is rude")
    await page.get_by_label("to confirm").fill("v5")
    await expect(button).to_be_enabled()
    await press("Enter")
    await expect(page.get_by_role("status")).to_contain_text("shop@v5 serves.")
    assert (await harness.serving()).number == 5
    assert console.problems == []


async def test_live_list_shows_new_replies_by_itself(harness: Harness, console: ConsolePage) -> None:
    await harness.turn(own_messages=[{"role": "user", "content": "the first question"}])
    await console.sign_in(harness.key)
    await console.open("live")
    await expect(console.page.get_by_text("the first question")).to_be_visible()
    script = "<script>document.title = 'stolen'</script>"
    await harness.turn(own_messages=[{"role": "user", "content": f"the second question {script}"}])
    await expect(console.page.get_by_text("the second question")).to_be_visible()
    assert await console.page.title() == "Live · Attune"
    await console.page.keyboard.press(" ")
    await expect(console.page.get_by_role("link", name="Go on")).to_be_visible()
    assert console.problems == []
