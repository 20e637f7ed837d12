"""What a project may use: the deployment's limits for every project, and a project's own, which may only be lower."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt

Limit = Annotated[StrictInt, Field(ge=0, le=10**15)] | None


class ProjectLimits(BaseModel):
    """The limits of one project. Null is no limit; in a project's own limits it is the deployment's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: Limit = Field(None, description="chat and feedback requests of all its keys and tokens")
    admin_requests_per_minute: Limit = Field(
        None, description="all other requests of its keys, and pages of the console: those of viewers and admins"
    )
    feedback_per_minute: Limit = Field(None, description="pieces of feedback; a batch counts with all its items")
    output_tokens_per_day: Limit = Field(None, description="tokens of the replies that finished on this day, in UTC")
    dataset_bytes: Limit = Field(None, description="bytes of the files of all imported datasets together")
    pins: Limit = Field(None, description="pins of all its policies together")
    policies: Limit = Field(None, description="policies; the engines hold the versions of all of them")

    @classmethod
    def from_row(cls, stored: Mapping[str, object] | None) -> "ProjectLimits":
        """Return a project's own limits without those that a newer release has stored."""
        return cls.model_validate({name: value for name, value in (stored or {}).items() if name in cls.model_fields})

    def lowered_by(self, own: "ProjectLimits") -> "ProjectLimits":
        """Return the lower one of each two limits."""
        pairs = {name: (getattr(self, name), getattr(own, name)) for name in type(self).model_fields}
        known = {name: [limit for limit in pair if limit is not None] for name, pair in pairs.items()}
        return ProjectLimits(**{name: min(limits, default=None) for name, limits in known.items()})


class DeploymentLimits(ProjectLimits):
    """The limits of every project."""

    admin_requests_per_minute: Limit = 3000
    feedback_per_minute: Limit = 300_000
    dataset_bytes: Limit = 10 * 2**30
    pins: Limit = 10_000
    policies: Limit = 16
