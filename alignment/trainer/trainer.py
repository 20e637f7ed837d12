"""The trainer: restores a version, updates it from a batch, and exports the next. Every rank calls every method."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from alignment.algorithms import build
from alignment.algorithms.base import RLAlgorithm
from alignment.artifacts.specs import AdapterSpec
from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.errors import ForeignSamples, NothingToCompare, NoVariance, StepTooLarge
from alignment.models import parallel
from alignment.models.base_model import ModelRole, pick_device
from alignment.models.policy_model import PolicyModel
from alignment.trainer import base_probe, checkpoint
from alignment.trainer.base_probe import BaseProbe
from alignment.trainer.checkpoint import Checkpoint, Export, Progress, RoleState
from alignment.trainer.optimizer import Optimizer
from alignment.trainer.scoring import Probe, load_tokenizer, probe_ids, score_sequences
from alignment.trainer.update import TrainContext, Update
from alignment.types import Batch, UpdateReport

MAX_ATTEMPTS = 3  # to make an update whose step is too large, each with a smaller learning rate
RETRY_LR_FACTOR = 1e-3


# What belongs to the model in memory: `Trainer.configure` cannot change it.
MODEL_FIELDS = frozenset(("lora", "packing", "logits_chunk", "activation_checkpointing", "dtype", "device"))


class Trainer:
    """Trains one policy at a time. The base model is loaded and sharded once; versions are restored as needed.

    Policies with different configurations take turns: `configure`, then `restore`.
    """

    def __init__(self, base_model: Path, config: TrainerConfig, *, any_algorithm: bool = False) -> None:
        """Build the model with the roles of the configured algorithm; with `any_algorithm` with all roles.

        Raises UnknownAlgorithm.
        """
        self.base_model = base_model
        self.device = pick_device(config.device)
        self.rank, self.num_ranks = parallel.init_process_group(self.device)
        algorithm = build(config.algorithm)
        self.policy = PolicyModel(
            base_model,
            config,
            self.device,
            critic=algorithm.needs_critic or any_algorithm,
            # With full weights a reward model reads the reference, because the actor changes with every update.
            reference=algorithm.needs_reference
            or any_algorithm
            or (config.reward_model is not None and config.lora is None),
        )
        self.policy.shard()
        self.tokenizer = load_tokenizer(base_model)
        self.probe_ids = probe_ids(self.tokenizer, config.dtype)
        self._set_config(config, algorithm)
        self.restore(None)

    def configure(self, config: TrainerConfig) -> None:
        """Use another configuration from now on, with a new algorithm object and new optimizers.

        The caller must `restore` a version afterwards: nothing of the policy before remains.

        Raises UnknownAlgorithm; ValueError where the model in memory does not fit the configuration.
        """
        changed = {name for name in MODEL_FIELDS if getattr(config, name) != getattr(self.config, name)}
        if config.critic.r != self.config.critic.r:
            changed.add("critic.r")
        if changed:
            raise ValueError(f"{', '.join(sorted(changed))} cannot change while the model is in memory.")
        algorithm = build(config.algorithm)
        needed: dict[ModelRole, bool] = {"critic": algorithm.needs_critic, "reference": algorithm.needs_reference}
        if missing := [role for role, is_needed in needed.items() if is_needed and role not in self.policy.roles]:
            raise ValueError(f"{config.algorithm.type} needs the roles {', '.join(missing)}, which the model lacks.")
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        self._set_config(config, algorithm)

    def _set_config(self, config: TrainerConfig, algorithm: RLAlgorithm) -> None:
        self.config, self.algorithm = config, algorithm
        learning_rates: dict[ModelRole, float] = {"actor": config.optim.lr}
        if algorithm.needs_critic:
            learning_rates["critic"] = config.critic.lr
        self.optimizers = {
            role: Optimizer(self.policy.role_parameters(role), config.optim.model_copy(update={"lr": lr}))
            for role, lr in learning_rates.items()
        }
        self.context = TrainContext(self.policy, algorithm, self.optimizers, config, self.tokenizer)
        self.progress = Progress()

    @property
    def adapter_spec(self) -> AdapterSpec | None:
        """Return the specification of the adapters that are exported; None for full weights."""
        return self.policy.adapter_spec

    def restore(self, directory: Path | None, manifest_sha256: str | None = None) -> None:
        """Load the version in `directory`; None is the untrained policy.

        Raises DamagedAdapter for a version that is damaged, does not fit the base model, or has another manifest than
        the one with this hash.
        """
        if directory is None:
            actor = RoleState(self.policy.initial_tensors("actor", self.config.seed), None)
            self._load_checkpoint(Checkpoint(actor, None, Progress()))
        else:
            self._load_checkpoint(checkpoint.read(directory, self.adapter_spec, manifest_sha256))

    def update(self, batch: Batch, kl_target_factor: float = 1.0) -> UpdateReport:
        """Update the policy from a batch and return the report. After an error the policy is unchanged.

        `kl_target_factor` multiplies the configured KL target, if there is one.

        Foreign turns are left out of the batch, and the report names them.

        Raises AlignmentError: NoVariance, NothingToCompare, SingletonGroup, NonFiniteUpdate, or ForeignSamples; its
        `turns`, if any, are foreign, and too little is left without them.
        """
        backup = [(tensor, tensor.to("cpu", copy=True)) for tensor in self._trained_tensors()]
        foreign_turns: dict[str, str] = {}
        attempt = 1
        while True:
            try:
                rest = batch.without(foreign_turns)
                update = Update(self.context, rest, self.progress.updates, kl_target_factor)
                report = replace(update.run(), foreign_turns=foreign_turns)
                break
            except Exception as error:
                self._restore_backup(backup)
                if isinstance(error, ForeignSamples) and error.turns:
                    foreign_turns |= error.turns
                    continue
                if isinstance(error, (NoVariance, NothingToCompare)) and foreign_turns:
                    raise ForeignSamples(
                        f"Without {len(foreign_turns)} foreign turns: {error}", foreign_turns
                    ) from error
                if not isinstance(error, StepTooLarge) or attempt == MAX_ATTEMPTS:
                    raise
                self.optimizers["actor"].lr_scale *= RETRY_LR_FACTOR**attempt
                attempt += 1
        report.metrics["training/samples_foreign"] = float(len(foreign_turns))
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
        logprobs_BT = score_sequences(self.policy, sequences, max_tokens=self.config.micro_batch_tokens)
        rows = zip(logprobs_BT.tolist(), self.probe_ids, strict=True)
        return Probe(self.probe_ids, tuple(tuple(row[: len(ids) - 1]) for row, ids in rows))

    def probe_base_model(self, directory: Path, context_length: int | None) -> BaseProbe:
        """Score random tokens by the base model alone and with a random adapter, and write that adapter.

        The policy is that adapter afterwards: restore a version before the next update. Not for full weights.
        """
        policy, spec = self.policy, self.adapter_spec
        assert spec is not None, "full weights have no adapter"
        ids = base_probe.random_sequences(policy.model_spec, context_length)
        sequences = [ScoredSequence(row, start=1) for row in ids]

        def score(role: ModelRole) -> tuple[tuple[float, ...], ...]:
            logprobs_BT = score_sequences(policy, sequences, max_tokens=self.config.micro_batch_tokens, role=role)
            return tuple(tuple(row) for row in logprobs_BT.tolist())

        base_logprobs, adapter = score("reference"), base_probe.random_adapter(spec)
        policy.load_adapter(adapter)
        checkpoint.export_directory(
            directory, lambda folder: base_probe.write_adapter(folder, adapter, spec, self.base_model), {}
        )
        return BaseProbe(ids, base_logprobs, score("actor"), directory)

    def export(self, directory: Path, lineage: Mapping[str, object]) -> Export:
        """Write the policy as an immutable version. Rank 0 writes; all ranks return the hash of the manifest."""
        return checkpoint.export(directory, self._make_checkpoint(), self.adapter_spec, self.base_model, lineage)

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
