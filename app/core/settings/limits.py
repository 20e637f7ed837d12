"""Sections of what users may do, and of what is known about them: limits, raters, privacy, observability."""

import re
from typing import Literal

from pydantic import Field, field_validator

from alignment.config.frozen_model import Frozen
from app.core.project_limits import DeploymentLimits
from app.core.retention_config import DeploymentRetention

TrackerName = Literal["jsonl", "tensorboard", "wandb"]

COUNTERS_URL = re.compile(r"memory://|(async\+)?rediss?(\+[a-z]+)?://.+")


class LimitSettings(Frozen):
    """What keys, browsers, projects and requests may use."""

    url: str = Field(
        "memory://",
        description="where requests are counted: memory://, or async+redis://… if several processes share the limits",
    )
    requests_per_minute: int = Field(6000, ge=1, description="limit of every key; a key may have a lower one")
    max_concurrency: int = Field(256, ge=1, description="concurrent requests of a key, which may have a lower limit")
    max_admin_concurrency: int = Field(
        32,
        ge=1,
        description="concurrent requests of a project in one API process, other than chats and feedback",
    )
    max_long_requests: int = Field(
        4, ge=1, description="of these, concurrent exports, imports, erasures and verifications of the audit log"
    )
    max_event_streams: int = Field(
        16, ge=1, description="concurrent event streams of a project in one API process, which has at most 50"
    )
    unknown_keys_per_minute: int = Field(
        100,
        ge=1,
        description="requests with unknown keys or invalid browser tokens from one address, before such requests are "
        "not looked up",
    )
    max_connections_per_address: int = Field(
        512,
        ge=1,
        description="open connections of one address to one API process; those of proxies (FORWARDED_ALLOW_IPS) are "
        "not limited",
    )
    max_output_tokens: int = Field(8192, ge=1, description="most output tokens of a request, over all choices")
    max_prompt_chars: int = Field(400_000, ge=1, description="longest prompt, in characters")
    max_choices: int = Field(16, ge=1, description="most choices (`n`) of a completion")
    feedback_token_seconds: float = Field(3 * 3600.0, gt=0, description="lifetime of a browser's feedback token")
    max_token_feedback: int = Field(
        100, ge=1, description="most feedback that one browser token may submit, replaced feedback included"
    )
    max_source_feedback: int = Field(
        200, ge=1, description="most feedback of one source about one reply or conversation, replaced included"
    )
    max_target_feedback: int = Field(
        1000,
        ge=1,
        description="most feedback of all sources about one reply or conversation, replaced and withdrawn included; "
        "all of it is read when one more is curated",
    )
    project: DeploymentLimits = Field(
        DeploymentLimits(), description="what each project may use; a project may have lower limits"
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if COUNTERS_URL.fullmatch(value) is None:
            raise ValueError("it must be memory:// or the URL of a Redis, such as async+redis://host:6379/1")
        return value


class RaterSettings(Frozen):
    """How much one rater, conversation or kind of reply may influence (docs/poisoning.md)."""

    trust: bool = Field(True, description="weight raters by their reliability, and quarantine floods of feedback")
    max_rater_share: float = Field(0.05, gt=0, le=1, description="largest share of one rater in a batch")
    max_conversation_share: float = Field(0.1, gt=0, le=1, description="largest share of one conversation in a batch")
    max_cluster_share: float = Field(0.5, gt=0, le=1, description="largest share of near-duplicate replies in a batch")
    max_rater_day: int = Field(200, ge=1, description="rewards of one rater per day that are trained on")
    min_raters: int = Field(1, ge=1, description="distinct raters that a batch must have")


class PrivacySettings(Frozen):
    """What is stored about people."""

    retention: DeploymentRetention = Field(
        DeploymentRetention(), description="how long data is kept, see docs/retention.md; a project may differ"
    )


class ObservabilitySettings(Frozen):
    """What can be seen of the service."""

    trackers: list[TrackerName] = Field(
        ["jsonl"], description='experiment trackers of the updates, e.g. ["jsonl", "tensorboard", "wandb"]'
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="how every process writes its log: lines of text, or one JSON object a line"
    )
    metrics_open: bool = Field(False, description="serve the API's /metrics without an admin key")
    metrics_host: str = Field(
        "127.0.0.1",
        description="address on which the other roles serve /metrics, without a key; only Prometheus should reach it",
    )
    metrics_port: int = Field(
        8720,
        ge=0,
        le=65535,
        description="port of /metrics of a worker, beat, trainer or engine supervisor; where it is taken, the next "
        "free one; 0 serves none",
    )
    length_range: tuple[int, int] | None = Field(
        None,
        description="shortest and longest good reply in tokens, e.g. [30, 80]: other replies are flagged, and it is "
        "the range of length_aware_ppo",
    )

    @field_validator("length_range")
    @classmethod
    def _check_length_range(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 0 <= value[0] < value[1]:
            raise ValueError("it takes two numbers of tokens, the smaller one first, e.g. [30, 80]")
        return value
