"""The torchrun ranks of one trainer: rank 0 broadcasts commands, and every rank executes them."""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from alignment.config.trainer import TrainerConfig
from alignment.errors import AlignmentError
from alignment.models import parallel
from alignment.models.base_model import pick_device
from alignment.reward_model.model import RewardModel
from alignment.trainer.base_probe import BaseProbe
from alignment.trainer.trainer import Trainer
from app.core.settings import Settings
from app.core.settings.derived import trainer_config
from app.inference.model_support import require_supported
from app.policies.adapter_shape import ADAPTER_SPEC
from workers import base_model
from workers.training.commands import AdvanceFit, BeginFit, Command, FinishFit, ProbeBaseModel, ScoreReplies, Update
from workers.training.results import ComparedProbe, FittedRewardModel, TrainedVersion, UpdateTimings

log = logging.getLogger("attune.trainer")
RANK_TIMEOUT_SECONDS = 300.0
UNKNOWN = "unknown"  # instead of a directory: the state in memory is that of no version
R = TypeVar("R")


class RankGroupFailed(Exception):
    """A command failed on a rank in a way that the other ranks do not know of, so all ranks must restart."""


class RankGroup:
    """All ranks of one trainer. Rank 0 calls `run`; the other ranks call `follow`.

    Policies of one base model share the ranks: the base model stays in memory, and an adapter with its optimizer and
    its baseline is read from the parent's directory and written to the directory of the next version. Each update
    names its policy and brings that policy's configuration.
    """

    def __init__(self, settings: Settings, timeout_seconds: float = RANK_TIMEOUT_SECONDS) -> None:
        self.settings = settings
        require_supported(settings, base_model.model_dir(settings.model, weights=False))
        config = trainer_config(settings)
        # Before Trainer does, whose collectives would have torch's timeout of 30 minutes.
        parallel.init_process_group(pick_device(config.device), timedelta(seconds=timeout_seconds))
        self.trainer = Trainer(base_model.model_dir(settings.model), config, any_algorithm=True)
        if config.lora is not None and self.trainer.adapter_spec != base_model.adapter_spec(settings):
            raise ValueError(
                f"the trainer's adapters are not those of {settings.home / ADAPTER_SPEC}, which engines are launched "
                "for: the file is of another release. Set another `home`"
            )
        self._idle_group = self._command_group = None
        if self.trainer.num_ranks > 1:
            # The other ranks wait for the next command in a group without a time-out. The command itself is sent in a
            # group with a time-out: it may be too large for the buffers of a rank that has stopped reading.
            self._idle_group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
            self._command_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.loaded_policy: tuple[str, TrainerConfig] | None = None  # the policy that the trainer is configured for
        self.loaded_version_dir: Path | str | None = UNKNOWN  # None is version 0
        self.reward_model = RewardModel(self.trainer)
        self.loaded_reward_model_dir: Path | None = None

    def broadcast(self, command: Command[object] | None) -> Command[object] | None:
        """Send rank 0's command to all ranks and return it. None tells them to stop."""
        commands = [command]
        if self._command_group is not None:
            dist.broadcast(torch.zeros(1), src=0, group=self._idle_group)
            dist.broadcast_object_list(commands, src=0, group=self._command_group)
        return commands[0]

    def follow(self) -> None:
        """Execute the commands of rank 0 until it stops."""
        while (command := self.broadcast(None)) is not None:
            with suppress(AlignmentError):  # every rank raises it; rank 0 records it
                self.execute(command)

    def run(self, command: Command[R]) -> R:
        """Execute a command on every rank; called by rank 0. Return its result on rank 0.

        Raises:
            AlignmentError: every rank refused the command.
            RankGroupFailed: a rank failed.
        """
        try:
            self.broadcast(command)
            return self.execute(command)
        except AlignmentError:
            raise
        except Exception as error:  # out of memory, or a rank that ended or did not answer in time
            raise RankGroupFailed(f"{type(error).__name__}: {error}") from error

    def execute(self, command: Command[R]) -> R:
        """Execute a command on this rank."""
        return command.execute(self)

    def probe_base_model(self, command: ProbeBaseModel) -> BaseProbe:
        self.loaded_version_dir = UNKNOWN
        return self.trainer.probe_base_model(command.directory, self.settings.engine.context_length)

    def begin_fit(self, command: BeginFit) -> None:
        """Start to fit a new reward model. Updates may run between the parts of a fit; they do not change it."""
        self.loaded_reward_model_dir = None
        self.reward_model.begin(command.dataset, command.config, command.previous)

    def advance_fit(self, command: AdvanceFit) -> bool:
        return self.reward_model.advance(command.steps)

    def finish_fit(self, command: FinishFit) -> FittedRewardModel:
        """Evaluate and write the reward model. The policy's state does not change."""
        metrics = self.reward_model.finish()
        export = self.reward_model.export(command.directory, command.lineage)
        self.loaded_reward_model_dir = export.path
        refusal = _describe_low_accuracy(metrics, command.min_agreement)
        return FittedRewardModel(export.path, export.manifest_sha256, metrics, refusal)

    def score_replies(self, command: ScoreReplies) -> Sequence[float]:
        if self.loaded_reward_model_dir != command.directory:
            self.loaded_reward_model_dir = None
            self.reward_model.restore(command.directory, command.manifest_sha256)
            self.loaded_reward_model_dir = command.directory
        return self.reward_model.score(command.replies)

    def update(self, command: Update) -> TrainedVersion:
        """Run one update from the parent's state, and write the new version's directory.

        Another policy than before, or another configuration, begins with a new algorithm object and new optimizers,
        whose states are those of the parent.

        Raises AlignmentError, also for an algorithm that cannot be built.
        """
        started = time.perf_counter()
        self._configure(command.policy_id, command.config)
        if self.loaded_version_dir != command.parent:
            self.loaded_version_dir = UNKNOWN
            self.trainer.restore(command.parent, command.parent_sha256)
            self.loaded_version_dir = command.parent
        restored = time.perf_counter()
        parent_probe = self.trainer.probe()
        parent_probed = time.perf_counter()
        self.loaded_version_dir = UNKNOWN  # the state in memory changes before the new version is written
        report = self.trainer.update(command.batch, command.kl_target_factor)
        updated = time.perf_counter()
        probe = self.trainer.probe()
        probed = time.perf_counter()
        export = self.trainer.export(command.directory, command.lineage)
        self.loaded_version_dir = command.directory
        return TrainedVersion(
            directory=export.path,
            manifest_sha256=export.manifest_sha256,
            is_full_weights=self.trainer.config.lora is None,
            probe=ComparedProbe(probe.ids, probe.logprobs, parent_probe.logprobs),
            report=report,
            timings=UpdateTimings(
                restore=restored - started, update=updated - parent_probed, export=time.perf_counter() - probed
            ),
        )

    def _configure(self, policy_id: str, config: TrainerConfig) -> None:
        if self.loaded_policy == (policy_id, config):
            return
        if self.loaded_policy is not None or config != self.trainer.config:
            self.loaded_policy, self.loaded_version_dir = None, UNKNOWN
            self.trainer.configure(config)
        self.loaded_policy = policy_id, config


def _describe_low_accuracy(metrics: Mapping[str, float], min_agreement: float) -> str | None:
    """Return why a reward model with these metrics must not serve, None if it may."""
    if (low := metrics["auc_low"]) > min_agreement:
        return None
    order = f"{metrics['auc']:.0%} of liked replies above disliked ones" if "auc" in metrics else "no order known"
    return (
        f"{order}, over {metrics['num_predicted']:.0f} votes predicted before they were learned from: "
        f"that shows at least {low:.0%}, and more than {min_agreement:.0%} is needed"
    )


def abort_rank() -> NoReturn:
    """End this rank at once, without telling the others: torchrun ends them too, and restarts the group."""
    log.exception("this rank ends, and with it the group")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
