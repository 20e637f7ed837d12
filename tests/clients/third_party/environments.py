"""An environment of its own for each client: its pinned packages and nothing else, kept between runs.

ATTUNE_TEST_CLIENTS names the folder, by default .attune/test-clients. An environment is made anew when the pins change.
"""

import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tests.conftest import skip_or_fail

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
CACHE = Path(os.environ.get("ATTUNE_TEST_CLIENTS", REPOSITORY / ".attune" / "test-clients"))
INSTALL_SECONDS = 1500
PIP_OPTIONS = ("--quiet", "--disable-pip-version-check")
# Clients must not find keys, proxies or hosts in the environment; pip and npm need theirs.
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
    "PYTHONDONTWRITEBYTECODE": "1",
    "STREAMLIT_BROWSER_GATHER_USAGE_STATS": "false",
}


def run_program(client: str, program: str, base_url: str, api_key: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the folder `client` in that client's environment."""
    folder = prepare(client)
    if program.endswith(".mjs"):  # Node looks for packages beside the program and above it
        shutil.copy(HERE / "shared" / "client_program.mjs", CACHE)
        command = ["node", str(shutil.copy(HERE / client / program, folder))]
    else:
        command = [str(folder / "bin" / "python"), str(HERE / client / program)]
    environment = {"PYTHONPATH": str(HERE / "shared"), **_connection(base_url, api_key)}
    return _run(command, folder, environment, seconds=400)


def run_user_interface(client: str, app: Path, url: str, api_key: str) -> subprocess.CompletedProcess[str]:
    """Run the program of a Python user interface with the file of an app; see shared/ui_program.py."""
    folder = prepare(client)
    paths = os.pathsep.join(str(path) for path in (HERE / "shared", REPOSITORY / "clients" / "python"))
    connection = {"ATTUNE_URL": url, "ATTUNE_API_KEY": api_key, "ATTUNE_TEST_APP": str(app)}
    connection["ATTUNE_TEST_PORT"] = str(free_port())
    command = [str(folder / "bin" / "python"), str(HERE / client / "program.py")]
    return _run(command, folder, {"PYTHONPATH": paths, **connection}, seconds=400)


def free_port() -> int:
    """Return a port for a server that takes long to start: none of those that the system gives to connections."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError("no port is free")


def run_pytest(
    client: str, options: list[str], base_url: str, api_key: str, seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run pytest in the environment of the folder `client`, on its file suite.py, without this project's conftest."""
    folder = prepare(client)
    arguments = ["-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", str(HERE / client), *options]
    command = [str(folder / "bin" / "python"), "-m", "pytest", *arguments, str(HERE / client / "suite.py")]
    paths = os.pathsep.join(str(path) for path in (HERE / client, REPOSITORY / "clients" / "python"))
    return _run(command, folder, {"PYTHONPATH": paths, **_connection(base_url, api_key)}, seconds)


def _connection(base_url: str, api_key: str) -> dict[str, str]:
    return {"ATTUNE_TEST_BASE_URL": base_url, "ATTUNE_TEST_API_KEY": api_key}


def _run(
    command: list[str], folder: Path, environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    env = {**QUIET, "HOME": str(home), "PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=seconds)


def prepare(client: str, pins_folder: Path = HERE) -> Path:
    """Return the folder of the client's environment, which is installed if it is missing, by one process at a time."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{client}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _prepare(client, pins_folder)


def _prepare(client: str, pins_folder: Path) -> Path:
    pins = pins_folder / client / "requirements.txt"
    if not pins.exists():
        pins = pins_folder / client / "package-lock.json"
    folder = CACHE / f"{client}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    if (folder / "complete").exists():
        return folder
    for outdated in CACHE.glob(f"{client}-*"):
        shutil.rmtree(outdated)
    folder.mkdir(parents=True)
    if pins.suffix == ".json":
        _install_node_packages(client, folder)
    else:
        _run_installer([sys.executable, "-m", "venv", str(folder)], folder)
        _run_installer([str(folder / "bin" / "pip"), "install", *PIP_OPTIONS, "-r", str(pins)], folder)
    (folder / "complete").touch()
    return folder


def _install_node_packages(client: str, folder: Path) -> None:
    if shutil.which("npm") is None:
        skip_or_fail("npm is not installed")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / client / name, folder)
    _run_installer(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)


def _run_installer(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        skip_or_fail(f"{folder.name} cannot be installed: {' '.join(lines[-3:])}")
