"""None of the attempts leaves a sandbox, and each succeeds in a bare process: otherwise it would prove nothing."""

import os
import socket
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignment.environments.sandbox.base import Sandbox, SandboxLimits, Status
from alignment.environments.sandbox.unsafe import UnsafeSandbox
from app.core.settings import REPOSITORY
from tests.alignment.environments.sandbox.conftest import time_limit
from tests.support.escape_attempts import ATTEMPTS, Host, program


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Host(
            secret=str(secret),
            marker=str(tmp_path / "marker"),
            port=listener.getsockname()[1],
            pid=os.getpid(),
            repository=str(REPOSITORY),
            packages=sysconfig.get_path("purelib"),
        )


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_attempt_fails(isolated: Sandbox, host: Host, name: str) -> None:
    execution = await isolated.run(program(name, host))
    assert "ESCAPED" not in execution.stdout, execution
    assert Path(host.secret).exists() and not Path(host.marker).exists()
    assert (await isolated.run("print(6 * 7)")).stdout == "42\n"


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_attempt_succeeds_without_a_sandbox(host: Host, name: str) -> None:
    if name == "change the root" and os.geteuid() != 0:
        pytest.skip("only root may")
    execution = await UnsafeSandbox(SandboxLimits(seconds=20)).run(program(name, host))
    assert "ESCAPED" in execution.stdout, execution


BOMBS = {
    "endless loop": "while True:\n    pass",
    "loop that ignores signals": (
        "import signal\nfor number in (1, 2, 15, 24):\n    signal.signal(number, signal.SIG_IGN)\nwhile True:\n    pass"
    ),
    "sleep": "import time\nwhile True:\n    time.sleep(1)",
    "output": "while True:\n    print('x' * 1000)",
    "threads": (
        "import threading\n"
        "def run():\n    while True:\n        pass\n"
        "while True:\n    threading.Thread(target=run).start()"
    ),
    "forks": "import os\nwhile True:\n    os.fork()",
    "memory": "data = []\nwhile True:\n    data.append('x' * 1000000)",
    "recursion": "def f(n):\n    return f(n + 1)\nf(0)",
    "large number": "print(9 ** 9 ** 9)",
    "files": "number = 0\nwhile True:\n    open(str(number), 'w').write('x' * 1000)\n    number += 1",
    "descriptors": "files = []\nwhile True:\n    files.append(open('/dev/null'))",
}


@pytest.mark.parametrize("name", BOMBS)
async def test_bomb_ends_and_leaves_nothing(isolated: Sandbox, name: str) -> None:
    """By its time limit, or by an error of its own."""
    await isolated.run("print(1)")  # the sandbox checks itself first, within the same limit
    with time_limit(isolated, 1):
        execution = await isolated.run(BOMBS[name])
    assert not execution.is_success
    assert execution.status is Status.TIMEOUT or execution.exit_code is not None
    assert len(execution.stdout.encode()) <= 2 * isolated.limits.output_bytes
    assert (await isolated.run("print(6 * 7)")).stdout == "42\n"
