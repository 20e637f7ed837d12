"""One running engine: what it is started with, and all its processes, which end together."""

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Self

import psutil

from alignment.artifacts.specs import AdapterSpec
from app.core.processes import port_error
from app.core.settings.engine import EngineKind
from app.engines.load_errors import LAST_LOG_LINE
from app.inference.keys import EngineKeys

TERMINATE_TIMEOUT_SECONDS = 10.0
LOG_TAIL_BYTES = 64 * 1024
# Device files that exist where a process may use a GPU: of NVIDIA, of AMD, and of either under WSL.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")

# The environment variables that an engine inherits, by name and by prefix.
PASSED_VARIABLES = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
}
PASSED_PREFIXES = (
    *("LC_", "CUDA", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "HIP_", "HSA_", "ROCM_", "ROCR_", "AMD_"),
    *("FLASHINFER_", "TORCH", "PYTORCH_", "TRITON_", "TVM_", "OMP_", "MKL_", "KMP_", "OPENBLAS_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "SAFETENSORS_", "TOKENIZERS_"),
)


@dataclass(frozen=True, kw_only=True)
class EngineSpec(ABC):
    """How to start one engine. Each kind of engine has a subclass. `python` is the interpreter of its environment."""

    kind: ClassVar[EngineKind]
    child_prefix: ClassVar[str]  # of the names of its own processes; other children may come and go
    variable_prefixes: ClassVar[tuple[str, ...]]  # of its own environment variables, which it inherits

    python: Path
    model: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    log_path: Path
    host: str = "127.0.0.1"
    port: int = 8710
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    adapter: AdapterSpec | None  # None where full weights are swapped
    max_loras_per_batch: int = 8
    tool_call_parser: str
    context_length: int | None = None
    max_running_requests: int | None = None
    tp_size: int = 1
    extra_flags: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu" or (self.device == "auto" and not any(Path(name).exists() for name in GPU_DEVICES))

    @property
    def keys(self) -> EngineKeys:
        return EngineKeys(self.api_key, self.admin_key)

    @abstractmethod
    def command(self, parent: int) -> list[str]:
        """Return the command. The engine ends when the process `parent` ends. Flags hold no keys."""

    def environment(self) -> dict[str, str]:
        """Return the variables that the engine and its libraries need.

        An engine runs a model's files and a large library, so it gets no database URL and no secret but its own keys.
        """
        env = {name: value for name, value in os.environ.items() if self._is_passed(name)}
        env |= {
            "ATTUNE_ENGINE__API_KEY": self.api_key,
            "ATTUNE_ENGINE__ADMIN_KEY": self.admin_key,
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.on_cpu:
            # With a second OpenMP thread, decoding drops from 270 to 5 tokens/s while another process runs.
            env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if Path(self.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        return env

    def _is_passed(self, name: str) -> bool:
        return name in PASSED_VARIABLES or name.startswith((*PASSED_PREFIXES, *self.variable_prefixes))


class EngineProcess:
    """An engine in a session of its own, so that one signal reaches all its processes."""

    def __init__(self, spec: EngineSpec, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._spec = spec
        self._process = process
        self._children: dict[psutil.Process, str] = {}

    @classmethod
    async def start(cls, spec: EngineSpec) -> Self:
        require_free_port(spec)
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(spec.log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            process = await asyncio.create_subprocess_exec(
                *spec.command(parent=os.getpid()),
                env=spec.environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return cls(spec, process)

    async def wait_for_exit(self) -> str:
        """Wait until the main process has ended. Return how, and the last line of its log, for the operator."""
        code = await self._process.wait()
        ending = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the engine {ending}{LAST_LOG_LINE}{self._last_log_line()}"

    def find_lost_child(self) -> str | None:
        """Return the name of a process of the engine that has ended while the main process runs, or None.

        The main process does not always end then, but it answers no requests. Call this often: a child that started
        and ended between two calls is not noticed.
        """
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return None  # the main process has ended: see `wait_for_exit`
        names = {child.pid: name for child in children if (name := _name(child)).startswith(self._spec.child_prefix)}
        for child in children:
            with suppress(psutil.Error):
                # A process that a child starts has the child's name until it sets its own, so it does not count.
                if child.pid in names and names.get(child.ppid()) != names[child.pid]:
                    self._children[child] = names[child.pid]
        return next((name for child, name in self._children.items() if not is_alive(child)), None)

    async def terminate(self) -> None:
        """Terminate all processes, and kill those that are left after TERMINATE_TIMEOUT_SECONDS."""
        self._signal(signal.SIGTERM)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), TERMINATE_TIMEOUT_SECONDS)
        finally:
            self.kill()
        await self._process.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all processes have ended
            os.killpg(self.pid, number)

    def _last_log_line(self) -> str:
        try:
            with self._spec.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]
        except OSError as error:  # it was deleted, or its storage is away: the engine is restarted all the same
            return f"unknown: {error}"
        return next((line for line in reversed(lines) if line), f"nothing in {self._spec.log_path}")


def _name(process: psutil.Process) -> str:
    try:
        return str(process.cmdline()[0]).strip()
    except (psutil.Error, IndexError):  # it has ended, or is a zombie
        return ""


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs. A zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def require_free_port(spec: EngineSpec) -> None:
    """Raise ValueError if the engine's port is in use. An engine notices only after it has loaded the model."""
    if (reason := port_error(spec.host, spec.port)) is not None:
        raise ValueError(f"the engine cannot listen on {spec.host}:{spec.port}: {reason}")
