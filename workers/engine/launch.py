"""The command line and environment that start one SGLang."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Device files that exist where a process may use a GPU: of NVIDIA, of AMD, and of either under WSL.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

CPU_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--lora-backend=torch_native",
    "--disable-overlap-schedule",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--mem-fraction-static=0.5",  # --max-total-tokens is the effective limit
    "--max-total-tokens=32768",
    "--max-running-requests=32",
    "--sleep-on-idle",  # otherwise an idle scheduler uses a whole core
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine. `python` is the interpreter of SGLang's own environment."""

    python: Path
    model: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    log_path: Path
    host: str = "127.0.0.1"
    port: int = 8710
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str = "auto"
    enable_lora: bool = True  # False where full weights are swapped
    lora_rank: int = 8
    lora_modules: tuple[str, ...] = LORA_MODULES
    lora_slots: int = 8
    context_length: int | None = None
    tool_call_parser: str | None = "qwen25"
    extra_flags: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu" or (self.device == "auto" and not any(Path(name).exists() for name in GPU_DEVICES))

    def command(self, parent: int) -> list[str]:
        """Return the command. The engine ends when the process `parent` ends."""
        dtype = "float32" if self.dtype == "auto" and self.on_cpu else self.dtype
        return [
            *(str(self.python), "-m", "attune_sglang_cpu.launch", "--parent", str(parent)),
            f"--model-path={self.model}",
            f"--host={self.host}",
            f"--port={self.port}",
            f"--dtype={dtype}",
            *([f"--context-length={self.context_length}"] if self.context_length else []),
            *(self._lora_flags() if self.enable_lora else []),
            # Without a parser SGLang drops the log-probs of streamed tokens without text, such as the last token. For
            # requests without tools the parser changes nothing else.
            f"--tool-call-parser={self.tool_call_parser or 'qwen25'}",
            "--constrained-json-disable-any-whitespace",  # a small model could generate spaces for ever
            "--sampling-defaults=openai",
            *(
                "--enable-priority-scheduling",
                "--default-priority-value=0",
            ),  # rollouts have a lower priority than chats
            "--log-level=warning",  # the first line at level info contains the keys
            *(CPU_FLAGS if self.on_cpu else []),
            *self.extra_flags,
        ]

    def _lora_flags(self) -> list[str]:
        return [
            *("--enable-lora", f"--max-lora-rank={self.lora_rank}"),
            *("--lora-target-modules", *self.lora_modules),
            f"--max-loras-per-batch={self.lora_slots}",
        ]

    def environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name != "SGLANG_USE_CPU_ENGINE"}
        env |= {
            "ATTUNE_ENGINE_API_KEY": self.api_key,
            "ATTUNE_ENGINE_ADMIN_KEY": self.admin_key,
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.on_cpu:
            # With a second OpenMP thread, decoding drops from 270 to 5 tokens/s while another process runs.
            env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if Path(self.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        return env
