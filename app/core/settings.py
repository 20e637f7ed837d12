"""Settings: the only reader of the environment (prefix ATTUNE_)."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, HttpUrl, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from alignment.config.algorithm import ALGORITHM_NAMES, AlgorithmConfig, PPOConfig
from alignment.config.rewards import RewardsConfig
from alignment.config.rollouts import RolloutsConfig
from alignment.release.canary import CanaryConfig
from alignment.release.gates import Gate, PromptsGate
from alignment.release.shadow import ShadowConfig, idle

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "demo" / "model"
TrackerName = Literal["jsonl", "tensorboard", "wandb"]


class Settings(BaseSettings):
    """What one deployment of Attune is told. Every default works on a laptop."""

    model_config = SettingsConfigDict(env_prefix="ATTUNE_", extra="ignore", frozen=True)

    home: Path = Field(Path(".attune"), description="where the embedded database, versions and logs live")
    database_url: str | None = Field(None, description="SQLAlchemy URL; SQLite under home when unset")
    broker_url: str | None = Field(None, description="Celery broker; a folder under home when unset")
    database_seconds: float = Field(
        5.0, ge=0.5, description="how long a request waits for PostgreSQL's word on a statement; then it is told 503"
    )
    database_job_seconds: float = Field(20.0, ge=0.5, description="likewise, of workers, who try again")

    model: str = Field(str(DEMO_MODEL), description="a Hugging Face causal LM: a folder or a hub name")
    policy: str = Field("assistant", pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    tool_call_parser: str | None = Field("qwen25", description="SGLang's parser for this model's tool calls")

    host: str = "127.0.0.1"
    port: int = 8700
    api_key: str | None = Field(None, description="the key that the command line presents")
    max_body_bytes: int = 4 * 1024 * 1024
    max_import_bytes: int = 256 * 1024 * 1024
    chat_timeout_seconds: float = 600.0
    route_cache_seconds: float = Field(0.02, ge=0, description="how long a moved pointer may stay unseen by a process")
    cors_origins: list[str] = Field(
        [], description='pages that may call us, e.g. ["https://shop.example"]; ["*"] for all'
    )

    limits_url: str = Field(
        "memory://", description="where limits are counted; async+redis://… when processes share them"
    )
    requests_per_minute: int = Field(6000, ge=1, description="per key, unless the key has its own")
    max_concurrency: int = Field(256, ge=1, description="requests of one key at a time, unless it has its own")
    key_cache_seconds: float = Field(1.0, ge=0, description="how long a revoked key may still be taken for good")
    feedback_token_seconds: float = Field(
        3 * 3600.0, gt=0, description="how long a browser's feedback token is good for"
    )

    engine_name: str = "engine-0"
    engine_host: str = "127.0.0.1"
    engine_port: int = 8710
    engine_api_key: str | None = Field(None, description="with the next: shared keys, for engines on other machines")
    engine_admin_key: str | None = None
    adapter_delivery: Literal["path", "memory"] = Field(
        "path", description="how an adapter comes to the engines: a folder that they see too, or within the call"
    )
    versions_url: HttpUrl | None = Field(
        None, description="of an engine that does not see them: the API's address, to pull what it must hold at start"
    )
    engine_python: Path = Field(REPOSITORY / ".venv-engine" / "bin" / "python")
    engine_device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the engine and the trainer alike")
    max_output_tokens: int = Field(512, description="the most one reply may hold when the client names none")
    output_token_cap: int = Field(8192, ge=1, description="the most tokens one request may ask for, over all choices")
    prompt_char_cap: int = Field(400_000, ge=1, description="the longest prompt that is passed on to an engine")
    max_choices: int = Field(16, ge=1, description="the most choices (`n`) of one completion")
    drain_seconds: float = Field(
        1.0, ge=0, description="before full weights are exchanged: how long replies under way may take to end"
    )
    weight_swap_wait_seconds: float = Field(
        60.0, ge=0, description="meanwhile: how long a request waits for weights that serve, before it is told 503"
    )
    lora_slots: int = Field(8, description="adapters that may run in one engine batch, the base included")
    keep_versions: int = Field(4, description="versions kept loaded beside the serving and the previous one")

    trainer_ranks: int = 1
    batch_size: int = Field(96, ge=2, description="samples in one update")
    min_batch_size: int | None = Field(
        None, ge=2, description="fewest samples of an update that has waited too long; a quarter of a batch if unset"
    )
    max_wait_seconds: float = Field(300.0, ge=0, description="how long a small batch waits for more")
    max_staleness: int = Field(1, ge=0, le=4, description="versions a sample may lag behind the learner")
    on_stale: Literal["drop", "wait"] = Field(
        "drop", description="what is about to be too old: dropped, or waited for (at most max_wait_seconds)"
    )
    rewards: Annotated[RewardsConfig, NoDecode] = Field(
        RewardsConfig(), description="what a reply is worth, as JSON; see docs/rewards.md. A policy may have its own"
    )
    secrets: dict[str, SecretStr] = Field(
        {}, description='keys of judges and reward services by name, e.g. {"judge": "sk-…"}'
    )
    rollouts: Annotated[RolloutsConfig, NoDecode] = Field(
        RolloutsConfig(), description="what the learner asks for itself, as JSON; see docs/rollouts.md. Likewise"
    )
    canary: Annotated[CanaryConfig | None, NoDecode] = Field(
        None, description='new versions answer a share first, as JSON, e.g. {"share": 0.05}; unset, everybody at once'
    )
    shadow: Annotated[ShadowConfig | None, NoDecode] = Field(
        None,
        description='before that they answer beside what serves, unheard, as JSON, e.g. {"share": 0.2}; off if unset',
    )
    gates: Annotated[tuple[Gate, ...], NoDecode] = Field(
        (), description="what a version must pass before anybody hears it, as a JSON list; see docs/versions.md"
    )
    private_hosts: list[str] = Field(
        [], description='hosts of private networks that a policy\'s own rewards may name, e.g. ["judge.internal"]'
    )
    kl_guard: float = Field(
        0.02,
        gt=0,
        description="k3(serving, new) a token beyond which a version is not published, and learning goes back",
    )
    kl_alarms: int = Field(3, ge=1, description="alarms of the guard in a row that halt a policy's learning")

    max_rater_share: float = Field(0.05, gt=0, le=1, description="of a batch: the most that one rater may have")
    max_conversation_share: float = Field(0.1, gt=0, le=1, description="likewise, of one conversation")
    max_cluster_share: float = Field(0.5, gt=0, le=1, description="likewise, of replies that are nearly the same")
    max_rater_day: int = Field(200, ge=1, description="rewards of one rater a day that are learned from")
    min_raters: int = Field(1, ge=1, description="distinct raters that a batch must have")
    trust: bool = Field(True, description="weigh raters by how reliable they are, and hold back floods")
    adaptation: Literal["lora", "full"] = Field(
        "lora", description="what is trained: an adapter, or all weights (docs/full-weights.md). For good, per home"
    )
    learning_rate: float = Field(
        3e-4, gt=0, description="of the adapter; a model under 10 M takes ten times more, full weights a tenth"
    )
    algorithm: Annotated[AlgorithmConfig, NoDecode] = Field(
        PPOConfig(), description='a name such as "kto", settings as JSON with a `type`, or module:Class'
    )
    kl_coef: float | None = Field(None, ge=0, description="weight of the KL to the base model; see docs/algorithms.md")
    seed: int = 0

    trackers: list[TrackerName] = Field(
        ["jsonl"], description='where each update\'s metrics go, e.g. ["jsonl", "tensorboard", "wandb"]'
    )
    metrics_open: bool = Field(False, description="whoever reaches the port may read /metrics, without an admin key")
    length_range: Annotated[tuple[int, int] | None, NoDecode] = Field(
        None, description="shortest and longest good reply in tokens, e.g. 30,80; what is outside is flagged"
    )

    lease_seconds: float = Field(20.0, gt=0)
    max_attempts: int = 3
    reconcile_seconds: float = Field(2.0, gt=0)
    probe_tolerance: float | None = Field(None, description="log-prob bound that proves delivery; by dtype if unset")

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
    def _full_weights_stand_alone(self) -> "Settings":
        if self.adaptation == "full" and (self.canary is not None or self.shadow is not None):
            told = "a canary or shadow needs two versions side by side; of full weights an engine has one at a time"
            raise ValueError(told)
        if self.adaptation == "full" and any(isinstance(gate, PromptsGate) and gate.compares for gate in self.gates):
            raise ValueError("a gate compares two versions side by side; of full weights an engine has one at a time")
        return self

    @model_validator(mode="after")
    def _delivery_is_possible(self) -> "Settings":
        if self.adaptation == "full" and (self.adapter_delivery != "path" or self.versions_url is not None):
            raise ValueError("full weights come by path alone, on storage that the engines share")
        if self.versions_url is not None and not (self.database_url and self.engine_api_key and self.engine_admin_key):
            told = "an engine without the others' storage needs their database_url, engine_api_key and engine_admin_key"
            raise ValueError(told)
        return self

    @model_validator(mode="after")
    def _shadow_is_possible(self) -> "Settings":
        if self.shadow is not None and (told := idle(self.shadow, self.rewards)) is not None:
            raise ValueError(
                f"no version could run in shadow: {told}; a policy with rewards of its own may have its own"
            )
        return self

    @field_validator("algorithm", mode="before")
    @classmethod
    def _parse_algorithm(cls, told: object) -> object:
        """What is neither JSON nor one of ours is somebody's own class or entry point."""
        if not isinstance(told, str):
            return told
        if told.lstrip().startswith("{"):
            return json.loads(told)
        return {"type": told} if told in ALGORITHM_NAMES else {"type": "custom", "name": told}

    @field_validator("gates", mode="before")
    @classmethod
    def _empty_means_no_gates(cls, told: object) -> object:
        return () if isinstance(told, str) and not told.strip() else told

    @field_validator("rewards", "rollouts", "canary", "shadow", "gates", mode="before")
    @classmethod
    def _parse_json(cls, told: object) -> object:
        if not isinstance(told, str):
            return told
        return json.loads(told) if told.strip() else None

    @property
    def smallest_batch(self) -> int:
        return min(self.min_batch_size or max(2, self.batch_size // 4), self.batch_size)

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
        """Where trackers keep what each update measured."""
        return self.home.resolve() / "metrics"

    @property
    def broker_dir(self) -> Path:
        """Where the embedded broker keeps its messages."""
        return self.home.resolve() / "bell"

    @property
    def credentials_file(self) -> Path:
        return self.home.resolve() / "credentials.json"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    return Settings()
