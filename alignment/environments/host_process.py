"""A process of another Python interpreter that runs an environment of others; see host.py for what runs in it.

Requests and answers are JSON lines on its standard input and output. Threads read and write them, so that a call can
also be waited for without an event loop, and so that a process that reads nothing blocks nobody.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import IO, Literal

from pydantic import BaseModel, JsonValue, ValidationError

from alignment.environments.errors import CREDENTIALS, QUERY, AgentFailure, EnvironmentFailure, InfrastructureFailure
from alignment.environments.tools.base import JsonObject
from alignment.errors import UnavailableEnvironment

HOST = Path(__file__).with_name("host.py")
ADAPTERS = Path(__file__).with_name("host_adapters")
# All that a process inherits. Keys, proxies and addresses of the service are not among them.
INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
TAIL_BYTES = 8192  # of standard error, for messages
TAIL_LINES = 4
CANCEL_SECONDS = 5.0  # until a call that was cancelled has ended
CLOSE_SECONDS = 5.0  # until a process that was asked to leave is killed
KILL_SECONDS = 5.0  # until a killed process is gone
OUTPUT_SECONDS = 3.0  # to read what an ended process has left; a child that has left its group may hold that open


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """How environments of others are run.

    Attributes:
        python: The interpreter, of a virtual environment that has the package. Python 3.10 or later.
        paths: Folders in which `python:` finds modules that are not installed.
        environment: Variables, beside PATH, HOME and a few such. May hold keys.
        processes: How many processes an environment has at most.
        episodes_per_process: How many episodes share a process; None: as many as the adapter can serve at a time.
        start_seconds: For imports, and for opening the environment.
        answer_seconds: For a reset or a step, from when the process begins it.
        line_bytes: Of a request or an answer.
    """

    python: Path
    paths: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    processes: int = 1
    episodes_per_process: int | None = None
    start_seconds: float = 120.0
    answer_seconds: float = 30.0
    line_bytes: int = 1 << 20

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process."""
        inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        return inherited | dict(self.environment)


class CallError(BaseModel):
    """Why a call has failed. `kind`: the user's mistake, the agent's, or a failure of the environment or its host."""

    kind: Literal["unavailable", "agent", "environment"]
    message: str
    traceback: str = ""


class Answer(BaseModel):
    id: int
    result: JsonValue = None
    error: CallError | None = None


class HostProcess:
    """A started process, which has opened one environment. It is killed with its children when it breaks the protocol.

    After its end all calls raise InfrastructureFailure with the reason and the last lines of its standard error.
    """

    def __init__(self, config: HostConfig, adapter: Path, label: str) -> None:
        """Start the process. Raises UnavailableEnvironment if there is no such interpreter."""
        self.label = label
        self._line_bytes = config.line_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="attune-host-"))
        self._lock = Lock()
        self._calls: dict[int, Future[JsonValue]] = {}
        self._num_calls = 0
        self._failure: str | None = None
        self._is_gone = False
        self._answered_at = 0.0
        self._tail = b""
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        paths = [str(path.absolute()) for path in config.paths]
        command = [str(config.python), "-I", str(HOST), str(adapter), str(config.line_bytes), *paths]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder,
                env=config.variables(),
                start_new_session=True,
            )
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise UnavailableEnvironment(f"{config.python} cannot be started: {error.strerror}") from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._writer = Thread(target=self._write, args=(self._process.stdin,), daemon=True)
        self._reader = Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._drain = Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True)
        self._violation: str | None = None
        self._watcher = Thread(target=self._watch, daemon=True)
        for thread in (self._writer, self._reader, self._drain, self._watcher):
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._failure is None

    async def call(self, method: str, params: JsonObject, seconds: float, *, can_cancel: bool = False) -> JsonValue:
        """Return the result of a method. Kills the process if there is none in time.

        The process begins a call when it has answered those before it, and the time runs from then on. With
        `can_cancel` only the call is ended, and the process if it does not let itself be cancelled. Raises
        InfrastructureFailure, AgentFailure, and UnavailableEnvironment for a mistake of the user.
        """
        call_id, answered = self._request(method, params)
        future = asyncio.wrap_future(answered)
        sent_at = time.monotonic()
        try:
            while not future.done() and (left := self._ends_at(sent_at, seconds, can_cancel) - time.monotonic()) > 0:
                await asyncio.wait([future], timeout=left)
            if not future.done() and can_cancel:
                self._send({"id": call_id, "method": "cancel"})
                await asyncio.wait([future], timeout=CANCEL_SECONDS)
                if future.done():
                    raise InfrastructureFailure(f"{self.label} had no answer to {method!r} within {seconds:g} s")
        except asyncio.CancelledError:
            self._send({"id": call_id, "method": "cancel"})
            raise
        finally:
            future.add_done_callback(_retrieve)
        if not future.done():
            raise self._time_out(method, seconds)
        return future.result()

    def _ends_at(self, sent_at: float, seconds: float, is_concurrent: bool) -> float:
        """Return when a call must have been answered. Only calls that run at the same time begin when they are sent."""
        return (sent_at if is_concurrent else max(sent_at, self._answered_at)) + seconds

    def call_blocking(self, method: str, params: JsonObject, seconds: float) -> JsonValue:
        """Do the same as `call`, without an event loop."""
        _, future = self._request(method, params)
        try:
            return future.result(seconds)
        except TimeoutError:
            raise self._time_out(method, seconds) from None

    def _time_out(self, method: str, seconds: float) -> InfrastructureFailure:
        self.kill(f"had no answer to {method!r} within {seconds:g} s")
        return InfrastructureFailure(self._describe_failure())

    def _request(self, method: str, params: JsonObject) -> tuple[int, Future[JsonValue]]:
        future: Future[JsonValue] = Future()
        future.set_running_or_notify_cancel()  # from here on it is ended by an answer or by the end of the process
        with self._lock:
            self._num_calls += 1
            call_id = self._num_calls
            if self._failure is None:
                self._calls[call_id] = future
        if not self.is_alive:
            raise InfrastructureFailure(self._describe_failure())
        self._send({"id": call_id, "method": method, "params": params})
        return call_id, future

    def _send(self, request: JsonObject) -> None:
        self._requests.put(json.dumps(request).encode() + b"\n")

    def kill(self, reason: str) -> None:
        """Kill the process and its children at once. `reason` goes on from "the process of X"."""
        self._fail(reason)
        self._kill_group()

    def close(self) -> None:
        """Let the process leave, and kill it if it does not within a few seconds."""
        self._requests.put(None)
        self._watcher.join(CLOSE_SECONDS)
        self.kill("was closed")
        self._watcher.join(KILL_SECONDS)

    def _write(self, stream: IO[bytes]) -> None:
        with suppress(OSError), stream:  # the reader notices the end of a process
            while (line := self._requests.get()) is not None:
                stream.write(line)
                stream.flush()

    def _read(self, stream: IO[bytes]) -> None:
        self._violation = self._read_answers(stream)
        self._kill_group()

    def _watch(self) -> None:
        """Wait for the end of the process, and end its children and its calls.

        The end of its output says too little: a child that it has forked holds that open.
        """
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # it keeps its number until the group is killed
        self._kill_group()
        with self._lock:
            self._is_gone = True
        self._process.wait()
        for thread in (self._reader, self._drain):
            thread.join(OUTPUT_SECONDS)
        self._fail(self._violation or f"ended with exit status {self._process.returncode}")
        self._requests.put(None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_answers(self, stream: IO[bytes]) -> str | None:
        """Pass on the answers until the process ends. Returns what was wrong with one, if the process must be ended."""
        while line := stream.readline(self._line_bytes + 1):
            if len(line) > self._line_bytes:
                return f"has sent a line of more than {self._line_bytes} bytes"
            if not line.endswith(b"\n"):
                return None  # it has died while writing
            try:
                answer = Answer.model_validate_json(line)
            except ValidationError:
                return f"has sent what is no answer: {line[:100]!r}"
            self._answered_at = time.monotonic()
            with self._lock:
                future = self._calls.pop(answer.id, None)
            if future is None:
                return f"has answered a call that was not made: {answer.id}"
            if answer.error is None:
                future.set_result(answer.result)
            else:
                future.set_exception(_to_exception(answer.error, self.label))
        return None

    def _read_errors(self, stream: IO[bytes]) -> None:
        while chunk := os.read(stream.fileno(), 65536):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = reason
            calls = list(self._calls.values())
            self._calls.clear()
        for future in calls:
            future.set_exception(InfrastructureFailure(self._describe_failure()))

    def _kill_group(self) -> None:
        with self._lock:
            if not self._is_gone:  # its number may be another's by now
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _describe_failure(self) -> str:
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()[-TAIL_LINES:]
        errors = CREDENTIALS.sub("", QUERY.sub("?…", " | ".join(lines)))
        sentence = f"the process of {self.label} {self._failure}"
        return f"{sentence}; it has printed: {errors}" if errors else sentence


def _retrieve(future: asyncio.Future[JsonValue]) -> None:
    """Look at the exception of a future that nobody waits for, lest it be logged as lost."""
    if not future.cancelled():
        future.exception()


def _to_exception(error: CallError, label: str) -> Exception:
    message = f"{label}: {error.message}"
    exception: Exception = EnvironmentFailure(message)
    if error.kind == "unavailable":
        exception = UnavailableEnvironment(message)
    elif error.kind == "agent":
        exception = AgentFailure(message)
    if error.traceback:
        exception.add_note(error.traceback)
    return exception
