"""One table a file; this is the list that migrations and repositories import."""

from app.models.audit import Audit, record
from app.models.base import Base, new_id
from app.models.dataset import Dataset, DatasetKind, DatasetRow
from app.models.engine import Engine, EngineState
from app.models.feedback import Feedback, Ranked
from app.models.learning import Batch, BatchState, Reward, Sample, SampleState
from app.models.policy import Deployment, Policy, Version, VersionState
from app.models.project import ApiKey, Project
from app.models.turn import LOST_FLAW, SERVER_LOST, Turn, TurnPair, TurnState

__all__ = [
    "LOST_FLAW",
    "SERVER_LOST",
    "ApiKey",
    "Audit",
    "Base",
    "Batch",
    "BatchState",
    "Dataset",
    "DatasetKind",
    "DatasetRow",
    "Deployment",
    "Engine",
    "EngineState",
    "Feedback",
    "Policy",
    "Project",
    "Ranked",
    "Reward",
    "Sample",
    "SampleState",
    "Turn",
    "TurnPair",
    "TurnState",
    "Version",
    "VersionState",
    "new_id",
    "record",
]
