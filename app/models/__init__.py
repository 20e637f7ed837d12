"""One table a file; this is the list that migrations and repositories import."""

from app.models.audit import Audit, record
from app.models.base import Base, new_id
from app.models.dataset import Dataset, DatasetKind, DatasetRow
from app.models.engine import Engine, EngineState
from app.models.feedback import Feedback, Ranked
from app.models.learning import (
    WITHDRAWN,
    Batch,
    BatchState,
    Judgement,
    JudgementState,
    Reward,
    Sample,
    SampleState,
)
from app.models.pin import Held, Pin
from app.models.policy import COMING, HEARD, SERVED, Conversations, Deployment, Mode, Policy, Version, VersionState
from app.models.project import ApiKey, Project
from app.models.rater import Rater, Standing
from app.models.reward_model import RewardModel, RewardModelState, RewardModelTurn
from app.models.rollout import PlanState, Rollout, RolloutPlan, RolloutState
from app.models.turn import LOST_FLAW, SERVER_LOST, Origin, Routed, Turn, TurnPair, TurnState, lock_turns

__all__ = [
    "COMING",
    "HEARD",
    "LOST_FLAW",
    "SERVED",
    "SERVER_LOST",
    "WITHDRAWN",
    "ApiKey",
    "Audit",
    "Base",
    "Batch",
    "BatchState",
    "Conversations",
    "Dataset",
    "DatasetKind",
    "DatasetRow",
    "Deployment",
    "Engine",
    "EngineState",
    "Feedback",
    "Held",
    "Judgement",
    "JudgementState",
    "Mode",
    "Origin",
    "Pin",
    "PlanState",
    "Policy",
    "Project",
    "Ranked",
    "Rater",
    "Reward",
    "RewardModel",
    "RewardModelState",
    "RewardModelTurn",
    "Rollout",
    "RolloutPlan",
    "RolloutState",
    "Routed",
    "Sample",
    "SampleState",
    "Standing",
    "Turn",
    "TurnPair",
    "TurnState",
    "Version",
    "VersionState",
    "lock_turns",
    "new_id",
    "record",
]
