"""The learner: restore a version, update it from a batch, export the next. Every rank calls every method."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.algorithms import build
from alignment.artifacts import AdapterSpec
from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import Scored
from alignment.models import parallel
from alignment.models.loading import pick_device
from alignment.models.policy_model import ModelRole, PolicyModel
from alignment.trainer import checkpoint
from alignment.trainer.checkpoint import Checkpoint, Progress, Trained
from alignment.trainer.export import Export, export
from alignment.trainer.metrics import UpdateReport
from alignment.trainer.optimizer import Optimizer
from alignment.trainer.probe import Probe, probe_ids
from alignment.trainer.scoring import score_alone
from alignment.trainer.update import Update
from alignment.types import Batch


class Trainer:
    """Built once and kept: the base model is loaded and cut over the ranks here, versions come and go."""

    def __init__(self, base_model: Path, config: TrainerConfig) -> None:
        self.base_model = base_model
        self.config = config
        self.device = pick_device(config.device)
        self.rank, self.num_ranks = parallel.join(self.device)
        self.algorithm = build(config.algorithm)
        self.policy = PolicyModel(
            base_model,
            config,
            self.device,
            critic=self.algorithm.needs_critic,
            # with full weights a reward model reads the reference: what the actor is today would be another tomorrow
            reference=self.algorithm.needs_reference or (config.reward_model is not None and config.lora is None),
        )
        self.policy.shard(self.device)
        self.optimizer = Optimizer(self.policy.tensors("actor"), config.optim)
        self.critic_optimizer: Optimizer | None = None
        if self.algorithm.needs_critic:
            settings = config.optim.model_copy(update={"lr": config.critic.lr})
            self.critic_optimizer = Optimizer(self.policy.tensors("critic"), settings)
        self.probe_ids = probe_ids(base_model)
        self.progress = Progress()
        self.restore(None)

    def restore(self, directory: Path | None) -> None:
        """Become the version in `directory`; None is the policy that has learned nothing yet."""
        if directory is None:
            self._become(Checkpoint(Trained(self.policy.fresh("actor", self.config.seed), None), None, Progress()))
        else:
            lora = self.config.lora
            self._become(checkpoint.read(directory, None if lora is None else AdapterSpec.of(self.base_model, lora)))

    def update(self, batch: Batch) -> UpdateReport:
        """Learn from a batch, all of it or nothing: after a refusal the policy is what it was.

        Raises AlignmentError: NoVariance, NothingToCompare, SingletonGroup, ForeignSamples or NonFiniteUpdate.
        """
        before = [(tensor, tensor.to("cpu", copy=True)) for tensor in self._own_tensors()]
        try:
            report = Update(self, batch).make()
        except Exception:
            self._go_back(before)
            raise
        self.progress = Progress(
            updates=self.progress.updates + 1,
            optimizer_steps=self.optimizer.steps,
            critic_steps=self.critic_optimizer.steps if self.critic_optimizer else 0,
            algorithm=self.algorithm.state_dict(),
        )
        return report

    def probe(self) -> Probe:
        """Log-probs of the fixed texts under the policy as it stands."""
        sequences = [Scored(ids, start=1) for ids in self.probe_ids]
        logprobs_BT = score_alone(
            self.policy, sequences, budget=self.config.microbatch_tokens, rank=self.rank, num_ranks=self.num_ranks
        )
        rows = zip(logprobs_BT.tolist(), self.probe_ids, strict=True)
        return Probe(self.probe_ids, tuple(tuple(row[: len(ids) - 1]) for row, ids in rows))

    def export(self, directory: Path, lineage: Mapping[str, Any]) -> Export:
        """Write the policy as a version that never changes; rank 0 writes, all ranks learn the hash."""
        content = self._checkpoint()
        done = Export(directory, "", 0.0)
        if self.rank == 0:
            done = export(directory, content, self.config.lora, self.base_model, lineage)
        return replace(done, manifest_sha256=parallel.from_rank_zero(done.manifest_sha256))

    def _checkpoint(self) -> Checkpoint:
        """On rank 0, which alone writes; the others take part, because no rank has a tensor whole, and keep nothing."""

        def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            whole = ((name, parallel.whole(tensor).detach()) for name, tensor in tensors.items())
            return {name: tensor.to("cpu", copy=True) for name, tensor in whole if self.rank == 0}

        def taken(hat: ModelRole, optimizer: Optimizer) -> Trained:
            return Trained(gathered(self.policy.tensors(hat)), gathered(optimizer.moments()))

        critic = taken("critic", self.critic_optimizer) if self.critic_optimizer else None
        return Checkpoint(taken("actor", self.optimizer), critic, self.progress)

    def _optimizers(self) -> list[Optimizer]:
        return [self.optimizer, *([self.critic_optimizer] if self.critic_optimizer else [])]

    def _own_tensors(self) -> list[Tensor]:
        """All that an update changes, this rank's share of it."""
        self.policy.tensors("actor")  # shows the shards
        return [parallel.own(tensor) for optimizer in self._optimizers() for tensor in optimizer.everything()]

    @torch.no_grad()
    def _go_back(self, before: list[tuple[Tensor, Tensor]]) -> None:
        self.policy.tensors("actor")
        for tensor, was in before:
            tensor.copy_(was)
        for optimizer in self._optimizers():
            optimizer.forget()
        self.algorithm.load_state_dict(self.progress.algorithm)

    def _become(self, content: Checkpoint) -> None:
        self.policy.wear(content.actor.tensors, "actor")
        _resume(self.optimizer, content.actor.moments, content.progress.optimizer_steps)
        if self.critic_optimizer:
            # A version that another algorithm made has no critic: this one begins to judge anew.
            critic = content.critic or Trained(self.policy.fresh("critic", self.config.seed), None)
            self.policy.wear(critic.tensors, "critic")
            _resume(self.critic_optimizer, critic.moments, content.progress.critic_steps)
        self.algorithm.load_state_dict(content.progress.algorithm)
        self.progress = content.progress


def _resume(optimizer: Optimizer, moments: Mapping[str, Any] | None, steps: int) -> None:
    if moments is None:
        optimizer.reset()
    else:
        optimizer.load(dict(moments), steps)
