"""What the pins API says and hears."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from app.models import Pin, PinKind, Policy, Version
from app.policies.service import label

LONGEST_CONVERSATION = 255  # as turns hold it


class PinRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: PinKind
    subject: str = Field(
        min_length=1,
        max_length=512,
        description="a conversation's id, an end user as requests name them, or an API key's id or shown prefix",
    )
    version: int = Field(strict=True, ge=0, le=999_999_999, description="the number of a version people have heard")
    reason: str | None = Field(None, max_length=2000, description="kept with the pin and in the audit log")

    @field_validator("subject")
    @classmethod
    def fits(cls, subject: str, told: ValidationInfo) -> str:
        if told.data.get("kind") == PinKind.CONVERSATION and len(subject) > LONGEST_CONVERSATION:
            raise ValueError(f"a conversation's id has {LONGEST_CONVERSATION} characters at most")
        return subject


class PinView(BaseModel):
    object: Literal["pin"] = "pin"
    id: str
    policy: str
    kind: PinKind
    subject: str = Field(description="of a key its id")
    version: str = Field(description='for example "assistant@v12"')
    loaded: bool = Field(description="a ready engine holds the version; if not, the next sweep has it loaded")
    reason: str | None
    created_at: float = Field(description="of the latest word on it, as are `reason` and `created_by`")
    created_by: str = Field(description="the prefix of the key that set it")

    @classmethod
    def of(cls, policy: Policy, row: Pin, version: Version, *, loaded: bool) -> Self:
        return cls(
            id=row.id,
            policy=policy.name,
            kind=PinKind(row.kind),
            subject=row.subject,
            version=label(policy, version),
            loaded=loaded,
            reason=row.reason,
            created_at=row.created_at,
            created_by=row.actor,
        )


class PinDeleted(BaseModel):
    object: Literal["pin.deleted"] = "pin.deleted"
    id: str
    deleted: Literal[True] = True
