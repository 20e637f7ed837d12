"""The engine of the suite: its scores of a probe are a function of the adapter's bytes.

A version is therefore verified only if the loaded bytes are the sealed bytes. The supervisor starts LAUNCHER, which
requests an engine from the fork server and keeps the connection open until it is killed.
"""

import asyncio
import os
import socket
import threading
import zlib
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from alignment.artifacts.specs import ADAPTER
from tests.support.scripted_engine import ScriptedEngine, logprob

# Runs under -I -S, so that it starts fast.
LAUNCHER = """
import ctypes, json, os, signal, socket, sys
parent = int(sys.argv[sys.argv.index("--parent") + 1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    sys.exit("the supervisor has exited")
[port] = [flag.partition("=")[2] for flag in sys.argv if flag.startswith("--port=")]
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
api_key, admin_key = os.environ["ATTUNE_ENGINE__API_KEY"], os.environ["ATTUNE_ENGINE__ADMIN_KEY"]
request = {"port": int(port), "api": api_key, "admin": admin_key}
server.sendall(json.dumps(request).encode())
server.recv(1)
"""


class FakeEngine(ScriptedEngine):
    """A scripted engine with a reward service."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.record_requests = False
        self.seconds_per_token = 0.01  # so that replies run while something fails
        self.salts: dict[str, str] = {}
        self._app.routes.append(Route("/reward", self._reward, methods=["POST"]))

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        salt = zlib.crc32((Path(body["lora_path"]) / ADAPTER).read_bytes())
        self.salts[body["lora_name"]] = str(salt)
        return await super()._load(request)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if refusal := await self._check_request(request, self.api_key):
            return refusal
        names = body.get("lora_path") or [None] * len(body["input_ids"])
        if unknown := self._unknown_adapter_error(*names):
            return unknown
        return JSONResponse(
            [
                {"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": self._score(name, ids)}}
                for name, ids in zip(names, body["input_ids"], strict=True)
            ]
        )

    def _score(self, name: str | None, ids: list[int]) -> list[list[Any]]:
        salt = None if name is None else self.salts[name]
        return [[logprob(salt, ids[:at], ids[at]) if at else None, ids[at], None] for at in range(len(ids))]

    async def _reward(self, request: Request) -> Response:
        """Return a reward that is a function of the request."""
        return JSONResponse({"reward": zlib.crc32(await request.body()) % 2001 / 1000 - 1})


def serve(request: dict[str, Any], launcher: socket.socket) -> None:
    """Serve until the launcher ends. The supervisor manages the launcher as if it were the engine."""

    def exit_with_launcher() -> None:
        launcher.recv(1)
        os._exit(0)

    threading.Thread(target=exit_with_launcher, daemon=True).start()
    engine = FakeEngine(request["api"], request["admin"])
    config = uvicorn.Config(
        engine, port=request["port"], log_level="critical", lifespan="off", access_log=False, timeout_keep_alive=75
    )
    asyncio.run(uvicorn.Server(config).serve())
