"""Subjects on the wire."""

from typing import Literal

from pydantic import BaseModel, Field

from app.privacy.lineage.schemas import LearnerView


class SubjectView(BaseModel):
    object: Literal["subject"] = "subject"
    id: str
    turns: int = Field(description="that name them as end user, or go on from one that does")
    feedback: int = Field(description="theirs, and about their turns")
    rewards: int
    judgements: int
    samples: int
    pins: int = Field(description="that hold them, or a conversation of theirs")
    raters: list[str] = Field(description="the names under which their word is weighed")
    versions: list[LearnerView] = Field(description="that have learned from it, the descendants too")


class WayBack(BaseModel):
    """To the last version that has learned nothing erased: POST /v1/policies/{policy}/rollback {"version": number}."""

    policy: str
    serving: str
    clean: str
    version: int


class SubjectErased(BaseModel):
    object: Literal["subject.erased"] = "subject.erased"
    id: str
    turns: int
    feedback: int
    rewards: int
    pins: int = Field(description="that held them, or a conversation of which nothing is left")
    batches: list[str] = Field(description="that held samples of theirs and were refused; the other samples are open")
    versions: list[LearnerView] = Field(description="that had learned from them, the descendants too")
    reward_models: list[str] = Field(description="that had learned from them: none of them serves any more")
    rollback: list[WayBack] = Field(description="where what serves has learned from erased data")
    scrubbed: bool = Field(description="false: the database's files still hold copies; ask again in a moment")
