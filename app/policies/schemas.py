"""What the policies API says and hears."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.models import Policy, Version
from app.policies.service import label


class RollbackRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(
        None,
        ge=0,
        le=999_999_999,
        description="the number to go back to; if unset a canary is ended, else the parent serves",
    )
    undo: int | None = Field(
        None,
        ge=0,
        le=999_999_999,
        description="the number of what is to be undone: said again it changes nothing, and it is a 409 when another "
        "version serves by now. Not beside `version`",
    )
    reason: str | None = Field(None, max_length=2000)

    @model_validator(mode="after")
    def _one_way(self) -> "RollbackRequest":
        if self.version is not None and self.undo is not None:
            raise ValueError("say either `version`, to go back to, or `undo`, to be left")
        return self


class RollbackResult(BaseModel):
    object: Literal["rollback"] = "rollback"
    policy: str
    left: str
    serving: str


class VersionView(BaseModel):
    object: Literal["version"] = "version"
    id: str
    name: str
    number: int
    parent: int | None
    state: str
    serving: bool
    reason: str | None
    created_at: float
    live_at: float | None
    turns: int
    rated: int
    approval: float | None
    mean_length: float
    alignment_delay: float | None
    metrics: dict[str, Any]
    timings: dict[str, Any]
    erased_at: float | None = Field(description="since when it has learned from erased data, itself or before")
    clean: str | None = Field(description="the version to go back to when this one has learned from erased data")

    @classmethod
    def of(
        cls,
        policy: Policy,
        version: Version,
        *,
        serving: bool,
        parent: int | None,
        voice: dict[str, Any],
        delay: float | None,
        erased_at: float | None = None,
        clean: Version | None = None,
    ) -> "VersionView":
        return cls(
            id=version.id,
            name=label(policy, version),
            number=version.number,
            parent=parent,
            state=version.state,
            serving=serving,
            reason=version.reason,
            created_at=version.created_at,
            live_at=version.live_at,
            turns=voice.get("turns", 0),
            rated=voice.get("rated", 0),
            approval=voice.get("approval"),
            mean_length=voice.get("mean_length", 0.0),
            alignment_delay=delay,
            metrics=version.metrics,
            timings=version.timings,
            erased_at=erased_at,
            clean=label(policy, clean) if clean else None,
        )


class PolicyView(BaseModel):
    object: Literal["policy"] = "policy"
    id: str
    name: str
    base_model: str
    serving: str
    previous: str | None
    canary: str | None = Field(description="the version that a share of the conversations gets")
    canary_share: float
    shadow: str | None = Field(description="the version that answers beside what serves, unheard")
    head: str
    epoch: int
    created_at: float
    mode: str = Field(description="how it learns: asynchronous, synchronous (after an alarm of the guard) or halted")
    mode_reason: str | None
    mode_since: float | None
    alarms: int = Field(description="of the guard, in a row")
    clean: str | None = Field(description="the version to go back to when what serves has learned from erased data")
