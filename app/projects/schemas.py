"""What the keys API says and hears."""

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

    name: Name | None = Field(None, description="what its owner calls it")
    scopes: list[Scope] = Field(["chat", "feedback", "admin"], min_length=1, max_length=len(SCOPES))
    expires_in: Annotated[StrictInt, Field(ge=1, le=TEN_YEARS)] | None = Field(None, description="seconds; null: never")
    train: StrictBool | None = Field(None, description="consent of this key's turns; the project's when null")
    requests_per_minute: Count | None = Field(None, description="the deployment's limit when null")
    max_concurrency: Count | None = Field(None, description="likewise, in each API process")

    @field_validator("scopes")
    @classmethod
    def each_once(cls, scopes: list[str]) -> list[str]:
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
    key: str = Field(description="shown this once")


class KeyList(Page[KeyView]):
    @classmethod
    def of(cls, rows: list[ApiKey], limit: int) -> "KeyList":
        """From up to one row more than was asked for."""
        return cls.cut([KeyView.of(row) for row in rows], limit)


class ProjectRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    train: StrictBool = Field(description="consent: may its turns be learned from? Keys and requests may differ")


class ProjectView(BaseModel):
    object: Literal["project"] = "project"
    id: str
    name: str
    train: bool
    created_at: float

    @classmethod
    def of(cls, row: Project) -> "ProjectView":
        return cls(id=row.id, name=row.name, train=row.train, created_at=row.created_at)
