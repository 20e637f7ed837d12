"""API keys and projects as the API and the command line show them."""

from typing import Literal, Self

from pydantic import Field

from app.core.http import RowView
from app.core.pagination import Page
from app.core.project_limits import ProjectLimits
from app.core.settings import Settings
from app.models import Project


class KeyView(RowView):
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


class NewKeyView(KeyView):
    key: str = Field(description="the key itself; it cannot be read again")


class KeyList(Page[KeyView]):
    pass


class ProjectView(RowView):
    object: Literal["project"] = "project"
    id: str
    name: str
    train: bool
    limits: ProjectLimits = Field(description="those in force: the lower of the project's and the deployment's")
    created_at: float

    @classmethod
    def of(cls, project: Project, settings: Settings) -> Self:
        limits = settings.limits.project.lowered_by(ProjectLimits.from_row(project.limits))
        return cls.from_row(project, limits=limits)
