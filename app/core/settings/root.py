"""The settings of one installation: every section, and what must hold between them."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from alignment.config.algorithm_choice import ALGORITHM_ENTRY_POINTS, ALGORITHM_NAMES, AlgorithmConfig, CustomConfig
from alignment.config.frozen_model import Frozen
from alignment.config.policy_gradient_algorithms import (
    POLICY_LOSS_ENTRY_POINTS,
    PolicyGradientConfig,
    PolicyLossKind,
    PPOConfig,
)
from alignment.config.rewards import RewardsConfig
from alignment.config.rollouts import RolloutsConfig
from alignment.extensions import describe_unknown, extension_names
from alignment.release.gates import PromptsGate
from alignment.release.shadow import disabled_reason
from app.core.database_url import sqlite_url
from app.core.settings.engine import REPOSITORY, EngineSettings
from app.core.settings.limits import LimitSettings, ObservabilitySettings, PrivacySettings, RaterSettings
from app.core.settings.release import ReleaseSettings
from app.core.settings.service import (
    BrokerSettings,
    DatabaseSettings,
    LangfuseSettings,
    ServerSettings,
    WorkerSettings,
)
from app.core.settings.trainer import TrainerSettings

DEMO_MODEL = REPOSITORY / "demo" / "model"
DEFAULT_EPOCHS = 3  # the KL target bounds the size of an update, however often it passes over its samples


def parse_algorithm(value: object) -> object:
    """Return the algorithm's fields. A name that is not known is a user's class or entry point; the default is PPO."""
    if isinstance(value, str):
        value = {"type": value} if value in ALGORITHM_NAMES else {"type": "custom", "name": value}
    if not isinstance(value, dict):
        return value
    table = {"type": PPOConfig.model_fields["type"].default} | value
    return (
        table if table["type"] == "custom" else {"epochs": DEFAULT_EPOCHS} | table
    )  # a user's class has its own default


def _check_policy_loss(name: str) -> None:
    """Raise ValueError unless the loss is built in, an entry point, or a path, which the trainer imports."""
    builtins = get_args(PolicyLossKind)
    if name in builtins or ":" in name:
        return
    known = extension_names(POLICY_LOSS_ENTRY_POINTS, builtins)
    if name not in known:
        raise ValueError(describe_unknown(name, known, "policy loss"))


def _check_algorithm(name: str) -> None:
    """Raise ValueError unless the algorithm is an entry point, or a path, which the trainer imports."""
    known = extension_names(ALGORITHM_ENTRY_POINTS, ALGORITHM_NAMES)
    if name not in known and ":" not in name and "." not in name:
        raise ValueError(f"{describe_unknown(name, known, 'algorithm')}, and a class of your own is module:Class")


class Settings(Frozen):
    """The configuration of one installation. Every default works on a laptop."""

    home: Path = Field(Path(".attune"), description="folder of the embedded database, versions and logs")
    model: str = Field(
        str(DEMO_MODEL),
        description="a Hugging Face causal language model, a folder or a hub name; the demo's when unset",
    )
    policy: str = Field("assistant", pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$", description="name of the first policy")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="data type of the engine and the trainer")
    feedback: Literal["auto", "sparse", "dense"] = Field(
        "auto",
        description="sparse: a reward model that is fitted on people's feedback scores the replies without it; dense: "
        "feedback alone counts, unless `rewards` has a reward model; auto: sparse where people rate few replies",
    )
    api_key: str | None = Field(None, repr=False, description="the API key that the command line presents")
    url: str | None = Field(
        None,
        pattern=r"^https?://[^/]",
        description="the service that the command line talks to; that of `attune up` with this `home` when unset",
    )
    ca_file: Path | None = Field(
        None, description="PEM file of the certificate authorities that the command line trusts for an https URL"
    )
    secrets: dict[str, SecretStr] = Field({}, description="keys of judges and reward services by name")

    server: ServerSettings = ServerSettings()
    database: DatabaseSettings = DatabaseSettings()
    broker: BrokerSettings = BrokerSettings()
    workers: WorkerSettings = WorkerSettings()
    engine: EngineSettings = EngineSettings()
    trainer: TrainerSettings = TrainerSettings()
    algorithm: Annotated[AlgorithmConfig, BeforeValidator(parse_algorithm)] = Field(
        PPOConfig(epochs=DEFAULT_EPOCHS),
        description='a name such as "kto", a table with a `type`, or "module:Class"; docs/algorithms.md',
    )
    rewards: RewardsConfig = Field(
        RewardsConfig(), description="reward sources; see docs/rewards.md. A policy may have its own"
    )
    rollouts: RolloutsConfig = Field(
        RolloutsConfig(), description="group sampling and verifiers; see docs/rollouts.md. A policy may have its own"
    )
    langfuse: LangfuseSettings = LangfuseSettings()
    raters: RaterSettings = RaterSettings()
    release: ReleaseSettings = ReleaseSettings()
    limits: LimitSettings = LimitSettings()
    privacy: PrivacySettings = PrivacySettings()
    observability: ObservabilitySettings = ObservabilitySettings()

    @model_validator(mode="after")
    def _check_combinations(self) -> "Settings":
        trainer, engine, release = self.trainer, self.engine, self.release
        if trainer.kl_target is not None and trainer.kl_target >= trainer.kl_guard:
            raise ValueError(
                f"trainer.kl_target ({trainer.kl_target:g}) must be below trainer.kl_guard ({trainer.kl_guard:g})"
            )
        control = getattr(self.algorithm, "kl_control", None)
        if control is not None and control.target >= trainer.kl_guard:
            raise ValueError(
                f"algorithm.kl_control.target ({control.target:g}) must be below trainer.kl_guard "
                f"({trainer.kl_guard:g})"
            )
        if trainer.adaptation == "full":
            self._check_full_weights()
        if self.server.port == engine.port != 0 and self.server.host == engine.host:
            raise ValueError(f"server.port and engine.port are both {engine.port} of {engine.host}; change one of them")
        if engine.tp_size > 1 and engine.device == "cpu":
            raise ValueError(f"engine.tp_size ({engine.tp_size}) needs as many GPUs, and engine.device is cpu")
        if engine.versions_url is not None and not (self.database.url and engine.api_key and engine.admin_key):
            raise ValueError("engine.versions_url needs database.url, engine.api_key and engine.admin_key")
        if engine.tp_size > 1 and engine.adapter_delivery == "memory":
            raise ValueError("engine.adapter_delivery = memory needs engine.tp_size = 1; use path")
        self.rewards.check_credit(self.algorithm)
        if isinstance(self.algorithm, PolicyGradientConfig):
            _check_policy_loss(self.algorithm.loss)
        if isinstance(self.algorithm, CustomConfig):
            _check_algorithm(self.algorithm.name)
        if release.shadow is not None and (reason := disabled_reason(release.shadow, self.rewards)) is not None:
            raise ValueError(
                f"no version could run in shadow: {reason}; a policy with its own rewards may have its own shadow"
            )
        return self

    def _check_full_weights(self) -> None:
        """An engine holds one version's full weights, so nothing may need two versions side by side."""
        if self.release.canary is not None or self.release.shadow is not None:
            raise ValueError(
                "a canary or shadow needs two versions side by side; an engine holds one version's full weights"
            )
        if any(isinstance(gate, PromptsGate) and gate.compares for gate in self.release.gates):
            raise ValueError("a gate compares two versions side by side; an engine holds one version's full weights")
        if self.engine.kind == "vllm":
            raise ValueError("full weights need engine.kind = sglang; vLLM serves adapters only")
        if self.engine.adapter_delivery != "path" or self.engine.versions_url is not None:
            raise ValueError("full weights need engine.adapter_delivery = path and storage that the engines share")

    @property
    def database_url(self) -> str:
        """The database's URL: the configured one, or that of the embedded SQLite database."""
        return self.database.url or sqlite_url(self.home.resolve() / "attune.db")

    @property
    def owner_database_url(self) -> str:
        """The database's URL for commands that create and change tables."""
        return self.database.owner_url or self.database_url

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
        return self.home.resolve() / "pulled" / self.engine.name

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
    def encryption_file(self) -> Path:
        """The file with the keys that encrypt secrets in the database, one a line."""
        return self.home.resolve() / "encryption.key"

    @property
    def local_url(self) -> str:
        """The URL of the API that this installation serves."""
        return f"http://{self.server.host}:{self.server.port}"

    def is_set(self, path: str) -> bool:
        """Whether a setting such as "trainer.optim.lr" has been given a value, rather than its default."""
        value: Any = self
        for name in path.split("."):
            if name not in value.model_fields_set:
                return False
            value = getattr(value, name)
        return True

    def replace(self, values: Mapping[str, object]) -> "Settings":
        """Return these settings with other values by path, e.g. {"trainer.batch_size": 8}, which are validated."""
        replaced: Settings = _replace(self, values)
        return replaced


def _replace(section: Any, values: Mapping[str, object]) -> Any:
    """Return a section with other values at the paths below it, all of which are validated together."""
    by_name: dict[str, dict[str, object]] = defaultdict(dict)
    for path, value in values.items():
        name, _, rest = path.partition(".")
        by_name[name][rest] = value
    data = {name: getattr(section, name) for name in section.model_fields_set}
    for name, below in by_name.items():
        data[name] = below[""] if "" in below else _replace(getattr(section, name), below)
    return type(section).model_validate(data)
