"""A fake of SGLang's process: a scripted engine in a separate process that is ready in half a second.

It has a child process with the name of SGLang's scheduler. Files in the folder FAKE_ENGINE_FOLDER control it: `exit`,
`mute` and `stuck`. The file `loads` lists the loaded adapters.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send

from tests.support.scripted_engine import ScriptedEngine


class FakeServer(ScriptedEngine):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.hang, self.stuck = (FOLDER / "mute").exists(), (FOLDER / "stuck").exists()
        before = set(self.adapters)
        await super().__call__(scope, receive, send)
        with (FOLDER / "loads").open("a") as loads:
            loads.writelines(f"{name}\n" for name in self.adapters if name not in before)


FOLDER = Path(os.environ["FAKE_ENGINE_FOLDER"])

if __name__ == "__main__":
    if (FOLDER / "exit").exists():
        sys.exit("there is no such model")
    # The scheduler keeps starting short-lived processes, which have its name until they set another one.
    script = "while true; do (exec -a sglang::scheduler sleep 0.2); done"
    subprocess.Popen(["sglang::scheduler", "-c", script], executable="/bin/bash")
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    port = parser.parse_known_args()[0].port
    engine = FakeServer(os.environ["ATTUNE_ENGINE_API_KEY"], os.environ["ATTUNE_ENGINE_ADMIN_KEY"])
    config = uvicorn.Config(engine, port=port, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    asyncio.run(uvicorn.Server(config).serve())
