"""The server and the pages of docs/connect/react.md, with the AI SDK and assistant-ui, in Chromium."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from app.main import create_app
from app.models import Feedback, Turn
from tests.clients.third_party.environments import HERE, free_port, prepare
from tests.docs.blocks import DOCUMENTS, blocks
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
[DOCUMENT] = [path for path in DOCUMENTS if path.name == "react.md"]


@pytest.fixture(scope="module")
def app_folder(package: Path) -> Path:
    """Return a folder with the code of the document, built beside the packages that it names."""
    environment = prepare("react")
    attune_client = environment / "node_modules" / "attune-client"
    shutil.rmtree(attune_client, ignore_errors=True)
    shutil.copytree(package, attune_client / "dist")
    shutil.copy(package.parent / "package.json", attune_client)
    folder = environment / "app"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "src").mkdir(parents=True)
    code = [block.text for block in blocks("ts", "tsx") if block.file == DOCUMENT]
    for name, text in zip(("route.ts", "chat.tsx", "assistant.tsx"), code, strict=True):
        (folder / "src" / name).write_text(text.replace('attune("assistant")', 'attune("shop")'))
    for name in ("build.mjs", "server.mjs"):
        shutil.copy(HERE / "react" / name, folder)
    built = subprocess.run(["node", "build.mjs"], cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture
def origin(app_folder: Path, harness: Harness, scripted: ScriptedEngine) -> Iterator[str]:
    """Yield the origin of the application, whose server has the API key."""
    port = free_port()
    origin = f"http://127.0.0.1:{port}"
    api = create_app(harness.settings.replace({"server.cors_origins": [origin]}))
    with serve(api, lifespan="on") as url:
        environment = os.environ | {"PORT": str(port), "ATTUNE_URL": url, "ATTUNE_API_KEY": harness.key}
        command = ["node", "server.mjs"]
        with subprocess.Popen(command, cwd=app_folder, env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            yield origin
            server.kill()


async def wait_for_votes(harness: Harness, page: Page, number: int) -> list[Feedback]:
    """Return the feedback as soon as there are so many rows: assistant-ui shows a press before it is sent."""
    while len(rows := await harness.all(Feedback)) < number:
        await page.wait_for_timeout(50)
    return rows


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("path", "names"), [("chat", ("Good reply", "Bad reply")), ("assistant", ("Good", "Bad"))])
async def test_thumb_is_pressed_and_changed(
    page: Page, origin: str, harness: Harness, path: str, names: tuple[str, str]
) -> None:
    await page.goto(f"{origin}/{path}")
    good, bad = (page.get_by_role("button", name=name, exact=True) for name in names)
    for number, question in enumerate(("Are you open?", "And tomorrow?"), 1):
        await page.get_by_label("Your question").fill(question)
        await page.keyboard.press("Enter")
        await expect(good).to_have_count(number)
    await good.last.click()
    await wait_for_votes(harness, page, 1)
    await bad.last.click()
    rows = await wait_for_votes(harness, page, 2)
    first, second = await harness.all(Turn)
    assert [(row.turn_id, row.value) for row in rows] == [(second.id, 1.0), (second.id, -1.0)]
    assert second.parent_id == first.id and second.exclusion_reason is None
    assert harness.key not in await page.content()
