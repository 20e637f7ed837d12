"""The tables, one subject per file. Migrations and repositories import them from here."""

from app.models.audit import Audit, AuditAction, record_audit
from app.models.base import Base, new_id
from app.models.batch import Batch, BatchState
from app.models.dataset import Dataset, DatasetKind, DatasetRow
from app.models.engine import Engine, EngineState
from app.models.feedback import NUMERIC_KINDS, RANKING_KINDS, Feedback, FeedbackRank, SourceKind
from app.models.judgement import Judgement, JudgementState
from app.models.pin import Pin, PinKind
from app.models.policy import (
    ONCE_LIVE,
    PENDING_RELEASE,
    SERVED_TRAFFIC,
    ConversationRouting,
    Deployment,
    LearningMode,
    Policy,
    Version,
    VersionState,
)
from app.models.project import ApiKey, Project
from app.models.rater import Rater, RaterStanding
from app.models.reward import Reward
from app.models.reward_model import RewardModel, RewardModelState, RewardModelTurn
from app.models.rollout import PlanState, Rollout, RolloutPlan, RolloutState
from app.models.sample import WITHDRAWN, Sample, SampleState
from app.models.turn import LOST_REASON, SERVER_LOST, Origin, RouteReason, Turn, TurnMetadata, TurnState, lock_turns

__all__ = [
    "LOST_REASON",
    "NUMERIC_KINDS",
    "ONCE_LIVE",
    "PENDING_RELEASE",
    "RANKING_KINDS",
    "SERVED_TRAFFIC",
    "SERVER_LOST",
    "WITHDRAWN",
    "ApiKey",
    "Audit",
    "AuditAction",
    "Base",
    "Batch",
    "BatchState",
    "ConversationRouting",
    "Dataset",
    "DatasetKind",
    "DatasetRow",
    "Deployment",
    "Engine",
    "EngineState",
    "Feedback",
    "FeedbackRank",
    "Judgement",
    "JudgementState",
    "LearningMode",
    "Origin",
    "Pin",
    "PinKind",
    "PlanState",
    "Policy",
    "Project",
    "Rater",
    "RaterStanding",
    "Reward",
    "RewardModel",
    "RewardModelState",
    "RewardModelTurn",
    "Rollout",
    "RolloutPlan",
    "RolloutState",
    "RouteReason",
    "Sample",
    "SampleState",
    "SourceKind",
    "Turn",
    "TurnMetadata",
    "TurnState",
    "Version",
    "VersionState",
    "lock_turns",
    "new_id",
    "record_audit",
]
