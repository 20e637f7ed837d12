"""Feedback from a web page of another origin, in Chromium: the web component and the function."""

import gzip
import re
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

from playwright.async_api import Page, expect

from app.feedback.browser_tokens import Kind
from app.models import Feedback
from tests.clients.typescript.conftest import SOURCE
from tests.support.deployment import Harness
from tests.support.faulty_api import FaultyApi, error_response

Site = tuple[Path, ThreadingHTTPServer]
SCRIPT = """
import { sendFeedback } from "./element.js";
window.events = [];
document.addEventListener("attune-feedback", ({ detail }) => events.push(detail.value));
document.addEventListener("attune-error", ({ detail }) => events.push([detail.name, detail.status, detail.code]));
document.addEventListener("securitypolicyviolation", ({ violatedDirective }) => events.push(violatedDirective));
window.send = (options) => sendFeedback(options).then(
  (record) => record.withdrawn ? ["withdrawn", record.effective] : record.kind,
  (error) => [error.name, error.status, error.code, error.requestId?.slice(0, 3)],
);
"""
HTML = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Shop</title>
<script type="module" src="script.js"></script>
<p>We are open.</p>
<attune-feedback token="%s" url="%s"></attune-feedback>
"""


async def create_token(harness: Harness, url: str, *kinds: str) -> dict[str, Any]:
    """Return a token for a new reply, as the application's server gets it."""
    turn = await harness.turn()
    body = {"completion_id": turn.id, "kinds": kinds or ["binary"], "source_id": "ada"}
    token: dict[str, Any] = (await harness.api.post("/v1/feedback/tokens", json=body)).json()
    return token | {"url": f"{url}/v1/feedback"}  # of the API on its socket


async def open_page(page: Page, site: Site, origin: str, token: dict[str, Any]) -> None:
    folder, _ = site
    (folder / "script.js").write_text(SCRIPT)
    (folder / "index.html").write_text(HTML % (token["token"], token["url"]))
    await page.goto(origin)


async def events(page: Page) -> Any:
    return await page.evaluate("events")


def test_kinds_are_those_of_a_token() -> None:
    [union] = re.findall(r"type FeedbackKind = (.*);", (SOURCE / "src" / "feedback.ts").read_text())
    assert sorted(re.findall(r'"(\w+)"', union)) == sorted(get_args(Kind))


def test_modules_are_small(package: Path) -> None:
    for name in ("feedback", "element"):
        assert len(gzip.compress((package / f"{name}.js").read_bytes())) < 4096
        assert "export" in (package / f"{name}.d.ts").read_text()


async def test_thumbs_by_mouse_and_keyboard(
    page: Page, site: Site, origin: str, url: str, harness: Harness, api: FaultyApi
) -> None:
    await open_page(page, site, origin, await create_token(harness, url))
    group = page.get_by_role("group", name="Rate this reply")
    good, bad = group.get_by_role("button", name="Good reply"), group.get_by_role("button", name="Bad reply")
    await expect(good).to_have_attribute("aria-pressed", "false")
    await good.click()
    await expect(group.get_by_role("status")).to_have_text("Thank you for the feedback.")
    await expect(group.get_by_role("button", pressed=True)).to_have_accessible_name("Good reply")
    await good.click()  # the vote that is there already is not sent again
    await page.keyboard.press("Tab")
    await expect(bad).to_be_focused()
    api.faults = ["lose_response", error_response(503)]
    await page.keyboard.press("Enter")
    await expect(group.get_by_role("button", pressed=True)).to_have_accessible_name("Bad reply")
    for _ in range(600):  # wait_for_function would evaluate a string, which the page's policy forbids
        if len(await events(page)) == 2:
            break
        await page.wait_for_timeout(100)
    assert await events(page) == [1, -1], "no error, and no violation of the content security policy"
    rows = await harness.all(Feedback)
    assert [(row.value, row.source_id) for row in rows] == [(1.0, "ada"), (-1.0, "ada")], "each vote counts once"


async def test_vote_that_fails_is_taken_back(page: Page, site: Site, origin: str, url: str, harness: Harness) -> None:
    await open_page(page, site, origin, await create_token(harness, url, "comment"))
    good = page.get_by_role("button", name="Good reply")
    await good.focus()
    await page.keyboard.press("Space")
    await expect(page.get_by_role("status")).to_have_text("The feedback was not sent. Please try again.")
    await expect(good).to_have_attribute("aria-pressed", "false")
    assert await events(page) == [["FeedbackError", 403, "token_scope"]]
    token = await create_token(harness, url)
    await page.locator("attune-feedback").evaluate(
        "(element, token) => element.setAttribute('token', token)", token["token"]
    )
    await good.click()
    await expect(good).to_have_attribute("aria-pressed", "true")
    await expect(page.get_by_role("status")).to_have_text("Thank you for the feedback.")


async def test_function(page: Page, site: Site, origin: str, url: str, harness: Harness) -> None:
    token = await create_token(harness, url, "binary", "comment")
    await open_page(page, site, origin, token)

    async def send(**fields: Any) -> Any:
        return await page.evaluate("(options) => send(options)", {**token, **fields})

    assert await send(value=True, id="vote-1") == "binary"
    assert await send(value=True, id="vote-1") == "binary"
    [vote] = await harness.all(Feedback)
    await harness.api.delete(f"/v1/feedback/{vote.id}")
    assert await send(value=True, id="vote-1") == ["withdrawn", False]
    assert await send(kind="comment", value="It was quick.") == "comment"
    assert await send(kind="score", value=0.5) == ["FeedbackError", 403, "token_scope", "req"]
    assert await send(value=True, token="no token") == ["FeedbackError", 0, "invalid_token", None]
    assert [row.kind for row in await harness.all(Feedback)] == ["binary", "withdrawal", "comment"]


async def test_page_of_an_origin_that_is_not_listed(
    page: Page, site: Site, origin: str, url: str, harness: Harness
) -> None:
    """The browser refuses: "localhost" is another origin than the listed 127.0.0.1."""
    token = await create_token(harness, url)
    await open_page(page, site, origin.replace("127.0.0.1", "localhost"), token)
    sent = await page.evaluate("(options) => send(options)", {**token, "value": True})
    assert sent == ["FeedbackError", 0, None, None] and not await harness.all(Feedback)
