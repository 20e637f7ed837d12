"""Start a fork server, request processes from it, and end it with all its children."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass
class ForkServerClient:
    """A running fork server. It may serve several deployments, one after the other."""

    process: subprocess.Popen[bytes]
    folder: Path

    @classmethod
    def open(cls, preload: str | None = None) -> "ForkServerClient":
        folder = Path(tempfile.mkdtemp(prefix="attune-fork-server-"))
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.suite.fork_server", str(folder / "socket")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": preload} if preload else {}),
                start_new_session=True,
            )
        assert process.stdout is not None
        if not process.stdout.readline().startswith(b'{"ready"'):
            raise RuntimeError((folder / "log").read_text()[-2000:])
        return cls(process, folder)

    @property
    def output(self) -> int:
        """Return the file descriptor of its events, one JSON line each."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def start(self, kind: str, log: Path, variables: dict[str, str]) -> None:
        """Request a process of this kind, with these environment variables."""
        request = {
            "start": kind,
            "log": str(log),
            "environment": variables | {"SGLANG_FAULTS_SOCKET": str(self.folder / "socket")},
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()  # its children end with it
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
