"""SGLang's command line and environment."""

from dataclasses import dataclass
from typing import ClassVar

from app.core.settings.engine import EngineKind
from workers.engine.process import EngineSpec

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


@dataclass(frozen=True, kw_only=True)
class SGLangSpec(EngineSpec):
    """One SGLang. What is None is left to SGLang."""

    kind: ClassVar[EngineKind] = "sglang"
    child_prefix: ClassVar[str] = "sglang::"
    variable_prefixes: ClassVar[tuple[str, ...]] = ("SGLANG_", "SGL_")

    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    chunked_prefill_size: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str | None = None

    def command(self, parent: int) -> list[str]:
        return [
            # The plug-in's launcher starts SGLang on a GPU too; its platform replaces SGLang's own only without one.
            *(str(self.python), "-m", "attune_sglang_cpu.launch", "--parent", str(parent)),
            f"--model-path={self.model}",
            f"--host={self.host}",
            f"--port={self.port}",
            f"--dtype={self.dtype}",
            *self._lora_flags(),
            # Without a parser SGLang drops the log-probs of streamed tokens without text, such as the last token. For
            # requests without tools the parser changes nothing else.
            f"--tool-call-parser={self.tool_call_parser}",
            "--constrained-json-disable-any-whitespace",  # a small model could generate spaces for ever
            "--sampling-defaults=openai",
            *("--enable-priority-scheduling", "--default-priority-value=0"),  # rollouts are below chats
            "--log-level=warning",  # the first line at level info contains the keys
            *(CPU_FLAGS if self.on_cpu else []),
            *self._size_flags(),  # after CPU_FLAGS, since the last value of a flag is the one that counts
            *self.extra_flags,
        ]

    def _size_flags(self) -> list[str]:
        """Return the flags of the settings that are not left to SGLang."""
        flags: dict[str, object | None] = {
            "context-length": self.context_length,
            "mem-fraction-static": self.mem_fraction_static,
            "max-total-tokens": self.max_total_tokens,
            "max-running-requests": self.max_running_requests,
            "chunked-prefill-size": self.chunked_prefill_size,
            "quantization": self.quantization,
            "kv-cache-dtype": None if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            "attention-backend": self.attention_backend,
            "tp-size": None if self.tp_size == 1 else self.tp_size,
        }
        return [f"--{name}={value}" for name, value in flags.items() if value is not None]

    def _lora_flags(self) -> list[str]:
        if self.adapter is None:
            return []
        return [
            *("--enable-lora", f"--max-lora-rank={self.adapter.rank}"),
            *("--lora-target-modules", *sorted(self.adapter.target_modules)),
            f"--max-loras-per-batch={self.max_loras_per_batch}",
        ]

    def _is_passed(self, name: str) -> bool:
        return name != "SGLANG_USE_CPU_ENGINE" and super()._is_passed(name)
