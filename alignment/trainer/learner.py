"""The learner: restore a version, update it from a batch, export the next. Every rank calls every method."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from alignment.algorithms import ALGORITHMS
from alignment.config import TrainerConfig
from alignment.errors import NonFiniteUpdate
from alignment.manifest import AdapterSpec
from alignment.model import adapter, shard
from alignment.model.load import pick_device
from alignment.model.policy import PolicyModel
from alignment.samples import Batch, check_variance
from alignment.trainer import checkpoint
from alignment.trainer.checkpoint import Checkpoint, Progress
from alignment.trainer.export import Export, export
from alignment.trainer.lesson import Lesson, minibatches, output_mask, recorded_logprobs
from alignment.trainer.logprobs import score, score_all
from alignment.trainer.optim import Optimizer
from alignment.trainer.packing import Scored, plan
from alignment.trainer.probing import Probe, probe_ids
from alignment.trainer.report import Stopwatch, Tally, UpdateReport, describe


class Learner:
    """Built once and kept: the base model is loaded and cut over the ranks here, adapters come and go."""

    def __init__(self, base_model: Path, config: TrainerConfig) -> None:
        self.base_model = base_model
        self.config = config
        self.device = pick_device(config.device)
        self.rank, self.num_ranks = shard.join(self.device)
        self.policy = PolicyModel(base_model, config.lora, config.dtype, self.device)
        shard.shard(self.policy, self.policy.layers, self.device)
        self.optimizer = Optimizer(self.policy.adapter(), config.optim)
        self.algorithm = ALGORITHMS[config.algorithm.type](config.algorithm)
        self.probe_ids = probe_ids(base_model)
        self.progress = Progress()
        self.restore(None)

    def restore(self, directory: Path | None) -> None:
        """Become the version in `directory`; None is the policy that has learned nothing yet."""
        if directory is None:
            shapes = {name: tuple(tensor.shape) for name, tensor in self.policy.adapter().items()}
            self._become(Checkpoint(adapter.fresh(shapes, self.config.seed), None, Progress()))
        else:
            spec = AdapterSpec.of(self.base_model, self.config.lora)
            self._become(checkpoint.read(directory, spec))

    def update(self, batch: Batch) -> UpdateReport:
        """Learn from a batch, all of it or nothing: after a refusal the policy is what it was."""
        check_variance([sample.reward for sample in batch.samples])
        before = self._checkpoint()
        try:
            return self._update(batch)
        except NonFiniteUpdate:
            self._become(before)
            raise

    def probe(self) -> Probe:
        """Log-probs of the fixed texts under the policy as it stands."""
        sequences = [Scored(ids, start=1) for ids in self.probe_ids]
        rows = zip(self._score(sequences).tolist(), self.probe_ids, strict=True)
        return Probe(self.probe_ids, tuple(tuple(row[: len(ids) - 1]) for row, ids in rows))

    def export(self, directory: Path, lineage: Mapping[str, Any]) -> Export:
        """Write the policy as a version that never changes; rank 0 writes, all ranks learn the hash."""
        content = self._checkpoint()
        done = Export(directory, "", 0.0)
        if self.rank == 0:
            done = export(directory, content, self.config.lora, self.base_model, lineage)
        return replace(done, manifest_sha256=shard.from_rank_zero(done.manifest_sha256))

    def _update(self, batch: Batch) -> UpdateReport:
        recipe, watch = self.config.algorithm, Stopwatch()
        lesson, metrics, baseline = self._prepare(batch, watch)
        order = torch.Generator().manual_seed(self.config.seed + self.progress.updates)
        tallies = [Tally() for _ in range(recipe.epochs)]
        grad_norms = []
        with watch.measure("update_actor"):
            for tally in tallies:
                for minibatch in minibatches(lesson.sequences, recipe.minibatches, order):
                    tally.add(self._learn(lesson, minibatch))
                    grad_norms.append(self.optimizer.step())
        steps = len(grad_norms) // recipe.epochs
        epochs = [tally.means(steps, self.num_ranks) for tally in tallies]
        self.progress = Progress(self.progress.updates + 1, self.optimizer.steps, baseline)
        metrics |= {name: fmean(epoch[name] for epoch in epochs) for name in epochs[0]}
        metrics |= {
            "reference_kl": epochs[-1]["reference_kl"],
            "actor/kl_coef": recipe.kl_coef,
            "actor/grad_norm": fmean(grad_norms),
            "actor/lr": self.config.optim.lr,
            "critic/baseline": baseline,
        }
        return UpdateReport(batch.id, self.progress.updates, metrics | watch.metrics)

    def _prepare(self, batch: Batch, watch: Stopwatch) -> tuple[Lesson, dict[str, float], float]:
        """Score the batch, give credit; return the lesson, its metrics and the baseline to remember."""
        sequences = [Scored.of(sample) for sample in batch.samples]
        with watch.measure("parent"):
            parent_BT = self._score(sequences)
        with watch.measure("reference"), adapter.switched_off(self.policy):
            reference_BT = self._score(sequences)
        mask_BT = output_mask(sequences, self.device)
        rewards_B = torch.tensor([sample.reward for sample in batch.samples], device=self.device)
        advantages_BT, baseline = self.algorithm.credit(rewards_B, mask_BT, self.progress.baseline)
        correction = self.algorithm.correct(parent_BT, recorded_logprobs(batch.samples, mask_BT), mask_BT)
        metrics = describe(batch.samples, advantages_BT, mask_BT) | correction.metrics
        lesson = Lesson(sequences, mask_BT, parent_BT, reference_BT, correction.weights_BT, advantages_BT)
        return lesson, metrics, baseline

    def _learn(self, lesson: Lesson, minibatch: list[int]) -> dict[str, Tensor]:
        """Leave the minibatch's gradient on the parameters; return this rank's share of the metrics."""
        tally = Tally()
        sequences = [lesson.sequences[index] for index in minibatch]
        for share in plan(sequences, self.config.microbatch_tokens, self.num_ranks)[self.rank :: self.num_ranks]:
            group = [minibatch[index] for index in share]
            present = group or minibatch[:1]  # an empty micro-batch still meets the other ranks, and adds 0
            logprobs_BT = score(self.policy, [lesson.sequences[index] for index in present], lesson.mask_BT[present])
            outputs = self.algorithm.loss(lesson.inputs(minibatch, present, logprobs_BT))
            weight = float(bool(group))
            (outputs.loss * weight * self.num_ranks).backward()  # FSDP averages over the ranks
            tally.add({name: value * weight for name, value in outputs.metrics.items()})
        return tally.sums

    def _score(self, sequences: list[Scored]) -> Tensor:
        budget = self.config.microbatch_tokens
        return score_all(self.policy, sequences, budget=budget, rank=self.rank, num_ranks=self.num_ranks)

    def _checkpoint(self) -> Checkpoint:
        tensors = {name: shard.whole(tensor).detach().clone() for name, tensor in self.policy.adapter().items()}
        moments = {name: moment.clone() for name, moment in self.optimizer.moments().items()}
        return Checkpoint(tensors, moments, self.progress)

    def _become(self, content: Checkpoint) -> None:
        self.policy.wear(content.adapter)
        if content.moments is None:
            self.optimizer.reset()
        else:
            self.optimizer.load(content.moments, content.progress.optimizer_steps)
        self.progress = content.progress
