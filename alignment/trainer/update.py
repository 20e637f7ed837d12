"""One update: a batch scored, credited, and learned from step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alignment.algorithms import MicroBatch
from alignment.algorithms.policy_gradient import PolicyGradient
from alignment.data.collate import lay_out, micro_batch, minibatches
from alignment.data.micro_batches import Scored, plan
from alignment.data.prefix_sharing import Packing
from alignment.errors import ForeignSamples, NoVariance
from alignment.functional import aggregate, kl_estimate
from alignment.models.policy_model import ModelRole
from alignment.trainer.metrics import MetricAccumulator, Stopwatch, UpdateReport, describe, mean_of_steps
from alignment.trainer.scoring import score, score_all
from alignment.trainer.update_kl import moved
from alignment.types import Batch

if TYPE_CHECKING:
    from alignment.trainer.trainer import Trainer

SEQUENCE_SLACK = 4.0  # short replies are further apart than a whole batch, without anything being wrong
Step = tuple[list[int], list[list[int]]]  # a minibatch, and the micro-batches that it is computed in


class Update:
    def __init__(self, learner: Trainer, batch: Batch) -> None:
        self.learner, self.batch = learner, batch
        self.algorithm, self.config = learner.algorithm, learner.config
        self.samples = [batch.samples[index] for index in self.algorithm.select(batch.samples)]
        self.sequences = [Scored.of(sample) for sample in self.samples]
        self.data = lay_out(self.samples, learner.device)
        recipe = self.algorithm.config
        watched = recipe.max_kl is not None and recipe.epochs * recipe.minibatches > 1
        # A policy gradient that needs no parent tells its distance from the policy that it takes ratios to.
        watched = watched and not isinstance(self.algorithm, PolicyGradient)
        self.scores_parent = self.algorithm.needs_parent or watched
        self.watch = Stopwatch()

    def make(self) -> UpdateReport:
        """Every rank comes to the same report, and to the same refusal."""
        updates = self.learner.progress.updates
        epochs = self._epochs(torch.Generator().manual_seed(self.config.seed + updates))
        first = [group for _, groups in epochs[0] for group in groups]
        self._score(first)
        self.algorithm.before_train_step(updates, self.data)
        told: list[dict[str, float]] = []
        with self.watch.measure("update_actor"):
            for minibatch, groups in chain.from_iterable(epochs):
                figures = self._learn(minibatch, groups)
                if not told:
                    self._refuse_foreign(figures["rollout_corr/mismatch"])
                elif self._too_far(figures):
                    break
                figures["actor/lr"] = self.learner.optimizer.rate
                figures["actor/grad_norm"] = self.learner.optimizer.step()
                if self.learner.critic_optimizer:
                    figures["critic/grad_norm"] = self.learner.critic_optimizer.step()
                told.append(figures)
        if not any(figures["actor/grad_norm"] for figures in told):
            raise NoVariance("The gradient of every step is zero: nothing can be learned from this batch.")
        steps = sum(len(epoch) for epoch in epochs)
        metrics = describe(self.batch.samples, self.data) | mean_of_steps(told, len(epochs[0]))
        metrics["training/steps"], metrics["training/stopped_early"] = len(told), float(len(told) < steps)
        with self.watch.measure("guard"):
            metrics |= moved(self, first)
        used = {sample.turn_id for sample in self.samples}
        left_out = tuple(sample.turn_id for sample in self.batch.samples if sample.turn_id not in used)
        report = UpdateReport(self.batch.id, updates + 1, metrics | self.watch.metrics | self._pace(), left_out)
        self.algorithm.after_train_step(updates, report)
        report.metrics.update(self.algorithm.get_metrics())
        return report

    def _epochs(self, order: torch.Generator) -> list[list[Step]]:
        recipe, together = self.algorithm.config, self.algorithm.together(self.samples)
        return [
            [
                (minibatch, self._plan(minibatch, together))
                for minibatch in minibatches(self.samples, together, recipe.minibatches, order)
            ]
            for _ in range(recipe.epochs)
        ]

    def _plan(self, minibatch: list[int], together: Sequence[Sequence[int]]) -> list[list[int]]:
        place = {index: number for number, index in enumerate(minibatch)}
        groups = plan(
            [self.sequences[index] for index in minibatch],
            self.config.microbatch_tokens,
            self.learner.num_ranks,
            together=[[place[index] for index in one] for one in together if one[0] in place],
            packing=self.packing,
        )
        return [[minibatch[number] for number in group] for group in groups]

    @property
    def packing(self) -> Packing:
        """Trees need a mask of their own, which not every model takes."""
        if self.config.packing == "tree" and not self.learner.policy.masks_allowed:
            return "chain"
        return self.config.packing

    def _score(self, groups: list[list[int]]) -> None:
        """In the first epoch's own micro-batches: then the first step's log-probs are the parent's, bit for bit."""

        def scored(hat: ModelRole) -> Tensor:
            return score_all(
                self.learner.policy,
                self.sequences,
                groups,
                self.data.mask_BT,
                rank=self.learner.rank,
                num_ranks=self.learner.num_ranks,
                hat=hat,
                packing=self.packing,
            )

        if self.scores_parent:
            with self.watch.measure("parent"):
                self.data.parent_BT = scored("actor")
            self._refuse_foreign_turns(self.data.parent_BT)
        if self.algorithm.needs_reference:
            with self.watch.measure("reference"):
                self.data.reference_BT = scored("reference")
        if self.algorithm.needs_critic:
            with self.watch.measure("values"):
                self.data.values_BT = scored("critic")

    def _refuse_foreign(self, gap: float) -> None:
        if not gap <= self.config.max_mismatch:
            raise ForeignSamples(
                f"Recorded log-probs are {gap:.3g} from the parent's in the mean of all tokens "
                f"(bound {self.config.max_mismatch:g}): other weights spoke, or at another temperature."
            )

    def _refuse_foreign_turns(self, parent_BT: Tensor) -> None:
        """One turn among many would not show in the mean. Only turns of the parent itself are held to this."""
        apart_BT = (parent_BT - self.data.rollout_BT).abs() * self.data.mask_BT
        self._refuse_foreign(float(apart_BT.sum() / self.data.mask_BT.sum()))
        gap_B = apart_BT.sum(-1) / self.data.mask_BT.sum(-1)
        for sample, gap in zip(self.samples, gap_B.tolist(), strict=True):
            if sample.lag == 0 and not gap <= SEQUENCE_SLACK * self.config.max_mismatch:
                raise ForeignSamples(
                    f"Turn {sample.turn_id}: recorded log-probs are {gap:.3g} a token from the parent's "
                    f"(bound {SEQUENCE_SLACK * self.config.max_mismatch:g}): other weights spoke."
                )

    def _learn(self, minibatch: list[int], groups: list[list[int]]) -> dict[str, float]:
        """Leave the minibatch's gradient on the parameters; return its metrics, the same on every rank."""
        tally = MetricAccumulator()
        hats: tuple[ModelRole, ...] = ("actor", "critic") if self.algorithm.needs_critic else ("actor",)
        for group in groups[self.learner.rank :: self.learner.num_ranks]:
            # An empty micro-batch still meets the other ranks, and adds 0: any whole one stands in for it.
            present = group or min((one for one in groups if one), key=len)
            for hat in hats:
                tally.add(self._backward(hat, minibatch, present, counts=bool(group)))
        return tally.totals(self.learner.num_ranks)

    def _backward(self, hat: ModelRole, minibatch: list[int], rows: list[int], *, counts: bool) -> dict[str, Tensor]:
        scored_BT = score(
            self.learner.policy,
            [self.sequences[index] for index in rows],
            self.data.mask_BT[rows],
            hat=hat,
            packing=self.packing,
        )
        part = micro_batch(self.data, minibatch, rows, scored_BT)
        if hat == "actor":
            told = self._distances(part) | self.algorithm.compute_loss(part)
        else:
            told = dict(self.algorithm.compute_value_loss(part))
        loss = told.pop("loss") * float(counts)
        (loss * self.learner.num_ranks).backward()  # FSDP averages over the ranks
        return {name: value.detach() * float(counts) for name, value in told.items()}

    def _distances(self, part: MicroBatch) -> dict[str, Tensor]:
        """How far the policy is from those who spoke and, where it was scored, from its parent; a token."""
        now_BT, mask_BT = part.logprobs_BT.detach(), part.mask_BT

        def token_mean(x_BT: Tensor) -> Tensor:
            return aggregate(x_BT, mask_BT, "token-mean", denominator=part.num_tokens)

        told = {"rollout_corr/mismatch": token_mean((now_BT - part.cut(self.data.rollout_BT)).abs())}
        if self.data.parent_BT is not None:
            told["actor/ppo_kl_k3"] = token_mean(kl_estimate(part.cut(self.data.parent_BT), now_BT, "k3"))
        return told

    def _too_far(self, figures: dict[str, float]) -> bool:
        """Stop before a step that would start outside the trust region. The first step is always made."""
        bound = self.algorithm.config.max_kl
        if bound is None or not figures.get("actor/ppo_kl_k3", 0.0) > bound:
            return False
        for optimizer in (self.learner.optimizer, self.learner.critic_optimizer):
            if optimizer:
                optimizer.forget()
        return True

    def _pace(self) -> dict[str, float]:
        seconds = sum(self.watch.metrics.values())
        tokens = sum(sample.num_tokens for sample in self.samples)
        return {"perf/time_per_step": seconds, "perf/throughput": tokens / seconds}
