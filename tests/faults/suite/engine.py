"""The scripted engine as the suite's supervisor starts it: its scores of a probe are a function of the adapter's bytes.

So a version is proven only if the bytes that were sealed are the bytes that were loaded.
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

from alignment.artifacts import ADAPTER
from tests.support.scripted_engine import ScriptedEngine, logprob

# Runs under -I -S: what a start costs is what the kernel takes.
LAUNCHER = """
import ctypes, json, os, signal, socket, sys
parent = int(sys.argv[sys.argv.index("--parent") + 1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    sys.exit("the supervisor is gone")
[port] = [given.partition("=")[2] for given in sys.argv if given.startswith("--port=")]
door = socket.socket(socket.AF_UNIX)
door.connect(sys.argv[1])
asked = {"port": int(port), "api": os.environ["ATTUNE_ENGINE_API_KEY"], "admin": os.environ["ATTUNE_ENGINE_ADMIN_KEY"]}
door.sendall(json.dumps(asked).encode())
door.recv(1)
"""


class Engine(ScriptedEngine):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.record_requests = False
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
                {"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": self._scored(name, ids)}}
                for name, ids in zip(names, body["input_ids"], strict=True)
            ]
        )

    def _scored(self, name: str | None, ids: list[int]) -> list[list[Any]]:
        salt = None if name is None else self.salts[name]
        return [[logprob(salt, ids[:at], ids[at]) if at else None, ids[at], None] for at in range(len(ids))]

    async def _reward(self, request: Request) -> Response:
        """A reward service of somebody's own: seeded by what it is asked."""
        return JSONResponse({"reward": zlib.crc32(await request.body()) % 2001 / 1000 - 1})


def serve(asked: dict[str, Any], caller: socket.socket) -> None:
    """Until the caller is gone: it is what the supervisor takes for the engine, and kills."""

    def watch() -> None:
        caller.recv(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    engine = Engine(asked["api"], asked["admin"])
    config = uvicorn.Config(
        engine, port=asked["port"], log_level="critical", lifespan="off", access_log=False, timeout_keep_alive=75
    )
    asyncio.run(uvicorn.Server(config).serve())
