"""Request and response bodies of /v1/keys and /v1/project."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StringConstraints, field_validator

from app.core.pagination import Page
from app.models import ApiKey, Project
from app.projects.keys import SCOPES

Name = Annotated[str, StringConstraints(min_length=1, max_length=63)]
Scope = Literal["chat", "feedback", "admin"]
Count = Annotated[StrictInt, Field(ge=1, le=1_000_000)]
TEN_YEARS = 10 * 366 * 86_400


class KeyRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name | None = Field(None, description="a label for the owner's own use")
    scopes: list[Scope] = Field(["chat", "feedback", "admin"], min_length=1, max_length=len(SCOPES))
    expires_in: Annotated[StrictInt, Field(ge=1, le=TEN_YEARS)] | None = Field(
        None, description="seconds until the key expires; null: never"
    )
    train: StrictBool | None = Field(None, description="consent to train on this key's turns; the project's when null")
    requests_per_minute: Count | None = Field(None, description="the deployment's limit when null")
    max_concurrency: Count | None = Field(
        None, description="requests at the same time, in each API process; the deployment's limit when null"
    )

    @field_validator("scopes")
    @classmethod
    def remove_duplicates(cls, scopes: list[str]) -> list[str]:
        return [scope for scope in SCOPES if scope in scopes]


class KeyView(BaseModel):
    object: Literal["key"] = "key"
    id: str
    name: str | None
    prefix: str
    scopes: list[str]
    train: bool | None
    requests_per_minute: int | None
    max_concurrency: int | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    @classmethod
    def of(cls, row: ApiKey) -> "KeyView":
        return cls(**{name: getattr(row, name) for name in KeyView.model_fields if name != "object"})


class NewKeyView(KeyView):
    key: str = Field(description="the key itself; it cannot be read again")


class KeyList(Page[KeyView]):
    @classmethod
    def of(cls, rows: list[ApiKey], limit: int) -> "KeyList":
        """Build a page from up to `limit + 1` rows."""
        return cls.from_rows([KeyView.of(row) for row in rows], limit)


class ProjectRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    train: StrictBool = Field(description="consent to train on the project's turns; keys and requests may differ")


class ProjectView(BaseModel):
    object: Literal["project"] = "project"
    id: str
    name: str
    train: bool
    created_at: float

    @classmethod
    def of(cls, row: Project) -> "ProjectView":
        return cls(id=row.id, name=row.name, train=row.train, created_at=row.created_at)
