"""The tables, by subject. Migrations and repositories import them from here."""

from alignment.signals.combine_rewards import NUMERIC_KINDS
from app.models.audit import TRAINER, Audit, AuditAction, AuditChain, record_audit
from app.models.base import Base, new_id
from app.models.batch import (
    COUNTED_STATES,
    HAS_CONTRAST,
    HAS_FAILED,
    IS_MISCOUNTED,
    IS_UNCOMPARED,
    IS_UNCOUNTED,
    AssemblyLook,
    Batch,
    BatchState,
    BatchTurn,
    Sample,
    SampleRule,
    SampleState,
)
from app.models.completion_ids import to_completion_id
from app.models.console import ConsoleLink, ConsoleSession
from app.models.deployment import Deployment
from app.models.engine import Engine, EngineState
from app.models.episode import (
    LIMIT_REASONS,
    LOST_REASONS,
    REPORTED_REASONS,
    EndReason,
    Episode,
    EpisodeSampling,
    EpisodeState,
    ServiceTier,
    VersionRule,
)
from app.models.feedback import (
    RANKING_KINDS,
    VOTE_KINDS,
    Feedback,
    FeedbackKey,
    FeedbackRank,
    Rater,
    RaterStanding,
    SourceKind,
)
from app.models.line_move import LineMove
from app.models.pin import Pin, PinKind
from app.models.planned_run import AttemptReason, AttemptState, PlannedRun, RunAttempt
from app.models.policy import ANSWERING, ConversationRouting, LearningMode, Policy, PolicyState
from app.models.project import ApiKey, IdempotentRequest, Project, ProjectUsage
from app.models.reward import Judgement, JudgementState, Reward, RewardModel, RewardModelState, RewardModelTurn
from app.models.rollout import Dataset, DatasetKind, DatasetRow, PlanState, Rollout, RolloutPlan, RolloutState
from app.models.totals import RolloutTotal, SampleTotal, TokenCount, UnmatchedVotes, VoteCursor, VoteTotal
from app.models.turn import (
    ENGINE_REFUSED,
    LOST_REASON,
    REQUESTED,
    SERVER_LOST,
    Origin,
    RouteReason,
    Turn,
    TurnMetadata,
    TurnState,
    lock_turns,
)
from app.models.version import ONCE_LIVE, PENDING_RELEASE, SERVED_TRAFFIC, Version, VersionState
from app.models.webhook import WebhookDelivery, WebhookDeliveryState, WebhookEndpoint
