"""What programs return, and failures of the sandbox itself."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.sandbox import bubblewrap as bubblewrap_module
from alignment.environments.sandbox.base import Execution, Sandbox, SandboxLimits, Status
from alignment.environments.sandbox.bounded_output import BoundedOutput
from alignment.environments.sandbox.bubblewrap import BubblewrapSandbox
from alignment.environments.sandbox.monty import MontySandbox
from alignment.environments.sandbox.open_sandbox import SandboxConfig, open_sandbox
from alignment.environments.sandbox.remote import RemoteSandbox
from alignment.environments.sandbox.seccomp import build_filter
from alignment.environments.sandbox.unsafe import UnsafeSandbox
from tests.alignment.environments.sandbox.conftest import time_limit
from tests.support.sandbox_service import SandboxService
from tests.support.scripted_engine import serve


async def test_output_and_errors(sandbox: Sandbox) -> None:
    assert await sandbox.run("print('é')") == Execution(Status.FINISHED, 0, "é\n", "")
    failed = await sandbox.run("print('before')\n1 / 0")
    assert (failed.status, failed.exit_code, failed.stdout) == (Status.FINISHED, 1, "before\n")
    assert failed.stderr.startswith("Traceback") and "ZeroDivisionError: division by zero" in failed.stderr
    broken = await sandbox.run("def f(:")
    assert broken.exit_code == 1 and "SyntaxError" in broken.stderr
    assert (await sandbox.run("print('\\ud800')")).exit_code is not None


async def test_programs_may_use_asyncio(bubblewrap: BubblewrapSandbox) -> None:
    code = "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    print('done')\nasyncio.run(f())"
    assert await bubblewrap.run(code) == Execution(Status.FINISHED, 0, "done\n", "")


async def test_nothing_of_a_run_is_left_for_the_next(sandbox: Sandbox) -> None:
    await sandbox.run("x = 1\nopen('/tmp/left', 'w').write('x')")
    execution = await sandbox.run("try:\n    print(open('/tmp/left').read())\nexcept OSError:\n    print('gone')\nx")
    assert execution.stdout == "gone\n"
    assert "NameError" in execution.stderr


async def test_time_out_keeps_what_was_printed(isolated: Sandbox) -> None:
    await isolated.run("print(1)")  # the sandbox checks itself first, within the same limit
    with time_limit(isolated, 5):
        execution = await isolated.run("print('before')\nwhile True:\n    pass")
    assert (execution.status, execution.exit_code, execution.stdout) == (Status.TIMEOUT, None, "before\n")


async def test_long_output_is_cut(sandbox: Sandbox) -> None:
    execution = await sandbox.run("print('a' * 100000 + 'z')")
    assert execution.is_success
    assert execution.stdout.startswith("aaa") and execution.stdout.endswith("z\n") and "bytes cut" in execution.stdout


async def test_standard_input(bubblewrap: BubblewrapSandbox) -> None:
    assert (await bubblewrap.run("print(input())", "hello\n")).stdout == "hello\n"
    assert (await bubblewrap.run("print(1)", "x" * (1 << 20))).stdout == "1\n", "a program need not read it"


async def test_runs_wait_for_a_free_place() -> None:
    sandbox = UnsafeSandbox(SandboxLimits(concurrent_runs=1, wait_seconds=0.1))
    results = await asyncio.gather(
        *(sandbox.run("import time; time.sleep(1)") for _ in range(2)), return_exceptions=True
    )
    assert [type(result) for result in results] == [Execution, InfrastructureFailure]


async def test_processes_end_with_a_run_that_is_cancelled(bubblewrap: BubblewrapSandbox) -> None:
    await bubblewrap.run("print(1)")
    task = asyncio.create_task(bubblewrap.run("while True:\n    pass"))
    while not psutil.Process().children(recursive=True):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [child for child in psutil.Process().children(recursive=True) if child.name() == "bwrap"] == []


async def test_missing_program_is_a_failure_of_the_host() -> None:
    with pytest.raises(InfrastructureFailure, match="install the package bubblewrap"):
        await BubblewrapSandbox(program="bwrap-that-is-missing").run("print(1)")


async def test_bubblewrap_that_fails_is_a_failure_of_the_host(bubblewrap: BubblewrapSandbox, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(InfrastructureFailure, match="No permissions to create new namespace"):
        await BubblewrapSandbox(program=str(fake)).run("print(1)")
    with pytest.raises(InfrastructureFailure, match="is no Python"):
        await BubblewrapSandbox(interpreter=Path("/bin/false")).run("print(1)")


async def test_program_cannot_pretend_that_the_sandbox_failed(bubblewrap: BubblewrapSandbox) -> None:
    execution = await bubblewrap.run("import os, sys\nprint('bwrap: failed', file=sys.stderr)\nos._exit(1)")
    assert execution.exit_code == 1
    closes = (
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'x')\n    except OSError:\n        pass"
    )
    assert (await bubblewrap.run(closes)).exit_code == 0


async def test_variables_are_those_of_the_sandbox(
    bubblewrap: BubblewrapSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "SECRET_KEY", "secret")
    execution = await bubblewrap.run("import os\nprint(sorted(os.environ))")
    assert execution.stdout.strip() == str(sorted([*bubblewrap_module.VARIABLES, "PWD"]))


async def test_packages_of_a_folder_can_be_imported(bubblewrap: BubblewrapSandbox, tmp_path: Path) -> None:
    (tmp_path / "seven.py").write_text("value = 7\n")
    sandbox = BubblewrapSandbox(packages=tmp_path)
    assert (await sandbox.run("import seven; print(seven.value)")).stdout == "7\n"
    execution = await bubblewrap.run("import pytest")
    assert "ModuleNotFoundError" in execution.stderr, "what is installed for the host is not seen"


async def test_missing_monty_is_a_failure_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(InfrastructureFailure, match=r"pip install pydantic-monty"):
        await MontySandbox().run("print(1)")


async def test_wire_of_sandbox_fusion() -> None:
    service = SandboxService(UnsafeSandbox())
    with serve(service) as url:
        remote = RemoteSandbox(url, SandboxLimits(seconds=3, memory_mb=128))
        assert (await remote.run("print(input())", "hello")).stdout == "hello\n"
        assert service.bodies == [
            {
                "code": "print(input())",
                "language": "python",
                "stdin": "hello",
                "run_timeout": 3.0,
                "memory_limit_MB": 128,
            }
        ]
        service.answer = (200, {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "a"}})
        assert await remote.run("") == Execution(Status.TIMEOUT, None, "a", "")
        run_result = {"status": "Error", "return_code": None, "stdout": None, "stderr": "x"}
        service.answer = (200, {"status": "Failed", "run_result": run_result})
        assert await remote.run("") == Execution(Status.FINISHED, 1, "", "x")
        surrogate = await remote.run("x = '\ud800'")
        assert (surrogate.exit_code, surrogate.stderr[:12]) == (1, "SyntaxError:")
        service.answer = (200, {"status": "Success", "run_result": {"status": "Finished", "stdout": "a" * (2 << 20)}})
        assert await remote.run("") == Execution(Status.FINISHED, 1, "", "Error: the program printed too much\n")
        for answer, message in [
            ((200, {"status": "SandboxError", "message": "no pod", "run_result": None}), "says SandboxError: no pod"),
            ((500, {}), "answered 500"),
            ((200, {"ok": True}), "gave no answer of its wire"),
        ]:
            service.answer = answer
            with pytest.raises(InfrastructureFailure, match=message):
                await remote.run("")
    with pytest.raises(InfrastructureFailure, match="does not answer"):
        await remote.run("")
    await remote.close()


def test_filter_is_of_this_architecture_only() -> None:
    assert len(build_filter("x86_64")) % 8 == 0
    assert build_filter("x86_64") != build_filter("aarch64")
    with pytest.raises(InfrastructureFailure, match="no seccomp filter for riscv64"):
        build_filter("riscv64")


def test_output_is_bounded_in_memory() -> None:
    output = BoundedOutput(10)
    for letter in b"abcdefghijklmnopqrstuvwxyz":
        output.write(bytes([letter]))
    assert output.text() == "abcde\n[… 16 bytes cut …]\nvwxyz"
    short = BoundedOutput(10)
    short.write("aéaéa".encode())
    assert short.text() == "aéaéa"


def test_configuration_names_the_sandbox() -> None:
    assert isinstance(open_sandbox(SandboxConfig()), BubblewrapSandbox)
    assert isinstance(open_sandbox(SandboxConfig(kind="monty")), MontySandbox)
    assert isinstance(open_sandbox(SandboxConfig(kind="http", url="http://sandbox:8080")), RemoteSandbox)
    assert isinstance(open_sandbox(SandboxConfig(kind="unsafe")), UnsafeSandbox)
    for wrong in (
        {"kind": "http"},
        {"url": "http://sandbox"},
        {"kind": "monty", "packages": "/x"},
        {"limits": {"hours": 1}},
    ):
        with pytest.raises(ValidationError):
            SandboxConfig.model_validate(wrong)


async def test_program_may_end_before_it_reads_under_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pipe is closed, uvloop raises RuntimeError, no ConnectionError: seen under load, and simulated here."""

    def closed(self: asyncio.StreamWriter, data: bytes) -> None:
        raise RuntimeError("unable to perform operation on <WriteUnixTransport>; the handler is closed")

    monkeypatch.setattr(asyncio.StreamWriter, "write", closed)
    assert await UnsafeSandbox().run("print(1)", "x") == Execution(Status.FINISHED, 0, "1\n", "")


async def test_stream_that_breaks_is_a_failure_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: asyncio.StreamReader, size: int = -1) -> bytes:
        raise OSError("no memory")

    monkeypatch.setattr(asyncio.StreamReader, "read", broken)
    with pytest.raises(InfrastructureFailure, match="no memory"):
        await UnsafeSandbox().run("print(1)")
