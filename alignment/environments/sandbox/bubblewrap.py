"""The sandbox of bubblewrap: full CPython in namespaces of its own, without network, with seccomp and resource limits.

The program sees the interpreter, its standard library and the libraries of the system, all read-only, and a /tmp of its
own. It has no /proc, no /etc, no capabilities, and no variables of the host. It cannot start processes.

Needs the program `bwrap` (package bubblewrap) and user namespaces without privileges.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.sandbox.base import Execution, Sandbox, SandboxLimits, Status
from alignment.environments.sandbox.process import run_process, with_rlimits
from alignment.environments.sandbox.seccomp import build_filter

PROGRAM = "/code/main.py"
PACKAGES = "/packages"
NOBODY = "65534"
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
ISOLATED = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
    *("--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
VARIABLES = {
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",  # so that a program that is ended has printed what it printed
    "OPENBLAS_NUM_THREADS": "1",
}
PROBE = "import sys, sysconfig; print(sys.base_prefix); print(sysconfig.get_path('stdlib'))"


class BubblewrapSandbox(Sandbox):
    """Runs programs with `interpreter`, by default this process's, and the packages of a folder.

    `packages` is a folder that `pip install --target` has filled. What is installed for the host is not seen.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        interpreter: Path | None = None,
        packages: Path | None = None,
        program: str = "bwrap",
    ) -> None:
        super().__init__(limits)
        self._interpreter = Path(interpreter or sys.executable).resolve()
        self._packages = packages
        self._program = program
        self._command: list[str] | None = None
        self._lock = asyncio.Lock()

    async def _run(self, code: str, stdin: str, limits: SandboxLimits) -> Execution:
        async with self._lock:
            if self._command is None:
                command = await self._build_command()
                await self._check(command)
                self._command = command
        return await self._run_command(self._command, code, stdin, limits)

    async def _run_command(self, command: Sequence[str], code: str, stdin: str, limits: SandboxLimits) -> Execution:
        with ExitStack() as stack:
            code_fd = stack.enter_context(_memory_file(code.encode("utf-8", "replace")))
            filter_fd = stack.enter_context(_memory_file(build_filter()))
            status_fd = stack.enter_context(_memory_file(b""))
            options = [
                *("--ro-bind-data", str(code_fd), PROGRAM, "--remount-ro", "/"),
                *("--seccomp", str(filter_fd), "--json-status-fd", str(status_fd)),
            ]
            bwrap, *isolation = command
            full_command = [bwrap, *isolation, *options, "--chdir", "/tmp", str(self._interpreter), "-S", "-s", PROGRAM]
            execution = await run_process(
                with_rlimits(full_command, limits),
                stdin,
                limits,
                environment={},
                pass_fds=(code_fd, filter_fd, status_fd),
            )
            # Only bubblewrap can write to it: a program cannot pretend that the sandbox has failed.
            os.lseek(status_fd, 0, os.SEEK_SET)
            has_run = b'"exit-code"' in os.read(status_fd, 4096)
        if execution.status is Status.FINISHED and not has_run:
            raise InfrastructureFailure(f"bubblewrap failed: {execution.stderr[:500].strip()}")
        return execution

    async def _check(self, command: Sequence[str]) -> None:
        """Run a first program, since a failure to start the interpreter looks like one of the program."""
        execution = await self._run_command(command, "print(6 * 7)", "", self.limits)
        if execution.stdout != "42\n":
            raise InfrastructureFailure(
                f"bubblewrap cannot start {self._interpreter}: {execution.status}, {execution.stderr[:500].strip()}"
            )

    async def _build_command(self) -> list[str]:
        """Return the command up to what belongs to one run. Raises InfrastructureFailure."""
        bwrap = shutil.which(self._program)
        if bwrap is None:
            raise InfrastructureFailure(f"{self._program!r} was not found: install the package bubblewrap")
        probe = await run_process(
            [str(self._interpreter), "-I", "-S", "-c", PROBE], "", self.limits, environment={"LANG": "C.UTF-8"}
        )
        if not probe.is_success:
            raise InfrastructureFailure(f"{self._interpreter} is no Python: {probe.stderr[:500].strip()}")
        prefix, stdlib = (Path(line) for line in probe.stdout.splitlines())
        folders = dict.fromkeys(
            path for path in (*map(Path, LIBRARIES), prefix / "lib", stdlib.parent, self._interpreter) if path.exists()
        )
        hidden = (parent / name for parent in (stdlib, Path("/usr/lib/python3")) for name in PACKAGE_FOLDERS)
        variables = VARIABLES | ({"PYTHONPATH": PACKAGES} if self._packages else {})
        return [
            *(bwrap, *ISOLATED),
            *(option for folder in folders for option in ("--ro-bind", str(folder), str(folder))),
            *(option for path in hidden if path.is_dir() for option in _empty_folder(path)),
            *(option for path in DEVICES for option in ("--dev-bind", path, path)),
            *("--size", str(self.limits.disk_mb << 20), "--tmpfs", "/tmp"),
            *(("--ro-bind", str(self._packages), PACKAGES) if self._packages else ()),
            *(option for name, value in variables.items() for option in ("--setenv", name, value)),
        ]


def _empty_folder(path: Path) -> tuple[str, ...]:
    return ("--tmpfs", str(path), "--remount-ro", str(path))


@contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    """Yield the descriptor of a file in memory, to be read from its start by a child."""
    fd = os.memfd_create("attune-sandbox")
    try:
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
