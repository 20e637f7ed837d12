"""A fake of the engine's interpreter: a scripted engine in a process of its own, ready in half a second.

It has a child that is called like SGLang's scheduler. Files in the folder that STAND_IN names are its switches: `exit`,
`mute` and `stuck`; `loads` records the loaded adapters.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

import uvicorn

from tests.support.scripted_engine import ScriptedEngine


class FakeServer(ScriptedEngine):
    async def __call__(self, scope, receive, send) -> None:
        self.hang, self.stuck = (FOLDER / "mute").exists(), (FOLDER / "stuck").exists()
        before = set(self.adapters)
        await super().__call__(scope, receive, send)
        with (FOLDER / "loads").open("a") as loads:
            loads.writelines(f"{name}\n" for name in self.adapters if name not in before)


FOLDER = Path(os.environ["STAND_IN"])

if __name__ == "__main__":
    if (FOLDER / "exit").exists():
        sys.exit("there is no such model")
    # It keeps starting short-lived processes, which have its name until they set their own.
    script = "while true; do (exec -a sglang::scheduler sleep 0.2); done"
    subprocess.Popen(["sglang::scheduler", "-c", script], executable="/bin/bash")
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    port = parser.parse_known_args()[0].port
    engine = FakeServer(os.environ["ATTUNE_ENGINE_API_KEY"], os.environ["ATTUNE_ENGINE_ADMIN_KEY"])
    config = uvicorn.Config(engine, port=port, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    asyncio.run(uvicorn.Server(config).serve())
