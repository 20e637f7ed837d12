"""The program that runs an environment of others in its own interpreter: `python -I host.py ADAPTER LINE_BYTES PATH…`.

It uses only the standard library, of Python 3.10 or later, and nothing of this package, since the interpreter is
another one. ADAPTER is a file of `host_adapters`, or one like them, with

    def open_environment(name: str, arguments: dict[str, object]) -> object

What it returns may have any of these methods, of which `run` alone may be a coroutine function:

    tasks(split, seed, start, count) -> list of {"id", "data", "seed"}, fewer than `count` at the end
    reset(episode, task) -> {"messages", "tools"?, "state_key"?}
    step(episode, reply) -> {"messages"?, "reward"?, "terminated"?, "truncated"?, "info"?, "state_key"?}
    run(episode, task, agent) -> {"reward", "step_rewards"?, "metrics"?, "reason"?}
    close(episode)

Requests are JSON lines of standard input, {"id", "method", "params"}. Answers are those of standard output, {"id",
"result"} or {"id", "error": {"kind", "message"}}. What the environment prints goes to standard error, and standard
input is empty for it. All methods are called in the main thread, one after the other, as many packages have one random
state for all: only coroutines run at the same time.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, TypedDict

Params = Mapping[str, object]
ErrorKind = Literal["unavailable", "agent", "environment"]

METHODS = ("tasks", "reset", "step", "run", "close")
SHARED_EPISODES = 64  # of a process whose environment does not wait for the agent
LEAVE_SECONDS = 4.0  # from the end of the requests until the process is killed
NICE = 10  # chats go first
MAX_MESSAGE_CHARS = 500


class Request(TypedDict):
    id: int
    method: str
    params: Params


class Unavailable(Exception):
    """The environment cannot be opened, or cannot do what is asked: a mistake of the user."""


class Wire:
    """The process's original standard input and output, which are replaced for everybody else."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._answers = os.fdopen(os.dup(1), "wb")  # children do not inherit a duplicate
        self._input = os.fdopen(os.dup(0), "rb")
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        with open(os.devnull, "rb") as empty:
            os.dup2(empty.fileno(), 0)
        self.requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._input:
            self.requests.put(json.loads(line))
        self.requests.put(None)
        time.sleep(LEAVE_SECONDS)
        kill_group()

    def succeed(self, request: Request, result: object) -> None:
        """Send a result. What is no JSON, or is too long, is an error of the environment."""
        try:
            text = json.dumps({"id": request["id"], "result": result}, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            return self.fail(request, "environment", f"its answer is no JSON: {error}")
        line = text.encode("utf-8", "replace") + b"\n"
        if len(line) > self._max_bytes:
            return self.fail(request, "environment", f"its answer has more than {self._max_bytes} bytes")
        self._send(line)

    def fail(self, request: Request, kind: ErrorKind, message: str) -> None:
        """Send an error."""
        error = {"kind": kind, "message": message[:MAX_MESSAGE_CHARS]}
        self._send(json.dumps({"id": request["id"], "error": error}).encode() + b"\n")

    def raised(self, request: Request, error: BaseException) -> None:
        """Send an exception. Its traceback goes to standard error."""
        traceback.print_exception(type(error), error, error.__traceback__)
        if isinstance(error, Unavailable):
            self.fail(request, "unavailable", str(error))
        elif type(error).__name__ == "AgentFailure":
            self.fail(request, "agent", describe(error))
        else:
            self.fail(request, "environment", describe(error))

    def _send(self, line: bytes) -> None:
        with self._lock:
            self._answers.write(line)
            self._answers.flush()


def describe(error: BaseException) -> str:
    """Return the type and the message's first line. Example: "ValueError: no such game" """
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def kill_group() -> None:
    """Kill this process and all that it has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def open_environment(adapter: str, name: str, arguments: dict[str, object]) -> object:
    """Return what the adapter makes. All that it raises is taken for a mistake of the user."""
    module = types.ModuleType("attune_adapter")
    sys.modules[module.__name__] = module
    try:
        with open(adapter, "rb") as file:  # not imported, so that nothing is written beside the file
            exec(compile(file.read(), adapter, "exec"), module.__dict__)
        opened: object = module.open_environment(name, arguments)
    except (Exception, SystemExit) as error:
        raise Unavailable(describe(error)) from error
    return opened


def count_episodes(environment: object) -> int:
    """Return how many episodes the environment can serve at a time: one, if its loop blocks the process."""
    has_blocking_loop = hasattr(environment, "run") and not is_concurrent(environment)
    return int(getattr(environment, "episodes_per_process", 1 if has_blocking_loop else SHARED_EPISODES))


def is_concurrent(environment: object) -> bool:
    """Return whether the environment's own loop is a coroutine."""
    return inspect.iscoroutinefunction(getattr(environment, "run", None))


def call(environment: object, request: Request) -> object:
    """Return the result of a method, which may be awaitable."""
    method: Callable[..., object] | None = None
    if request["method"] in METHODS:
        method = getattr(environment, request["method"], None)
    if method is None:
        raise Unavailable(f"it has no method {request['method']!r}")
    return method(**request["params"])


def serve(wire: Wire, environment: object) -> None:
    """Answer requests one after the other."""
    while (request := wire.requests.get()) is not None:
        if request["method"] == "cancel":
            continue  # what it names has ended
        try:
            result = call(environment, request)
        except (Exception, SystemExit) as error:
            wire.raised(request, error)
        else:
            wire.succeed(request, result)


async def serve_concurrently(wire: Wire, environment: object) -> None:
    """Answer requests, with all coroutines at the same time."""
    loop = asyncio.get_running_loop()
    running: dict[int, asyncio.Task[None]] = {}
    with ThreadPoolExecutor(1) as reader:
        while (request := await loop.run_in_executor(reader, wire.requests.get)) is not None:
            call_id = request["id"]
            if request["method"] == "cancel":
                if call_id in running:
                    running[call_id].cancel()
                continue
            running[call_id] = loop.create_task(await_answer(wire, environment, request))
            running[call_id].add_done_callback(partial(forget, running, call_id))


def forget(running: dict[int, asyncio.Task[None]], call_id: int, _: asyncio.Task[None]) -> None:
    """Remove a call that has ended."""
    del running[call_id]


async def await_answer(wire: Wire, environment: object, request: Request) -> None:
    """Answer one request."""
    try:
        result = call(environment, request)
        if inspect.isawaitable(result):
            result = await result
    except asyncio.CancelledError:
        wire.fail(request, "environment", "it was cancelled")
    except (Exception, SystemExit) as error:
        wire.raised(request, error)
    else:
        wire.succeed(request, result)


def main() -> None:
    """Open the environment that the first request names, and serve it until the requests end."""
    adapter, line_bytes, *paths = sys.argv[1:]
    wire = Wire(int(line_bytes))
    atexit.register(kill_group)  # what is registered first is called last
    os.nice(NICE)
    sys.path[:0] = paths
    request = wire.requests.get()
    if request is None:
        return
    try:
        environment = open_environment(adapter, **request["params"])  # type: ignore[arg-type]
    except Unavailable as error:
        return wire.raised(request, error)
    wire.succeed(request, {"episodes": count_episodes(environment), "is_concurrent": is_concurrent(environment)})
    if is_concurrent(environment):
        asyncio.run(serve_concurrently(wire, environment))
    else:
        serve(wire, environment)


if __name__ == "__main__":
    main()
