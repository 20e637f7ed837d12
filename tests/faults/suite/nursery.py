"""A zygote from outside: how it is started, told what to fork, and ended with all its children."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Nursery:
    """It serves one deployment after the other."""

    process: subprocess.Popen[bytes]
    folder: Path

    @classmethod
    def open(cls, preload: str | None = None) -> "Nursery":
        folder = Path(tempfile.mkdtemp(prefix="attune-zygote-"))
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.suite.zygote", str(folder / "door")],
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
    def ear(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def start(self, kind: str, log: Path, exported: dict[str, str]) -> None:
        order = {"start": kind, "log": str(log), "environment": exported | {"FAULTS_DOOR": str(self.folder / "door")}}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()  # its children die with it
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()
        shutil.rmtree(self.folder, ignore_errors=True)
