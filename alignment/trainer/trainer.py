"""The trainer: restores a version, updates it from a batch, and exports the next. Every rank calls every method."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.algorithms import build
from alignment.artifacts.specs import AdapterSpec
from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.errors import StepTooLarge
from alignment.models import parallel
from alignment.models.base_model import ModelRole, pick_device
from alignment.models.policy_model import PolicyModel
from alignment.trainer import checkpoint
from alignment.trainer.checkpoint import Checkpoint, Export, Progress, RoleState
from alignment.trainer.optimizer import Optimizer
from alignment.trainer.scoring import Probe, probe_ids, score_sequences
from alignment.trainer.update import TrainContext, Update
from alignment.types import Batch, UpdateReport

MAX_ATTEMPTS = 3  # to make an update whose step is too large, each with a smaller learning rate
RETRY_LR_FACTOR = 1e-3


class Trainer:
    """Trains one policy at a time. The base model is loaded and sharded once; versions are restored as needed."""

    def __init__(self, base_model: Path, config: TrainerConfig) -> None:
        self.base_model = base_model
        self.config = config
        self.device = pick_device(config.device)
        self.rank, self.num_ranks = parallel.init_process_group(self.device)
        self.algorithm = build(config.algorithm)
        self.policy = PolicyModel(
            base_model,
            config,
            self.device,
            critic=self.algorithm.needs_critic,
            # With full weights a reward model reads the reference, because the actor changes with every update.
            reference=self.algorithm.needs_reference or (config.reward_model is not None and config.lora is None),
        )
        self.policy.shard()
        learning_rates: dict[ModelRole, float] = {"actor": config.optim.lr}
        if self.algorithm.needs_critic:
            learning_rates["critic"] = config.critic.lr
        self.optimizers = {
            role: Optimizer(self.policy.role_parameters(role), config.optim.model_copy(update={"lr": lr}))
            for role, lr in learning_rates.items()
        }
        self.context = TrainContext(self.policy, self.algorithm, self.optimizers, config)
        self.probe_ids = probe_ids(base_model)
        self.progress = Progress()
        self.restore(None)

    def restore(self, directory: Path | None) -> None:
        """Load the version in `directory`; None is the untrained policy.

        Raises DamagedAdapter for a version that is damaged or does not fit the base model.
        """
        if directory is None:
            actor = RoleState(self.policy.initial_tensors("actor", self.config.seed), None)
            self._load_checkpoint(Checkpoint(actor, None, Progress()))
        else:
            lora = self.config.lora
            spec = None if lora is None else AdapterSpec.from_base_model(self.base_model, lora)
            self._load_checkpoint(checkpoint.read(directory, spec))

    def update(self, batch: Batch, kl_target_factor: float = 1.0) -> UpdateReport:
        """Update the policy from a batch and return the report. After an error the policy is unchanged.

        `kl_target_factor` multiplies the configured KL target, if there is one.

        Raises AlignmentError: NoVariance, NothingToCompare, SingletonGroup, ForeignSamples or NonFiniteUpdate.
        """
        backup = [(tensor, tensor.to("cpu", copy=True)) for tensor in self._trained_tensors()]
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                report = Update(self.context, batch, self.progress.updates, kl_target_factor).run()
                break
            except Exception as error:
                self._restore_backup(backup)
                if not isinstance(error, StepTooLarge) or attempt == MAX_ATTEMPTS:
                    raise
                self.optimizers["actor"].lr_scale *= RETRY_LR_FACTOR**attempt
        self.progress = Progress(
            updates=self.progress.updates + 1,
            optimizer_steps=self.optimizers["actor"].steps,
            lr_scale=self.optimizers["actor"].lr_scale,
            critic_steps=self.optimizers["critic"].steps if "critic" in self.optimizers else 0,
            algorithm=self.algorithm.state_dict(),
        )
        return report

    def probe(self) -> Probe:
        """Return the log-probs of the probe texts under the current policy."""
        sequences = [ScoredSequence(ids, start=1) for ids in self.probe_ids]
        logprobs_BT = score_sequences(self.policy, sequences, max_tokens=self.config.microbatch_tokens)
        rows = zip(logprobs_BT.tolist(), self.probe_ids, strict=True)
        return Probe(self.probe_ids, tuple(tuple(row[: len(ids) - 1]) for row, ids in rows))

    def export(self, directory: Path, lineage: Mapping[str, Any]) -> Export:
        """Write the policy as an immutable version. Rank 0 writes; all ranks return the hash of the manifest."""
        return checkpoint.export(directory, self._make_checkpoint(), self.config.lora, self.base_model, lineage)

    def _make_checkpoint(self) -> Checkpoint:
        """Return the checkpoint on rank 0. The other ranks take part in gathering and get empty dicts."""
        states = {
            role: RoleState(
                parallel.gather_to_cpu(self.policy.role_parameters(role)), parallel.gather_to_cpu(optimizer.moments())
            )
            for role, optimizer in self.optimizers.items()
        }
        return Checkpoint(states["actor"], states.get("critic"), self.progress)

    def _trained_tensors(self) -> list[Tensor]:
        """Return this rank's shards of all tensors that an update changes."""
        parallel.reshard(self.policy)
        return [
            parallel.local_tensor(tensor) for optimizer in self.optimizers.values() for tensor in optimizer.tensors()
        ]

    @torch.no_grad()
    def _restore_backup(self, backup: list[tuple[Tensor, Tensor]]) -> None:
        parallel.reshard(self.policy)
        for tensor, saved in backup:
            tensor.copy_(saved)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        self.optimizers["actor"].lr_scale = self.progress.lr_scale
        self.algorithm.load_state_dict(self.progress.algorithm)

    def _load_checkpoint(self, content: Checkpoint) -> None:
        progress = content.progress
        self._load_role("actor", content.actor, progress.optimizer_steps)
        if "critic" in self.optimizers:
            # A version that was trained by another algorithm has no critic: start with an untrained one.
            critic = content.critic or RoleState(self.policy.initial_tensors("critic", self.config.seed), None)
            self._load_role("critic", critic, progress.critic_steps)
        self.optimizers["actor"].lr_scale = progress.lr_scale
        self.algorithm.load_state_dict(progress.algorithm)
        self.progress = progress

    def _load_role(self, role: ModelRole, state: RoleState, steps: int) -> None:
        self.policy.load_adapter(state.tensors, role)
        self.optimizers[role].load(state.moments, steps if state.moments is not None else 0)
