"""One update: score a batch, compute advantages, and make the optimizer steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from torch import Tensor

from alignment.algorithms.base import RLAlgorithm, prepare_step
from alignment.config.trainer import TrainerConfig
from alignment.data.collate import collate
from alignment.data.corrections import TextTokenizer
from alignment.data.episodes import share_within_episodes
from alignment.data.micro_batches import ScoredSequence
from alignment.errors import NonFiniteUpdate, NothingToCompare, NoVariance, StepTooLarge
from alignment.models import parallel
from alignment.models.base_model import ModelRole
from alignment.models.policy_model import PolicyModel
from alignment.trainer.correction_part import PREFIX, make_correction_part, make_pairs
from alignment.trainer.foreign_samples import check_mismatch, check_token_ids
from alignment.trainer.gradient_accumulation import PARENT_KL, GradientAccumulator
from alignment.trainer.loss_part import LossPart
from alignment.trainer.metrics import Stopwatch, average_steps, batch_metrics
from alignment.trainer.optimizer import Optimizer
from alignment.trainer.scoring import score_micro_batches
from alignment.trainer.trust_region import TrustRegion
from alignment.trainer.update_kl import UpdateKL, split_held_out
from alignment.types import Batch, ReturnReason, Sample, UpdateReport


@dataclass(frozen=True)
class TrainContext:
    """What every update of a trainer works with, until the trainer is configured for another policy.

    `optimizers` are those of the actor and, if there is one, of the critic.
    """

    policy: PolicyModel
    algorithm: RLAlgorithm
    optimizers: Mapping[ModelRole, Optimizer]
    config: TrainerConfig
    tokenizer: TextTokenizer


class Update:
    """One update from one batch. All ranks build it with the same batch and call `run`."""

    def __init__(self, context: TrainContext, batch: Batch, step: int, kl_target_factor: float = 1.0) -> None:
        """Select and collate the samples. `step` is the number of updates that were made before this one.

        `kl_target_factor` multiplies the KL target of the configuration.

        Raises NoVariance or NothingToCompare if the algorithm cannot use the batch, ForeignSamples if it has foreign
        token ids.
        """
        self.policy, self.algorithm = context.policy, context.algorithm
        self.optimizers, self.config = context.optimizers, context.config
        self.batch, self.step = batch, step
        self.returned: dict[str, ReturnReason] = {}  # turns to learn from in a later update
        target = self.config.kl_target
        self.kl_target = None if target is None else kl_target_factor * target
        check_token_ids(batch.samples, self.policy.num_token_ids)
        self.pairs, self.unused_texts = make_pairs(batch, context.tokenizer, self.policy)
        self.corrected = {pair.correction.sample.turn_id for pair in self.pairs}
        self.by_reward = share_within_episodes(self._select())
        selected = {sample.turn_id for sample in self.by_reward}
        rest = (sample for sample in batch.samples if sample.turn_id not in selected)
        self.samples = [*self.by_reward, *(sample for sample in rest if sample.turn_id in self.corrected)]
        self.sequences = [ScoredSequence.from_sample(sample) for sample in self.samples]
        self.data = collate(self.samples, self.policy.device)
        settings = self.algorithm.config
        self.enforces_max_kl = settings.max_kl is not None and settings.epochs * settings.minibatches > 1
        self.scores_old_logprobs = (
            self.algorithm.needs_old_logprobs
            or bool(self.pairs)
            or (self.enforces_max_kl and not self.algorithm.reports_update_kl)
        )
        self.gradient_accumulator = GradientAccumulator(
            self.policy, self.algorithm, tuple(self.optimizers), self.enforces_max_kl
        )
        self.is_fitted_on_batch = False
        self.stopwatch = Stopwatch()

    def run(self) -> UpdateReport:
        """Make the optimizer steps and return the report. Every rank returns or raises the same.

        Raises ForeignSamples, NoVariance or NonFiniteUpdate; the caller must then restore the policy.
        """
        whole = LossPart(self.algorithm, self.samples, self.sequences, self.data)
        self._plan(whole)
        self._score(whole.first_epoch)
        with self.stopwatch.measure("held_out"):
            update_kl, guard_kl = self._make_update_kl()
        trust_region = self._make_trust_region()
        parts = self._split(whole)
        for part in parts:
            prepare_step(part.algorithm, self.step, part.data)
        steps: list[dict[str, float]] = []
        planned = list(zip_longest(*(chain.from_iterable(part.epochs) for part in parts)))
        with self.stopwatch.measure("update_actor"):
            for minibatches in planned:
                metrics = self.gradient_accumulator.accumulate(parts, minibatches)
                if not steps and not self.scores_old_logprobs:
                    self._check_first_step(metrics["rollout_corr/mismatch"], whole.first_epoch)
                elif steps and self._exceeds_max_kl(metrics):
                    for optimizer in self.optimizers.values():
                        optimizer.zero_grad()
                    break
                metrics["actor/lr"] = self.optimizers["actor"].lr
                metrics |= {f"{role}/grad_norm": optimizer.step() for role, optimizer in self.optimizers.items()}
                steps.append(metrics)
        learned, skipped = set[str](), set[str]()
        for part, minibatches in zip(parts, zip(*planned[: len(steps)], strict=True), strict=True):
            stepped = {index for minibatch, _ in filter(None, minibatches) for index in minibatch}
            for index, sample in enumerate(part.samples):
                (learned if index in stepped else skipped).add(sample.turn_id)
        self.returned |= dict.fromkeys(sorted(skipped), ReturnReason.STOPPED)
        for turn_id in learned & self.returned.keys():  # by its correction
            del self.returned[turn_id]
        if not any(metrics["actor/grad_norm"] for metrics in steps):
            raise NoVariance("The gradient of every step is zero: nothing can be learned from this batch.")
        with self.stopwatch.measure("guard"):
            kl_metrics = self._fit_and_measure(update_kl, guard_kl, trust_region)
        report = self._make_report(steps, parts, len(planned), kl_metrics)
        self.algorithm.after_train_step(self.step, report)
        report.metrics.update(self.algorithm.get_metrics())
        return report

    def _make_report(
        self, steps: list[dict[str, float]], parts: Sequence[LossPart], num_planned: int, kl_metrics: dict[str, float]
    ) -> UpdateReport:
        steps_per_epoch = max(len(part.epochs[0]) for part in parts)
        metrics = batch_metrics(self.batch.samples, parts[0].data) | average_steps(steps, steps_per_epoch)
        used = {sample.turn_id for sample in self.samples}
        unused_turn_ids = tuple(
            sample.turn_id
            for sample in self.batch.samples
            if sample.turn_id not in used and sample.turn_id not in self.returned
        )
        metrics["training/samples_left_out"] = float(len(self.batch.samples) - len(self.samples))
        metrics["training/corrections"] = float(len(self.pairs))
        metrics["training/samples_returned"] = float(len(self.returned))
        metrics["training/steps"] = len(steps)
        metrics["training/stopped_early"] = float(len(steps) < num_planned)
        metrics |= kl_metrics
        metrics |= self.stopwatch.metrics | self._throughput_metrics()
        return UpdateReport(
            self.batch.id,
            self.step + 1,
            metrics,
            unused_turn_ids,
            returned_turns=self.returned,
            unused_texts=self.unused_texts,
        )

    def _make_trust_region(self) -> TrustRegion | None:
        if self.kl_target is None:
            return None
        parallel.reshard(self.policy)
        parameters = self.optimizers["actor"].parameters.values()
        return TrustRegion([parallel.local_tensor(parameter) for parameter in parameters], self.kl_target)

    def _make_update_kl(self) -> tuple[UpdateKL, UpdateKL | None]:
        """Return what the update's size is fitted by and, if there are enough held-out replies, what the guard reads.

        Where there are too few, the size is fitted by the replies of the batch, those nearest to the parent first.
        """
        search, guard = split_held_out(self.batch.held_out, self.policy.num_token_ids)
        self.is_fitted_on_batch = not search
        samples = search or sorted(self.samples, key=lambda sample: sample.lag)
        update_kl = UpdateKL(self.policy, samples, self.config.micro_batch_tokens)
        return update_kl, UpdateKL(self.policy, guard, self.config.micro_batch_tokens) if guard else None

    def _fit_and_measure(
        self, update_kl: UpdateKL, guard_kl: UpdateKL | None, trust_region: TrustRegion | None
    ) -> dict[str, float]:
        """Scale the update to the KL target, and adapt the learning rate. Return the KL of the update with its metrics.

        An update whose KL is measured on its own batch is not enlarged: there the KL says little about other replies.

        Raises NonFiniteUpdate, or StepTooLarge if no fraction of the update fits.
        """

        def measure(replies: UpdateKL = update_kl) -> float:
            kl = replies.measure()
            parallel.reshard(self.policy)
            return kl

        metrics: dict[str, float] = {}
        if trust_region is None:
            kl = measure()
        else:
            fitted = trust_region.fit(measure, may_enlarge=not self.is_fitted_on_batch)
            kl, optimizer = fitted.kl, self.optimizers["actor"]
            if fitted.scale == 0:
                raise StepTooLarge("No fraction of the update has a KL within the target: the policy was not changed.")
            optimizer.lr_scale *= fitted.lr_factor(trust_region.target)
            metrics |= {
                "actor/step_scale": fitted.scale,
                "actor/lr_scale": optimizer.lr_scale,
                "actor/kl_measurements": float(fitted.measurements),
            }
        if not math.isfinite(kl):
            raise NonFiniteUpdate(f"The KL divergence of the update is {kl}; the policy was not changed.")
        kl_of_guard = kl if guard_kl is None else measure(guard_kl)
        if not math.isfinite(kl_of_guard):
            raise NonFiniteUpdate(f"The KL divergence on other replies is {kl_of_guard}; the policy was not changed.")
        return metrics | {
            "actor/fitted_kl": kl,
            "actor/fitted_tokens": float(update_kl.num_tokens),
            "actor/fitted_is_held_out": float(not self.is_fitted_on_batch),
            "guard/kl": kl_of_guard,
            "guard/tokens": float((guard_kl or update_kl).num_tokens),
            "guard/is_held_out": float(guard_kl is not None),
        }

    def _plan(self, part: LossPart) -> None:
        settings, config = part.algorithm.config, self.config
        seed = config.seed + self.step
        part.plan(settings.epochs, settings.minibatches, config.micro_batch_tokens, self.policy.packing, seed)

    def _select(self) -> list[Sample]:
        """Return the samples to learn from by their rewards.

        Where these have no contrast, those without a corrected text wait for a later update.
        """
        samples = self.batch.samples
        try:
            return [samples[index] for index in self.algorithm.select(samples)]
        except (NoVariance, NothingToCompare):
            if not self.pairs:
                raise
        waiting = (sample.turn_id for sample in samples if sample.turn_id not in self.corrected)
        self.returned |= dict.fromkeys(waiting, ReturnReason.NO_CONTRAST)
        return []

    def _split(self, whole: LossPart) -> list[LossPart]:
        """Return the parts of the batch that are learned from with different losses."""
        if not self.pairs:
            return [whole]
        share = len(self.corrected) / len(self.samples)
        parts = []
        if self.by_reward:
            parts = [whole.take(range(len(self.by_reward)), self.algorithm, 1.0 - share)]
            self._plan(parts[0])
        part = make_correction_part(self.pairs, self.policy, self.algorithm.config, share)
        self._plan(part)
        with self.stopwatch.measure("corrections"):
            scores_BT = score_micro_batches(self.policy, part.sequences, part.first_epoch, part.data.response_mask_BT)
        part.data.old_logprobs_BT = part.data.rollout_logprobs_BT = scores_BT
        return [*parts, part]

    def _score(self, micro_batches: list[list[int]]) -> None:
        """Score the batch for every role that the algorithm needs.

        With the micro-batches of the first epoch, the old log-probs equal those of the first step bit for bit.
        """
        if self.scores_old_logprobs:
            with self.stopwatch.measure("old_log_prob"):
                self.data.old_logprobs_BT = self._score_role("actor", micro_batches)
            check_mismatch(self.samples, self.data, self.data.old_logprobs_BT, self.config)
        if self.algorithm.needs_reference:
            with self.stopwatch.measure("reference"):
                self.data.ref_logprobs_BT = self._score_role("reference", micro_batches)
        if self.algorithm.needs_critic:
            with self.stopwatch.measure("values"):
                self.data.values_BT = self._score_role("critic", micro_batches)

    def _check_first_step(self, mismatch: float, micro_batches: list[list[int]]) -> None:
        """Score and check the samples if the mismatch of the first step, of samples of all versions, is too large."""
        if not mismatch <= self.config.max_mismatch:
            check_mismatch(self.samples, self.data, self._score_role("actor", micro_batches), self.config)

    def _score_role(self, role: ModelRole, micro_batches: list[list[int]]) -> Tensor:
        return score_micro_batches(self.policy, self.sequences, micro_batches, self.data.response_mask_BT, role)

    def _exceeds_max_kl(self, metrics: dict[str, float]) -> bool:
        """Return whether the policy has left the trust region, so that no further step must start from it."""
        max_kl = self.algorithm.config.max_kl
        return max_kl is not None and any(
            value > max_kl for name, value in metrics.items() if name.removeprefix(PREFIX) == PARENT_KL
        )

    def _throughput_metrics(self) -> dict[str, float]:
        seconds = sum(self.stopwatch.metrics.values())
        tokens = sum(sample.num_tokens for sample in self.samples)
        return {"perf/time_per_step": seconds, "perf/throughput": tokens / seconds}
