"""Response bodies of the subjects API."""

from typing import Literal

from pydantic import BaseModel, Field

from app.privacy.lineage.schemas import TrainedVersionView


class SubjectView(BaseModel):
    object: Literal["subject"] = "subject"
    id: str
    turns: int = Field(description="turns that name the subject as end user, or continue one that does")
    feedback: int = Field(description="feedback by the subject, and on the subject's turns")
    rewards: int
    judgements: int
    samples: int
    pins: int = Field(description="pins of the subject and of the subject's conversations")
    raters: list[str] = Field(description="the names under which the subject's feedback is weighted")
    versions: list[TrainedVersionView] = Field(description="versions that learned from it, with their descendants")


class RollbackTarget(BaseModel):
    """The last version without erased data: POST /v1/policies/{policy}/rollback {"version": number}."""

    policy: str
    serving: str
    untainted_ancestor: str
    version: int


class SubjectErased(BaseModel):
    object: Literal["subject.erased"] = "subject.erased"
    id: str
    turns: int
    feedback: int
    rewards: int
    pins: int = Field(description="pins of the subject, and of conversations of which no turn is left")
    batches: list[str] = Field(description="batches with the subject's samples: refused, their other samples reopened")
    versions: list[TrainedVersionView] = Field(description="versions that had learned from it, with their descendants")
    reward_models: list[str] = Field(description="reward models that had learned from it; none of them serves any more")
    rollback: list[RollbackTarget] = Field(description="for policies whose serving version learned from erased data")
    purged: bool = Field(description="false: the database's files still contain copies; repeat the request")
