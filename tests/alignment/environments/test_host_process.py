"""The process of an environment of others: its protocol, and what becomes of one that breaks it."""

import ast
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment.environments import host_process
from alignment.environments.errors import AgentFailure, InfrastructureFailure
from alignment.environments.host_process import ADAPTERS, HOST, HostConfig, HostProcess
from alignment.errors import UnavailableEnvironment

ADAPTER = """
import os, subprocess, sys, time

class AgentFailure(Exception):
    pass

class Environment:
    def reset(self, episode, task):
        print("printed")
        sys.stdout.flush()
        os.system("echo of a child")
        return {"stdin": sys.stdin.read(), "argv0": task.get("name"), "nice": os.nice(0)}

    def step(self, episode, reply):
        exec(reply["content"], globals())

    def close(self, episode):
        return {name: os.environ[name] for name in os.environ}

def open_environment(name, arguments):
    if name == "exit":
        sys.exit("no such game")
    return Environment()
"""
Start = Callable[..., HostProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start processes with an adapter, and end them after the test."""
    started: list[HostProcess] = []

    def start_process(source: str = ADAPTER, **options: object) -> HostProcess:
        adapter = tmp_path / "adapter.py"
        adapter.write_text(source)
        config = HostConfig(python=Path(sys.executable), **options)  # type: ignore[arg-type]
        started.append(HostProcess(config, adapter, "game:one"))
        return started[-1]

    yield start_process
    for process in started:
        process.kill("is at the end of the test")


async def open_name(process: HostProcess, name: str = "one") -> None:
    assert await process.call("open", {"name": name, "arguments": {}}, 60) == {"episodes": 64, "is_concurrent": False}


async def do(process: HostProcess, program: str, seconds: float = 60) -> object:
    """Run a program in the environment's `step`."""
    return await process.call("step", {"episode": "a", "reply": {"content": program}}, seconds)


async def test_what_the_environment_prints_is_not_in_the_protocol(start: Start) -> None:
    process = start()
    await open_name(process)
    answer = await process.call("reset", {"episode": "a", "task": {"name": "é\u2028\n"}}, 60)
    assert answer == {"stdin": "", "argv0": "é\u2028\n", "nice": min(os.nice(0) + 10, 19)}
    assert await do(process, "os.write(1, b'raw'); print('more', flush=True)") is None
    while b"raw" not in process._tail:  # which another thread reads
        await asyncio.sleep(0.01)
    process.kill("was stopped")
    with pytest.raises(InfrastructureFailure, match=r"the process of game:one was stopped; it has printed: .*raw"):
        await do(process, "pass")


async def test_variables_of_the_service_are_not_inherited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "ATTUNE_SECRET", "secret")
    process = start(environment={"GAME_KEY": "key"})
    await open_name(process)
    variables = await process.call("close", {"episode": "a"}, 60)
    assert isinstance(variables, dict)
    allowed = {*host_process.INHERITED_VARIABLES, "GAME_KEY", "LC_CTYPE"}
    assert variables["GAME_KEY"] == "key" and set(variables) <= allowed


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        ("raise ValueError('no such move\\nmore')", InfrastructureFailure, "game:one: ValueError: no such move\n"),
        ("raise AgentFailure('gave up')", AgentFailure, "game:one: AgentFailure: gave up"),
        ("sys.exit(3)", InfrastructureFailure, "game:one: SystemExit: 3"),
        ("raise KeyError()", InfrastructureFailure, "game:one: KeyError\n"),
    ],
)
async def test_exception_ends_the_call_alone(start: Start, program: str, error: type[Exception], message: str) -> None:
    process = start()
    await open_name(process)
    with pytest.raises(error, match=message):
        await do(process, program)
    assert await do(process, "pass") is None


@pytest.mark.parametrize("result", ["float('nan')", "object()", "'x' * 3_000_000"])
async def test_result_that_cannot_be_sent_ends_the_call_alone(start: Start, result: str) -> None:
    source = ADAPTER.replace("exec(reply", f"return {result} if reply['content'] == 'result' else exec(reply")
    process = start(source)
    await open_name(process)
    with pytest.raises(InfrastructureFailure, match="its answer"):
        await do(process, "result")
    assert await do(process, "pass") is None


@pytest.mark.parametrize("name", ["does_not_exist", "_lock", "open"])
async def test_unknown_method_is_refused(start: Start, name: str) -> None:
    process = start()
    await open_name(process)
    with pytest.raises(UnavailableEnvironment, match=f"it has no method '{name}'"):
        await process.call(name, {}, 60)


WIRE = "import gc; wire = next(o for o in gc.get_objects() if type(o).__name__ == 'Wire');"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("os._exit(7)", "ended with exit status 7"),
        ("os.kill(os.getpid(), 11)", "ended with exit status -11"),
        ("import sys; print('why', file=sys.stderr); os._exit(1)", "status 1; it has printed: why"),
        ("print('https://u:p@host/a?key=secret'); os._exit(1)", r"it has printed: https://host/a\?…$"),
        (f"{WIRE} wire._send(b'no JSON\\n')", "has sent what is no answer: b'no JSON"),
        (f"{WIRE} wire._send(b'[1]\\n')", "has sent what is no answer"),
        (f"{WIRE} wire._send(b'{{\"id\": 77}}\\n')", "has answered a call that was not made: 77"),
        (f"{WIRE} wire._send(b'x' * 2_000_000)", "has sent a line of more than 1048576 bytes"),
        (f"{WIRE} wire._answers.write(b'half a li'); wire._answers.flush(); os._exit(2)", "exit status 2"),
    ],
    ids=["exits", "crashes", "says why", "hides keys", "no JSON", "no object", "unknown id", "too long", "half a line"],
)
async def test_process_that_breaks_ends_with_all_its_calls(start: Start, program: str, message: str) -> None:
    process = start()
    await open_name(process)
    calls = [do(process, program), do(process, "time.sleep(600)"), do(process, "pass")]
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(failure) for failure in failures] == [InfrastructureFailure] * 3
    assert not process.is_alive
    with pytest.raises(InfrastructureFailure, match=message):
        await do(process, "pass")


async def test_endless_output_is_not_held(start: Start) -> None:
    process = start()
    await open_name(process)
    await do(process, "for _ in range(2000): print('x' * 10_000)")
    assert len(process._tail) <= host_process.TAIL_BYTES


async def test_process_that_hangs_is_killed(start: Start) -> None:
    process = start()
    await open_name(process)
    with pytest.raises(InfrastructureFailure, match=r"had no answer to 'step' within 0\.2 s"):
        await do(process, "time.sleep(600)", seconds=0.2)
    assert not process.is_alive
    await wait_for_end(process.pid)


async def test_children_end_with_the_process(start: Start, tmp_path: Path) -> None:
    process = start()
    await open_name(process)
    pids = tmp_path / "pids"
    child = "subprocess.Popen(['sleep', '600']).pid"
    grandchild = "subprocess.Popen(['sh', '-c', 'sleep 600 & echo $!; wait'], stdout=subprocess.PIPE).stdout.readline()"
    await do(
        process, f"child, other = {child}, {grandchild}; open({str(pids)!r}, 'w').write(f'{{child}} {{int(other)}}')"
    )
    await do(process, "pass")
    process.kill("was stopped")
    for pid in pids.read_text().split():
        await wait_for_end(int(pid))


@pytest.mark.parametrize("first", ["pass", "os.setsid()"], ids=["in its group", "beside its group"])
async def test_process_that_has_died_is_dead_though_a_child_holds_its_output(start: Start, first: str) -> None:
    process = start()
    await open_name(process)
    program = f"if os.fork() == 0:\n    {first}\n    time.sleep(120)\n    os._exit(0)\nos._exit(3)"
    with pytest.raises(InfrastructureFailure, match="ended with exit status 3"):
        await do(process, program)
    assert not process.is_alive


async def test_time_of_a_call_runs_from_its_beginning(start: Start) -> None:
    """Calls wait for those before them. None of these is slow, but together they are."""
    process = start()
    await open_name(process)
    assert await asyncio.gather(*(do(process, "time.sleep(1.5)", seconds=9.5) for _ in range(7))) == [None] * 7
    with pytest.raises(InfrastructureFailure, match=r"had no answer to 'step' within 0\.5 s"):
        await do(process, "time.sleep(600)", seconds=0.5)


@pytest.mark.parametrize("program", ["pass", "time.sleep(600)"], ids=["idle", "busy"])
async def test_children_end_when_the_service_dies(start: Start, tmp_path: Path, program: str) -> None:
    """The end of its requests is all that a process sees of a service that was killed."""
    process = start()
    await open_name(process)
    pids = tmp_path / "pids"
    await do(process, f"open({str(pids)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))")
    call = asyncio.create_task(do(process, program))
    await asyncio.sleep(0.1)
    process._requests.put(None)
    await asyncio.wait([call])
    for pid in (int(pids.read_text()), process.pid):
        await wait_for_end(pid)
    assert call.exception() is None or isinstance(call.exception(), InfrastructureFailure)


async def wait_for_end(pid: int) -> None:
    for _ in range(2000):
        if not is_running(pid):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"process {pid} goes on")


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that is a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_environment_that_cannot_be_opened_is_the_users_mistake(start: Start) -> None:
    process = start()
    with pytest.raises(UnavailableEnvironment, match="game:one: SystemExit: no such game"):
        await process.call("open", {"name": "exit", "arguments": {}}, 60)
    process = start("import package_that_is_not_installed")
    with pytest.raises(UnavailableEnvironment, match="ModuleNotFoundError: No module named 'package_that_is_not"):
        await process.call("open", {"name": "one", "arguments": {}}, 60)


def test_interpreter_that_does_not_exist_is_the_users_mistake() -> None:
    with pytest.raises(UnavailableEnvironment, match="/does/not/exist cannot be started: No such file"):
        HostProcess(HostConfig(python=Path("/does/not/exist")), ADAPTERS / "python_adapter.py", "python:a:b")


def test_calls_without_an_event_loop(start: Start) -> None:
    process = start()
    assert process.call_blocking("open", {"name": "one", "arguments": {}}, 60)
    with pytest.raises(InfrastructureFailure, match=r"within 0\.1 s"):
        process.call_blocking("step", {"episode": "a", "reply": {"content": "time.sleep(600)"}}, 0.1)


def test_closed_process_may_clean_up(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "cleaned"
    process = start(f"import atexit\natexit.register(lambda: open({str(file)!r}, 'w').close())\n{ADAPTER}")
    process.call_blocking("open", {"name": "one", "arguments": {}}, 60)
    folder = process._folder
    assert folder.exists()
    process.close()
    assert file.exists() and not folder.exists() and not process.is_alive


@pytest.mark.parametrize("path", [HOST, *sorted(ADAPTERS.glob("*_adapter.py"))], ids=lambda path: path.stem)
def test_host_runs_in_older_interpreters_and_needs_nothing_of_ours(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    own = {
        "gymnasium_adapter": {"gymnasium", "numpy"},
        "host": set(),
        "verifiers_adapter": {"verifiers", "openai", "httpx2"},  # httpx2: for type checks alone
        "verifiers_v1_adapter": {"verifiers", "pydantic"},  # which verifiers needs
    }
    assert packages <= own.get(path.stem, {path.stem.removesuffix("_adapter")})
