"""No sandbox: a bare process with the rights of this one. For trusted programs, and as a control in tests."""

import sys
import tempfile
from pathlib import Path

from alignment.environments.sandbox.base import Execution, Sandbox, SandboxLimits
from alignment.environments.sandbox.process import run_process


class UnsafeSandbox(Sandbox):
    """Runs programs as they are: they can read and change everything that this process can.

    Only time and output are limited.
    """

    async def _run(self, code: str, stdin: str, limits: SandboxLimits) -> Execution:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "main.py"
            program.write_bytes(code.encode("utf-8", "replace"))
            command = [sys.executable, "-S", "-s", str(program)]
            environment = {"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
            return await run_process(command, stdin, limits, environment=environment, directory=Path(folder))
