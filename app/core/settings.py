"""Settings. This is the only module that reads the environment (prefix ATTUNE_)."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, HttpUrl, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from alignment.config.algorithm import ALGORITHM_NAMES, AlgorithmConfig, PPOConfig
from alignment.config.rewards import RewardsConfig
from alignment.config.rollouts import RolloutsConfig
from alignment.release.canary import CanaryConfig
from alignment.release.gates import Gate, PromptsGate
from alignment.release.shadow import ShadowConfig, disabled_reason

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "demo" / "model"
DEFAULT_KL_TARGET = 0.01
TrackerName = Literal["jsonl", "tensorboard", "wandb"]


class Settings(BaseSettings):
    """The configuration of one installation. Every default works on a laptop."""

    model_config = SettingsConfigDict(env_prefix="ATTUNE_", extra="ignore", frozen=True)

    home: Path = Field(Path(".attune"), description="folder of the embedded database, versions and logs")
    database_url: str | None = Field(None, description="SQLAlchemy URL; SQLite under `home` when unset")
    broker_url: str | None = Field(None, description="Celery broker; a folder under `home` when unset")
    database_seconds: float = Field(
        5.0,
        ge=0.5,
        description="longest time of a PostgreSQL statement in a request, which is then answered with 503",
    )
    database_job_seconds: float = Field(
        20.0, ge=0.5, description="longest time of a PostgreSQL statement in a worker, which tries again"
    )

    model: str = Field(str(DEMO_MODEL), description="a Hugging Face causal language model: a folder or a hub name")
    policy: str = Field("assistant", pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    tool_call_parser: str = Field("qwen25", min_length=1, description="SGLang's parser for this model's tool calls")

    host: str = "127.0.0.1"
    port: int = 8700
    api_key: str | None = Field(None, description="the API key that the command line presents")
    max_body_bytes: int = 4 * 1024 * 1024
    max_import_bytes: int = 256 * 1024 * 1024
    chat_timeout_seconds: float = 600.0
    route_cache_seconds: float = Field(
        0.02, ge=0, description="how long an API process may use a deployment that another process has changed"
    )
    cors_origins: list[str] = Field(
        [], description='origins of web pages that may call the API, e.g. ["https://shop.example"]; ["*"] for all'
    )

    limits_url: str = Field(
        "memory://",
        description="where requests are counted: memory://, or async+redis://… if several processes share the limits",
    )
    requests_per_minute: int = Field(6000, ge=1, description="limit of every key; a key may have a lower one")
    max_concurrency: int = Field(256, ge=1, description="concurrent requests of a key, which may have a lower limit")
    key_cache_seconds: float = Field(
        1.0, ge=0, description="how long an API process may accept a key that another process has revoked"
    )
    feedback_token_seconds: float = Field(3 * 3600.0, gt=0, description="lifetime of a browser's feedback token")

    engine_name: str = "engine-0"
    engine_host: str = "127.0.0.1"
    engine_port: int = 8710
    engine_api_key: str | None = Field(
        None, description="shared API key of the engines; needed for engines on other machines, with `engine_admin_key`"
    )
    engine_admin_key: str | None = Field(None, description="shared admin key of the engines")
    adapter_delivery: Literal["path", "memory"] = Field(
        "path",
        description="how engines receive an adapter: path (a folder that they share) or memory (within the request)",
    )
    versions_url: HttpUrl | None = Field(
        None,
        description="URL of the API for an engine without shared storage, from which it downloads versions at start",
    )
    engine_python: Path = Field(REPOSITORY / ".venv-engine" / "bin" / "python")
    engine_device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="data type of the engine and the trainer")
    max_output_tokens: int = Field(512, description="length limit of a reply when the request names none")
    output_token_cap: int = Field(8192, ge=1, description="most output tokens of a request, over all choices")
    prompt_char_cap: int = Field(400_000, ge=1, description="longest prompt, in characters")
    max_choices: int = Field(16, ge=1, description="most choices (`n`) of a completion")
    drain_seconds: float = Field(
        1.0, ge=0, description="full weights: how long running replies may take to finish before a weight swap"
    )
    weight_swap_wait_seconds: float = Field(
        60.0,
        ge=0,
        description="full weights: how long a request waits for a weight swap before it is answered with 503",
    )
    lora_slots: int = Field(8, description="adapters in one engine batch, the base model included")
    keep_versions: int = Field(4, description="versions kept loaded besides the serving and the previous one")

    trainer_ranks: int = 1
    batch_size: int = Field(24, ge=2, description="ready samples that start an update")
    max_batch_size: int | None = Field(
        None,
        ge=2,
        description="most samples of an update, where more are ready; four times `batch_size` when unset",
    )
    min_batch_size: int | None = Field(
        None,
        ge=2,
        description="fewest samples of an update after `max_wait_seconds`; a quarter of `batch_size` when unset",
    )
    max_wait_seconds: float = Field(300.0, ge=0, description="how long samples wait for a full batch")
    max_sample_age_seconds: float = Field(
        30 * 86400.0, gt=0, description="how old a reply may be that is learned from, in seconds"
    )
    max_staleness: int | None = Field(
        None, ge=0, description="versions that a sample may be behind the trained one; any number when unset"
    )
    rewards: Annotated[RewardsConfig, NoDecode] = Field(
        RewardsConfig(), description="reward sources, as JSON; see docs/rewards.md. A policy may have its own"
    )
    feedback: Literal["auto", "sparse", "dense"] = Field(
        "auto",
        description="sparse: a reward model that is fitted on people's feedback scores the replies without it; dense: "
        "feedback alone counts, unless `rewards` has a reward model; auto: sparse where people rate few replies",
    )
    secrets: dict[str, SecretStr] = Field(
        {}, description='keys of judges and reward services by name, e.g. {"judge": "sk-…"}'
    )
    rollouts: Annotated[RolloutsConfig, NoDecode] = Field(
        RolloutsConfig(),
        description="group sampling and verifiers, as JSON; see docs/rollouts.md. A policy may have its own",
    )
    canary: Annotated[CanaryConfig | None, NoDecode] = Field(
        None,
        description='canary of new versions, as JSON, e.g. {"share": 0.05}; deployed to everybody at once when unset',
    )
    shadow: Annotated[ShadowConfig | None, NoDecode] = Field(
        None,
        description='shadow deployment of new versions before the canary, as JSON, e.g. {"share": 0.2}; none if unset',
    )
    gates: Annotated[tuple[Gate, ...], NoDecode] = Field(
        (), description="checks that a version must pass before it serves, as a JSON list; see docs/versions.md"
    )
    private_hosts: list[str] = Field(
        [], description='hosts in private networks that a policy\'s own rewards may name, e.g. ["judge.internal"]'
    )
    kl_guard: float = Field(
        0.05,
        gt=0,
        description="largest KL from the parent per token (k3); a version above it is rejected, and training goes back",
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="KL per token that an update may reach, below `kl_guard`: it is scaled to fit; 0.01, or half of "
        "a smaller `kl_guard`, when unset",
    )
    epochs: int = Field(3, ge=1, description="passes over the samples of an update, whose size the KL target bounds")
    kl_alarms: int = Field(3, ge=1, description="consecutive alarms of the KL guard that halt a policy's training")

    max_rater_share: float = Field(0.05, gt=0, le=1, description="largest share of one rater in a batch")
    max_conversation_share: float = Field(0.1, gt=0, le=1, description="largest share of one conversation in a batch")
    max_cluster_share: float = Field(0.5, gt=0, le=1, description="largest share of near-duplicate replies in a batch")
    max_rater_day: int = Field(200, ge=1, description="rewards of one rater per day that are trained on")
    min_raters: int = Field(1, ge=1, description="distinct raters that a batch must have")
    trust: bool = Field(True, description="weight raters by their reliability, and quarantine floods of feedback")
    adaptation: Literal["lora", "full"] = Field(
        "lora",
        description="what is trained: lora (an adapter) or full (all weights, docs/full-weights.md). Fixed per `home`",
    )
    learning_rate: float = Field(
        3e-4, gt=0, description="of the adapter; models under 10 M parameters take ten times more, full weights a tenth"
    )
    algorithm: Annotated[AlgorithmConfig, NoDecode] = Field(
        PPOConfig(), description='a name such as "kto", settings as JSON with a `type`, or module:Class'
    )
    kl_coef: float | None = Field(None, ge=0, description="weight of the KL to the base model; see docs/algorithms.md")
    seed: int = 0

    trackers: list[TrackerName] = Field(
        ["jsonl"], description='experiment trackers of the updates, e.g. ["jsonl", "tensorboard", "wandb"]'
    )
    metrics_open: bool = Field(False, description="serve /metrics without an admin key")
    length_range: Annotated[tuple[int, int] | None, NoDecode] = Field(
        None, description="shortest and longest good reply in tokens, e.g. 30,80; other replies are flagged"
    )

    lease_seconds: float = Field(20.0, gt=0)
    max_attempts: int = 3
    reconcile_seconds: float = Field(2.0, gt=0)
    probe_tolerance: float | None = Field(
        None,
        description="largest difference of log-probs with which a delivery is verified; depends on `dtype` when unset",
    )

    @field_validator("length_range", mode="before")
    @classmethod
    def _parse_length_range(cls, value: Any) -> Any:
        """Example: "30,80" or "[30, 80]" -> ["30", "80"]"""
        return (value.strip("[] ").split(",") if value.strip() else None) if isinstance(value, str) else value

    @field_validator("length_range")
    @classmethod
    def _check_length_range(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 0 <= value[0] < value[1]:
            raise ValueError("it takes two numbers of tokens, the smaller one first, e.g. 30,80")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> "Settings":
        if self.kl_target is not None and self.kl_target >= self.kl_guard:
            raise ValueError(f"kl_target ({self.kl_target:g}) must be below kl_guard ({self.kl_guard:g})")
        if self.adaptation == "full" and (self.canary is not None or self.shadow is not None):
            raise ValueError(
                "a canary or shadow needs two versions side by side; an engine holds one version's full weights"
            )
        if self.adaptation == "full" and any(isinstance(gate, PromptsGate) and gate.compares for gate in self.gates):
            raise ValueError("a gate compares two versions side by side; an engine holds one version's full weights")
        if self.adaptation == "full" and (self.adapter_delivery != "path" or self.versions_url is not None):
            raise ValueError("full weights need adapter_delivery=path and storage that the engines share")
        if self.versions_url is not None and not (self.database_url and self.engine_api_key and self.engine_admin_key):
            raise ValueError("versions_url needs database_url, engine_api_key and engine_admin_key")
        if self.shadow is not None and (reason := disabled_reason(self.shadow, self.rewards)) is not None:
            raise ValueError(
                f"no version could run in shadow: {reason}; a policy with its own rewards may have its own shadow"
            )
        return self

    @field_validator("algorithm", mode="before")
    @classmethod
    def _parse_algorithm(cls, value: object) -> object:
        """A value that is neither JSON nor a known name is a user's class or entry point."""
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("{"):
            return json.loads(value)
        return {"type": value} if value in ALGORITHM_NAMES else {"type": "custom", "name": value}

    @field_validator("rewards", "rollouts", "canary", "shadow", "gates", mode="before")
    @classmethod
    def _parse_json(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str):
            return value
        blank = () if info.field_name == "gates" else None
        return json.loads(value) if value.strip() else blank

    @property
    def smallest_batch(self) -> int:
        return min(self.min_batch_size or max(2, self.batch_size // 4), self.batch_size)

    @property
    def largest_batch(self) -> int:
        return max(self.max_batch_size or 4 * self.batch_size, self.batch_size)

    @property
    def update_kl_target(self) -> float:
        """The KL per token that an update may reach."""
        return self.kl_target or min(DEFAULT_KL_TARGET, self.kl_guard / 2)

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.home.resolve()}/attune.db"

    @property
    def versions_dir(self) -> Path:
        return self.home.resolve() / "versions"

    @property
    def reward_models_dir(self) -> Path:
        return self.home.resolve() / "reward_models"

    @property
    def logs_dir(self) -> Path:
        return self.home.resolve() / "logs"

    @property
    def pulled_dir(self) -> Path:
        return self.home.resolve() / "pulled" / self.engine_name

    @property
    def metrics_dir(self) -> Path:
        """The folder of the trackers."""
        return self.home.resolve() / "metrics"

    @property
    def broker_dir(self) -> Path:
        """The folder of the embedded broker's messages."""
        return self.home.resolve() / "broker"

    @property
    def credentials_file(self) -> Path:
        return self.home.resolve() / "credentials.json"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    return Settings()
