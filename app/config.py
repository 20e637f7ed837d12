"""Settings: the only reader of the environment (prefix ATTUNE_)."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from alignment.recipes import ALGORITHM_NAMES, AlgorithmConfig, PPOConfig

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO_MODEL = REPOSITORY / "demo" / "model"
TrackerName = Literal["jsonl", "tensorboard", "wandb"]


class Settings(BaseSettings):
    """What one deployment of Attune is told. Every default works on a laptop."""

    model_config = SettingsConfigDict(env_prefix="ATTUNE_", extra="ignore", frozen=True)

    home: Path = Field(Path(".attune"), description="where the embedded database, versions and logs live")
    database_url: str | None = Field(None, description="SQLAlchemy URL; SQLite under home when unset")
    broker_url: str | None = Field(None, description="Celery broker; a folder under home when unset")

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
    engine_python: Path = Field(REPOSITORY / ".venv-engine" / "bin" / "python")
    engine_device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the engine and the trainer alike")
    max_output_tokens: int = Field(512, description="the most one reply may hold when the client names none")
    output_token_cap: int = Field(8192, ge=1, description="the most tokens one request may ask for, over all choices")
    prompt_char_cap: int = Field(400_000, ge=1, description="the longest prompt that is passed on to an engine")
    max_choices: int = Field(16, ge=1, description="the most choices (`n`) of one completion")
    lora_slots: int = Field(8, description="adapters that may run in one engine batch, the base included")
    keep_versions: int = Field(4, description="versions kept loaded beside the serving and the previous one")

    trainer_ranks: int = 1
    batch_size: int = Field(96, ge=2, description="samples in one update")
    max_staleness: int = Field(1, ge=0, le=4, description="versions a sample may lag behind the learner")
    learning_rate: float = Field(3e-4, gt=0, description="of the adapter; a model under 10 M takes ten times more")
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
    sweep_seconds: float = Field(2.0, gt=0)
    probe_tolerance: float | None = Field(None, description="log-prob bound that proves delivery; by dtype if unset")

    @field_validator("length_range", mode="before")
    @classmethod
    def _two_numbers(cls, value: Any) -> Any:
        """Example: "30,80" or "[30, 80]" -> ["30", "80"]"""
        return (value.strip("[] ").split(",") if value.strip() else None) if isinstance(value, str) else value

    @field_validator("length_range")
    @classmethod
    def _a_range(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 0 <= value[0] < value[1]:
            raise ValueError("it takes two numbers of tokens, the smaller one first, e.g. 30,80")
        return value

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm(cls, told: object) -> object:
        """What is neither JSON nor one of ours is somebody's own class or entry point."""
        if not isinstance(told, str):
            return told
        if told.lstrip().startswith("{"):
            return json.loads(told)
        return {"type": told} if told in ALGORITHM_NAMES else {"type": "custom", "name": told}

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.home.resolve()}/attune.db"

    @property
    def versions_dir(self) -> Path:
        return self.home.resolve() / "versions"

    @property
    def logs_dir(self) -> Path:
        return self.home.resolve() / "logs"

    @property
    def metrics_dir(self) -> Path:
        """Where trackers keep what each update measured."""
        return self.home.resolve() / "metrics"

    @property
    def bell_dir(self) -> Path:
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
