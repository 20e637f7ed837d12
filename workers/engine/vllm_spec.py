"""vLLM's command line and environment."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from app.core.settings.engine import EngineKind
from workers.engine.process import EngineSpec

# The ranks that vLLM takes. Adapters of a smaller rank load, and are exact.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The sizes of attention heads that its kernels for CPUs know. With another one it ends at the first request.
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
RUNNING_ON_CPU = 32  # requests at once
# Adapters that stay in memory. An unloaded one leaves it when newer ones need its place.
HELD_PER_SLOT = 8
CACHE_GIB = "1"  # of the key-value cache; otherwise vLLM takes nearly all memory


@dataclass(frozen=True, kw_only=True)
class VLLMSpec(EngineSpec):
    """One vLLM on a CPU, with adapters."""

    kind: ClassVar[EngineKind] = "vllm"
    child_prefix: ClassVar[str] = "VLLM::"
    variable_prefixes: ClassVar[tuple[str, ...]] = ("VLLM_",)

    def __post_init__(self) -> None:
        """Raise ValueError if vLLM would not start, or would end at the first request."""
        if not self.on_cpu:
            raise ValueError("engine.kind = vllm runs on CPUs only for now, and this machine has a GPU; use sglang")
        if self.adapter is None:
            raise ValueError("engine.kind = vllm does not swap full weights; use sglang, or adaptation = lora")
        if self.adapter.rank > LORA_RANKS[-1]:
            raise ValueError(f"engine.kind = vllm takes ranks up to {LORA_RANKS[-1]}, not {self.adapter.rank}")
        if (size := _head_size(Path(self.model))) is not None and size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            raise ValueError(f"vLLM's attention on CPUs knows heads of {sizes}; the model's have {size}. Use sglang")

    def command(self, parent: int) -> list[str]:
        assert self.adapter is not None
        grammar = {"backend": "xgrammar", "disable_any_whitespace": True}  # a model could generate spaces for ever
        return [
            *(str(self.python), "-m", "attune_vllm.launch", "--parent", str(parent)),
            f"--model={self.model}",
            "--served-model-name=base",
            f"--host={self.host}",
            f"--port={self.port}",
            f"--dtype={self.dtype}",
            *([] if self.context_length is None else [f"--max-model-len={self.context_length}"]),
            f"--max-num-seqs={self.max_running_requests or RUNNING_ON_CPU}",
            "--enable-lora",
            f"--max-lora-rank={next(rank for rank in LORA_RANKS if rank >= self.adapter.rank)}",
            f"--max-loras={self.max_loras_per_batch}",
            f"--max-cpu-loras={HELD_PER_SLOT * self.max_loras_per_batch}",
            "--logprobs-mode=processed_logprobs",  # those of the distribution that is sampled from
            "--generation-config=vllm",  # not the model's, whose defaults would apply
            "--scheduling-policy=priority",  # rollouts are below chats
            "--enable-scale-out",  # the route for aborts
            "--enforce-eager",
            "--enable-auto-tool-choice",
            f"--tool-call-parser={self.tool_call_parser}",
            f"--structured-outputs-config={json.dumps(grammar)}",
            "--middleware=attune_vllm.guard.Guard",
            "--worker-extension-cls=attune_vllm.worker.Worker",
            "--disable-uvicorn-access-log",
            *self.extra_flags,
        ]

    def environment(self) -> dict[str, str]:
        env = {"VLLM_CPU_KVCACHE_SPACE": CACHE_GIB} | EngineSpec.environment(self)
        return env | {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # routes to pause and to clear the cache; the guard asks for the admin key
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise every engine of a machine computes on its first core
            "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request waits 13 s for a compiler
        }


def _head_size(folder: Path) -> int | None:
    """Return the size of an attention head; None if the folder does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    except (OSError, KeyError):
        return None
