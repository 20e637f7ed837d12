"""The npm package of clients/typescript, built, on a page of another origin than the API, in Chromium."""

import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from app.core.settings import REPOSITORY
from app.main import create_app
from tests.conftest import skip_or_fail
from tests.support.chromium import TIMEOUT_MS, run_chromium
from tests.support.deployment import Harness
from tests.support.faulty_api import FaultyApi
from tests.support.scripted_engine import serve

SOURCE = REPOSITORY / "clients" / "typescript"
BUILD_INPUTS = ("src", "build.mjs", "package.json", "package-lock.json", "tsconfig.json", ".npmrc")


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder `dist` of the package, built from a copy of its source."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        skip_or_fail("no node and npm to build clients/typescript with")
    folder = tmp_path_factory.mktemp("typescript")
    for name in BUILD_INPUTS:
        if (SOURCE / name).is_dir():
            shutil.copytree(SOURCE / name, folder / name)
        else:
            shutil.copy(SOURCE / name, folder / name)
    install = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel", "error"]
    if (result := subprocess.run(install, cwd=folder, capture_output=True, text=True)).returncode != 0:
        skip_or_fail(f"npm cannot install esbuild and typescript: {result.stderr[-500:]}")
    result = subprocess.run(["npm", "run", "build"], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "dist"


class PageHandler(SimpleHTTPRequestHandler):
    """Serves a folder with a strict content security policy."""

    api_url = ""

    def end_headers(self) -> None:
        policy = f"default-src 'none'; script-src 'self'; style-src 'self'; connect-src {self.api_url}"
        self.send_header("content-security-policy", policy)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """Return SQLite's alone: a web page cannot see which database the service has."""
    return sqlite_url


@pytest.fixture
def site(package: Path, tmp_path: Path) -> Iterator[tuple[Path, ThreadingHTTPServer]]:
    """Yield a folder with the package and its server."""
    folder = tmp_path / "site"
    shutil.copytree(package, folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(PageHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, server
    server.shutdown()
    server.server_close()


@pytest.fixture
def origin(site: tuple[Path, ThreadingHTTPServer]) -> str:
    return f"http://127.0.0.1:{site[1].server_port}"


@pytest.fixture
def api(harness: Harness, origin: str) -> FaultyApi:
    return FaultyApi(create_app(harness.settings.replace({"server.cors_origins": [origin]})))


@pytest.fixture
def url(api: FaultyApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serve(api, lifespan="on") as url:
        monkeypatch.setattr(PageHandler, "api_url", url)
        yield url


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with run_chromium() as browser:
        page = await browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        yield page
