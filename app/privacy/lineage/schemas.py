"""Lineage on the wire."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from app.core.pagination import ends
from app.models import Feedback, Sample, Turn
from app.privacy.lineage.repository import Learner
from app.raters import names

SEPARATOR = "/"


class LineageEntry(BaseModel):
    """One word that a version learned from. Its id is the `after` of the next page."""

    object: Literal["lineage.entry"] = "lineage.entry"
    id: str
    turn_id: str
    completion_id: str
    choice_index: int
    origin: Literal["chat", "group_sample", "prompt_set"] = Field(
        description="a chat, or a rollout: to a chat's prompt, or to a dataset's"
    )
    spoken_by: str = Field(description="the version that gave the reply")
    reward: float = Field(description="what the reply counted for, all sources together")
    rater: str | None = Field(description="who said it; null when it was said without a name, or no feedback is left")
    feedback_id: str | None
    kind: str | None
    value: float | None
    said_at: float | None
    erased: bool = Field(description="what was said in this turn has been erased since")

    @classmethod
    def of(cls, policy: str, sample: Sample, turn: Turn, number: int, said: Feedback | None) -> Self:
        return cls(
            id=f"{turn.id}{SEPARATOR}{said.id if said else ''}",
            turn_id=turn.id,
            completion_id=turn.completion_id,
            choice_index=turn.choice_index,
            origin=turn.origin,
            spoken_by=f"{policy}@v{number}",
            reward=sample.reward,
            rater=_rater(turn, said) if said else None,
            feedback_id=said.id if said else None,
            kind=said.kind if said else None,
            value=said.value if said else None,
            said_at=said.created_at if said else None,
            erased=turn.deleted_at is not None,
        )


def _rater(turn: Turn, said: Feedback) -> str | None:
    if said.source_id is not None:
        return names.spoken(said.source_kind, said.source_id)
    return names.end_user(turn.end_user) if turn.end_user is not None and said.source_kind == names.PERSON else None


class LineagePage(BaseModel):
    object: Literal["list"] = "list"
    version: str
    batch: str | None
    erased_at: float | None = Field(description="since when it has learned from erased data, itself or before")
    clean: str | None = Field(description="the version to go back to when this one has learned from erased data")
    data: list[LineageEntry]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LearnerView(BaseModel):
    object: Literal["version.learner"] = "version.learner"
    version: str
    state: str
    direct: bool = Field(description="from its own batch; else from a version it stands on")
    erased_at: float | None

    @classmethod
    def of(cls, learner: Learner) -> Self:
        row = learner.version
        return cls(
            version=f"{learner.policy}@v{row.number}", state=row.state, direct=learner.direct, erased_at=row.tainted_at
        )


class LearnerList(BaseModel):
    """Every version that has learned from it, the descendants too; and every reward model."""

    object: Literal["list"] = "list"
    data: list[LearnerView]
    reward_models: list[str] = Field(description='that were fitted on it, such as "assistant/rm-3"')

    @classmethod
    def of(cls, learners: Sequence[Learner], reward_models: list[str]) -> Self:
        return cls(data=[LearnerView.of(learner) for learner in learners], reward_models=reward_models)


def cursor(after: str | None) -> tuple[str, str]:
    """Example: "chatcmpl-1/fb-2" -> ("chatcmpl-1", "fb-2")"""
    turn_id, _, feedback_id = (after or "").partition(SEPARATOR)
    return turn_id, feedback_id


def page(rows: Sequence[Any], policy: str, limit: int, **version: Any) -> LineagePage:
    data = [LineageEntry.of(policy, *row) for row in rows[:limit]]
    return LineagePage(data=data, **ends(data), has_more=len(rows) > limit, **version)
