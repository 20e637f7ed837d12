"""A sandbox behind HTTP, on the wire of Sandbox Fusion: `POST /run_code`."""

from enum import StrEnum

import httpx2
from pydantic import BaseModel, ConfigDict, ValidationError

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.http_client import MAX_BODY_BYTES, open_client, post_json
from alignment.environments.sandbox.base import Execution, Sandbox, SandboxLimits, Status
from alignment.environments.tools.result_text import cut_text

GRACE_SECONDS = 30.0  # on top of the program's time: the service may queue it
MAX_BYTES_ESCAPED = 6  # of JSON, for a byte that a program prints


class RunStatus(StrEnum):
    """What the service says of a program."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT = "TimeLimitExceeded"


class RunResult(BaseModel):
    model_config = ConfigDict(extra="ignore")

    status: RunStatus
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunAnswer(BaseModel):
    """The answer to `POST /run_code`. The status "SandboxError" is a failure of the service."""

    model_config = ConfigDict(extra="ignore")

    status: str
    message: str = ""
    run_result: RunResult | None = None


class RemoteSandbox(Sandbox):
    """Runs programs on a service. How well it isolates them is the service's affair.

    `headers` may hold keys.
    """

    def __init__(self, url: str, limits: SandboxLimits | None = None, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(limits)
        self._url = f"{url.rstrip('/')}/run_code"
        self._headers = headers
        self._client: httpx2.AsyncClient | None = None

    async def _run(self, code: str, stdin: str, limits: SandboxLimits) -> Execution:
        if self._client is None:
            self._client = open_client(self._headers)
        try:
            code.encode()
        except UnicodeEncodeError as error:  # as CPython says of such a file
            return Execution(Status.FINISHED, 1, "", f"SyntaxError: the program is no UTF-8: {error}\n")
        noun = "the sandbox's service"
        answer = await post_json(
            self._client,
            self._url,
            {
                "code": code,
                "language": "python",
                "stdin": stdin.encode("utf-8", "replace").decode(),
                "run_timeout": limits.seconds,
                "memory_limit_MB": limits.memory_mb,
            },
            noun=noun,
            seconds=limits.seconds + GRACE_SECONDS,
            max_bytes=max(MAX_BODY_BYTES, MAX_BYTES_ESCAPED * 2 * limits.output_bytes),
        )
        if not answer.is_success:
            raise InfrastructureFailure(f"{noun} answered {answer.status}")
        if answer.is_cut:
            return Execution(Status.FINISHED, 1, "", "Error: the program printed too much\n")
        try:
            parsed = RunAnswer.model_validate_json(answer.text)
        except ValidationError as error:
            raise InfrastructureFailure(f"{noun} gave no answer of its wire") from error
        if parsed.run_result is None:
            raise InfrastructureFailure(f"{noun} says {parsed.status}: {parsed.message[:500]}")
        return _execution(parsed.run_result, limits)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _execution(result: RunResult, limits: SandboxLimits) -> Execution:
    stdout, stderr = (cut_text(text or "", limits.output_bytes) for text in (result.stdout, result.stderr))
    if result.status is RunStatus.TIME_LIMIT:
        return Execution(Status.TIMEOUT, None, stdout, stderr)
    exit_code = result.return_code
    if exit_code is None:
        exit_code = 0 if result.status is RunStatus.FINISHED else 1
    return Execution(Status.FINISHED, exit_code, stdout, stderr)
