"""Each sandbox that is isolated, with small limits. One that is not installed is skipped, and fails in CI."""

import importlib.util
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from alignment.environments.sandbox.base import Sandbox, SandboxLimits
from alignment.environments.sandbox.bubblewrap import BubblewrapSandbox
from alignment.environments.sandbox.monty import MontySandbox
from alignment.environments.sandbox.remote import RemoteSandbox
from tests.conftest import skip_or_fail
from tests.support.sandbox_service import SandboxService
from tests.support.scripted_engine import serve

LIMITS = SandboxLimits(seconds=20, memory_mb=256, disk_mb=8, file_mb=4, output_bytes=4096)


def require(kind: str) -> None:
    if kind != "monty" and shutil.which("bwrap") is None:
        skip_or_fail("bubblewrap is not installed")
    if kind == "monty" and importlib.util.find_spec("pydantic_monty") is None:
        skip_or_fail("pydantic-monty is not installed")


@pytest.fixture(params=["bubblewrap", "monty"])
async def isolated(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """Yield a sandbox that isolates by itself."""
    async for sandbox in open_sandbox(request.param):
        yield sandbox


@pytest.fixture(params=["bubblewrap", "monty", "http"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """Yield a sandbox. Behind `http` is bubblewrap."""
    async for sandbox in open_sandbox(request.param):
        yield sandbox


async def open_sandbox(kind: str) -> AsyncIterator[Sandbox]:
    require(kind)
    if kind == "bubblewrap":
        yield BubblewrapSandbox(LIMITS)
    elif kind == "monty":
        monty = MontySandbox(LIMITS)
        yield monty
        await monty.close()
    else:
        with serve(SandboxService(BubblewrapSandbox(LIMITS))) as url:
            remote = RemoteSandbox(url, LIMITS)
            yield remote
            await remote.close()


@contextmanager
def time_limit(sandbox: Sandbox, seconds: float) -> Iterator[None]:
    """Give programs less time for a while."""
    limits, sandbox.limits = sandbox.limits, sandbox.limits.model_copy(update={"seconds": seconds})
    yield
    sandbox.limits = limits


@pytest.fixture
def bubblewrap() -> BubblewrapSandbox:
    require("bubblewrap")
    return BubblewrapSandbox(LIMITS)
