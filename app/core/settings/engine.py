"""Section of the inference engine. Names of what it is told are SGLang's flags, whatever its kind."""

from pathlib import Path
from typing import Literal

from pydantic import Field, HttpUrl, field_validator

from alignment.config.algorithm import Frozen

REPOSITORY = Path(__file__).resolve().parents[3]

EngineKind = Literal["sglang"]  # docs/engines.md compares them

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
    python: Path = Field(
        REPOSITORY / ".venv-engine" / "bin" / "python",
        description="interpreter of SGLang's environment; that of the repository when unset",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the engine computes")
    tool_call_parser: str = Field("qwen25", min_length=1, description="SGLang's parser for this model's tool calls")

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
        (), description='more flags of SGLang, e.g. ["--schedule-policy=lpm"]; those that Attune sets are refused'
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
    def _check_extra_flags(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        for flag in flags:
            if flag.startswith("--") and flag.startswith(RESERVED_FLAGS):
                raise ValueError(f"{flag.partition('=')[0]} is set by Attune; see the other settings of [engine]")
        return flags
