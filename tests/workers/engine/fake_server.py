"""A fake of SGLang's process: a scripted engine in a separate process that is ready in half a second.

It has a child process with the name of SGLang's scheduler. Files in the folder SGLANG_FAKE_FOLDER control it: `exit`,
`mute`, `stuck`, `unhealthy` (it refuses probes) and `crash` (names of adapters; the load of one of them ends it). The
file `loads` lists the loaded adapters.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tests.support.scripted_engine import ScriptedEngine


class FakeServer(ScriptedEngine):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.hang, self.stuck = (FOLDER / "mute").exists(), (FOLDER / "stuck").exists()
        before = set(self.adapters)
        await super().__call__(scope, receive, send)
        with (FOLDER / "loads").open("a") as loads:
            loads.writelines(f"{name}\n" for name in self.adapters if name not in before)

    async def _load(self, request: Request) -> Response:
        name, crashes = (await request.json())["lora_name"], FOLDER / "crash"
        if crashes.exists() and name in crashes.read_text().split():
            os._exit(139)
        return await super()._load(request)

    async def _health_generate(self, request: Request) -> Response:
        if not (FOLDER / "unhealthy").exists():
            return await super()._health_generate(request)
        with (FOLDER / "refused-probes").open("a") as probes:
            probes.write("1")
        return Response(status_code=503)


FOLDER = Path(os.environ["SGLANG_FAKE_FOLDER"])

if __name__ == "__main__":
    if (FOLDER / "exit").exists():
        sys.exit("there is no such model")
    # The scheduler keeps starting short-lived processes, which have its name until they set another one.
    script = "while true; do (exec -a sglang::scheduler sleep 0.2); done"
    subprocess.Popen(["sglang::scheduler", "-c", script], executable="/bin/bash")
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    port = parser.parse_known_args()[0].port
    engine = FakeServer(os.environ["ATTUNE_ENGINE__API_KEY"], os.environ["ATTUNE_ENGINE__ADMIN_KEY"])
    engine.seconds_per_token = float(os.environ.get("SGLANG_FAKE_SECONDS_PER_TOKEN", 0))
    config = uvicorn.Config(engine, port=port, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    asyncio.run(uvicorn.Server(config).serve())
