"""A service with the wire of Sandbox Fusion, which runs programs in a sandbox of ours."""

import json
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from alignment.environments.sandbox.base import Sandbox, Status


@dataclass
class SandboxService:
    """`bodies` are the requests so far. `answer`, if there is one, is sent instead of running a program."""

    sandbox: Sandbox
    answer: tuple[int, Any] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        assert (request.method, request.url.path) == ("POST", "/run_code")
        body = json.loads(await request.body())
        self.bodies.append(body)
        status, answer = self.answer or (200, await self._run(body))
        await JSONResponse(answer, status)(scope, receive, send)

    async def _run(self, body: dict[str, Any]) -> dict[str, Any]:
        execution = await self.sandbox.run(body["code"], body["stdin"])
        is_timeout = execution.status is Status.TIMEOUT
        result = {
            "status": "TimeLimitExceeded" if is_timeout else "Finished",
            "execution_time": 0.1,
            "return_code": execution.exit_code,
            "stdout": execution.stdout,
            "stderr": execution.stderr,
        }
        return {
            "status": "Success" if execution.is_success else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": result,
            "executor_pod_name": None,
            "files": {},
        }
