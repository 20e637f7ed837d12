"""What rank 0 tells every rank of a trainer to do, and what each command returns.

A command is pickled and sent to all ranks. Each names the type of its result, which `RankGroup.run` returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from alignment.config.trainer import RewardModelConfig, TrainerConfig
from alignment.reward_model.dataset import PreferenceDataset, Reply
from alignment.reward_model.prequential import PreviousFit
from alignment.trainer.base_probe import BaseProbe
from alignment.types import Batch
from workers.training.results import FittedRewardModel, TrainedVersion

R = TypeVar("R", covariant=True)


class Ranks(Protocol):
    """What executes the commands on one rank: `RankGroup`."""

    def probe_base_model(self, command: "ProbeBaseModel") -> BaseProbe: ...

    def update(self, command: "Update") -> TrainedVersion: ...

    def begin_fit(self, command: "BeginFit") -> None: ...

    def advance_fit(self, command: "AdvanceFit") -> bool: ...

    def finish_fit(self, command: "FinishFit") -> FittedRewardModel: ...

    def score_replies(self, command: "ScoreReplies") -> Sequence[float]: ...


class Command(ABC, Generic[R]):
    """A command to all ranks, whose result is an R."""

    @abstractmethod
    def execute(self, ranks: Ranks) -> R:
        """Execute the command on this rank."""


@dataclass(frozen=True)
class ProbeBaseModel(Command[BaseProbe]):
    """Score random tokens without and with a random adapter, which is written to `directory`."""

    directory: Path

    def execute(self, ranks: Ranks) -> BaseProbe:
        return ranks.probe_base_model(self)


@dataclass(frozen=True)
class Update(Command[TrainedVersion]):
    """Run one update of a policy from its parent's state, and write the new version to `directory`.

    `config` is that of the policy. `parent` is None for the untrained policy; otherwise its manifest has the hash
    `parent_sha256`. `kl_target_factor` multiplies the configured KL target.
    """

    policy_id: str
    config: TrainerConfig
    parent: Path | None
    parent_sha256: str | None
    batch: Batch
    directory: Path
    lineage: dict[str, str]
    kl_target_factor: float = 1.0

    def execute(self, ranks: Ranks) -> TrainedVersion:
        return ranks.update(self)


@dataclass(frozen=True)
class BeginFit(Command[None]):
    """Start to fit a new reward model with the policy's configuration; None is the trainer's own."""

    dataset: PreferenceDataset
    config: RewardModelConfig | None
    previous: PreviousFit | None = None

    def execute(self, ranks: Ranks) -> None:
        ranks.begin_fit(self)


@dataclass(frozen=True)
class AdvanceFit(Command[bool]):
    """Make up to `steps` steps of the fit. The result is True if no step was left."""

    steps: int

    def execute(self, ranks: Ranks) -> bool:
        return ranks.advance_fit(self)


@dataclass(frozen=True)
class FinishFit(Command[FittedRewardModel]):
    """Evaluate the fitted reward model and write it to `directory`."""

    directory: Path
    min_agreement: float
    lineage: dict[str, str]

    def execute(self, ranks: Ranks) -> FittedRewardModel:
        return ranks.finish_fit(self)


@dataclass(frozen=True)
class ScoreReplies(Command[Sequence[float]]):
    """Score replies with the reward model in `directory`."""

    directory: Path
    manifest_sha256: str
    replies: tuple[Reply, ...]

    def execute(self, ranks: Ranks) -> Sequence[float]:
        return ranks.score_replies(self)
