"""Section of the inference engine. Names of what it is told are SGLang's flags, whatever its kind."""

from pathlib import Path
from typing import Literal

from pydantic import Field, HttpUrl, ValidationInfo, field_validator, model_validator

from alignment.config.frozen_model import Frozen

REPOSITORY = Path(__file__).resolve().parents[3]

EngineKind = Literal["sglang", "vllm"]  # docs/engines.md compares them
ENVIRONMENTS: dict[EngineKind, str] = {"sglang": ".venv-engine", "vllm": ".venv-vllm"}
TOOL_CALL_PARSERS: dict[EngineKind, str] = {"sglang": "qwen25", "vllm": "hermes"}
# Settings that only SGLang has.
SGLANG_ONLY = (
    "mem_fraction_static",
    "max_total_tokens",
    "chunked_prefill_size",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "tp_size",
)

# Flags that Attune sets itself, because the service depends on their values. A prefix: "--lora" covers "--lora-paths".
RESERVED_FLAGS = (
    "--model",
    "--host",
    "--port",
    "--api-key",
    "--admin-api-key",
    "--dtype",
    "--context-length",
    "--enable-lora",
    "--max-lora",
    "--lora",
    "--tool-call-parser",
    "--constrained-json",
    "--sampling-defaults",
    "--enable-priority-scheduling",
    "--default-priority-value",
    "--log-level",
    "--tp",
    "--tensor-parallel",
    "--dp",
    "--data-parallel",
    "--mem-fraction-static",
    "--max-total-tokens",
    "--max-running-requests",
    "--chunked-prefill-size",
    "--kv-cache-dtype",
    "--quantization",
    "--attention-backend",
    "--served-model-name",
    "--config",
)
RESERVED_VLLM_FLAGS = (
    *("--model", "--served-model-name", "--host", "--port", "--api-key", "--dtype", "--max-model-len"),
    *(
        "--max-num-seqs",
        "--enable-lora",
        "--max-lora",
        "--max-cpu-loras",
        "--lora",
        "--logprobs-mode",
        "--generation-config",
    ),
    *("--scheduling-policy", "--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser"),
    *("--structured-outputs-config", "--middleware", "--worker-extension-cls", "--tensor-parallel", "-tp"),
    *("--data-parallel", "-dp", "--pipeline-parallel", "-pp", "--config"),
)


class EngineSettings(Frozen):
    """One replica of an engine, and how versions reach it."""

    kind: EngineKind = Field("sglang", description="which server the engine is")
    name: str = Field("engine-0", min_length=1, description="the name of this replica; unique in the deployment")
    host: str = Field("127.0.0.1", description="address that the engine listens on")
    port: int = Field(8710, ge=0, le=65535, description="port that the engine listens on")
    api_key: str | None = Field(
        None,
        repr=False,
        description="shared API key of the engines; needed for engines on other machines, with `admin_key`",
    )
    admin_key: str | None = Field(None, repr=False, description="shared admin key of the engines")
    python: Path | None = Field(
        None,
        description="interpreter of the engine's environment; .venv-engine or .venv-vllm of the repository when unset",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the engine computes")
    tool_call_parser: str | None = Field(
        None,
        min_length=1,
        description="the engine's parser for this model's tool calls; when unset qwen25 (SGLang) or hermes (vLLM), "
        "which read the same format",
    )

    context_length: int | None = Field(None, ge=1, description="longest prompt and reply; the model's when unset")
    mem_fraction_static: float | None = Field(
        None, gt=0, lt=1, description="share of the memory for weights and KV cache; SGLang's choice when unset"
    )
    max_total_tokens: int | None = Field(None, ge=1, description="tokens in the KV cache; SGLang's choice when unset")
    max_running_requests: int | None = Field(
        None, ge=1, description="requests that are generated at once; SGLang's choice when unset"
    )
    chunked_prefill_size: int | None = Field(
        None, ge=-1, description="tokens of a prompt that are computed at once, -1 for all; SGLang's choice when unset"
    )
    quantization: str | None = Field(
        None, description="SGLang's quantization of the base model, e.g. \"fp8\"; that of the model's files when unset"
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field("auto", description="data type of the KV cache")
    attention_backend: str | None = Field(None, description="SGLang's attention backend; its choice when unset")
    tp_size: int = Field(1, ge=1, description="GPUs that share each layer (tensor parallelism)")
    max_loras_per_batch: int = Field(8, ge=1, description="adapters in one batch, the base model included")
    extra_flags: tuple[str, ...] = Field(
        (), description='more flags of the engine, e.g. ["--schedule-policy=lpm"]; those that Attune sets are refused'
    )

    start_timeout_seconds: float = Field(
        600.0, gt=0, description="how long an engine may take to start and load its versions before it is restarted"
    )
    response_timeout_seconds: float = Field(
        30.0, gt=0, description="how long an engine may not respond before it is restarted"
    )

    adapter_delivery: Literal["path", "memory"] = Field(
        "path",
        description="how engines receive an adapter: path (a folder that they share) or memory (within the request)",
    )
    versions_url: HttpUrl | None = Field(
        None,
        description="URL of the API for an engine without shared storage, from which it downloads versions at start",
    )
    drain_seconds: float = Field(
        1.0, ge=0, description="full weights: how long running replies may take to finish before a weight swap"
    )
    weight_swap_wait_seconds: float = Field(
        60.0,
        ge=0,
        description="full weights: how long a request waits for a weight swap before it is answered with 503",
    )

    @field_validator("extra_flags")
    @classmethod
    def _check_extra_flags(cls, flags: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        reserved = RESERVED_VLLM_FLAGS if info.data.get("kind") == "vllm" else RESERVED_FLAGS
        for flag in flags:
            if flag.startswith("-") and flag.startswith(reserved):
                raise ValueError(f"{flag.partition('=')[0]} is set by Attune; see the other settings of [engine]")
        return flags

    @model_validator(mode="after")
    def _check_kind(self) -> "EngineSettings":
        """Refuse what vLLM cannot do, before anything starts."""
        if self.kind != "vllm":
            return self
        for name in SGLANG_ONLY:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"engine.{name} is a setting of SGLang, and engine.kind is vllm; remove it")
        if self.device == "cuda":
            raise ValueError("engine.kind = vllm runs on CPUs only; use engine.kind = sglang on GPUs")
        if self.adapter_delivery != "path":
            raise ValueError(
                "engine.kind = vllm takes no adapters in a request; set engine.adapter_delivery = path and share the "
                "storage of the versions"
            )
        if self.versions_url is not None:
            raise ValueError(
                "engine.kind = vllm reads its versions again while it runs, and what engine.versions_url brings is "
                "deleted once it is loaded; share the storage of the versions"
            )
        return self

    @property
    def interpreter(self) -> Path:
        """The interpreter of the engine's environment."""
        return self.python or REPOSITORY / ENVIRONMENTS[self.kind] / "bin" / "python"

    @property
    def effective_tool_call_parser(self) -> str:
        """The engine's parser for tool calls. The defaults of both kinds read the same format."""
        return self.tool_call_parser or TOOL_CALL_PARSERS[self.kind]
