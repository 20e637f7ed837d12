"""The training loop of rank 0: train batches on all ranks and record the new versions.

Between batches it scores the replies that wait for a reward and fits reward models, about SLICE_SECONDS at a time.
`workers.trainer` starts it.
"""

import logging
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from alignment.config.trainer import TrainerConfig
from alignment.errors import AlignmentError, DamagedAdapter, ForeignSamples, NothingToCompare, NoVariance
from app.core.leases import LeaseLost
from app.core.request_log import log_fields
from app.core.settings.derived import trainer_config
from app.models import Batch, Judgement, Policy, RewardModel
from app.policies.overrides import effective_settings
from workers.context import WorkerContext
from workers.judging import reward_model_source
from workers.judging.reward_model_source import ScoringJob
from workers.queue.leased_job import Heartbeat
from workers.stage_metrics import UPDATE_SECONDS, UPDATES
from workers.training import batch_claims, batches, reward_model_fits
from workers.training.batch_claims import ClaimedBatch
from workers.training.commands import AdvanceFit, BeginFit, FinishFit, ScoreReplies, Update
from workers.training.ranks import UNKNOWN, RankGroup, RankGroupFailed
from workers.training.results import FittedRewardModel
from workers.training.reward_model_fits import ClaimedFit
from workers.training.trackers import Trackers

log = logging.getLogger("attune.trainer")
SLICE_SECONDS = 1.0  # of a fit; the batches that wait are trained between slices


@dataclass(frozen=True)
class TrainingLoop:
    """What rank 0 does with its group. Every method raises RankGroupFailed if a rank failed."""

    group: RankGroup
    context: WorkerContext
    trackers: Trackers

    def run_pending_work(self) -> int:
        """Train every open batch, and run the reward model jobs between them. Return how many jobs were run."""
        num_jobs = self.train_open_batches()
        while self.run_reward_model_jobs():
            num_jobs += 1 + self.train_open_batches()
        return num_jobs

    def train_open_batches(self) -> int:
        """Train every open batch. Return how many there were."""
        context, count = self.context, 0
        while (claimed := context.run(batch_claims.claim(context.db, context.owner, context.settings))) is not None:
            try:
                with log_fields(batch=claimed.row.id, policy=claimed.policy.name, version=claimed.adapter_name):
                    self.train_batch(claimed)
            except LeaseLost as error:  # the head moved, or its samples were erased
                log.warning("%s; %s is discarded", error, claimed.adapter_name)
                self.group.loaded_version_dir = UNKNOWN
                UPDATES.labels("void").inc()
            count += 1
        return count

    def train_batch(self, claimed: ClaimedBatch) -> None:
        """Run one update and record the version, or why there is none. Raises LeaseLost."""
        context, batch_id, name = self.context, claimed.row.id, claimed.adapter_name
        log.info("batch %s: %d samples → %s", batch_id, len(claimed.batch.samples), name)
        lineage = {
            "version": name,
            "parent": claimed.parent.id,
            "batch": batch_id,
            "base_model": context.settings.model,
        }
        parent_path = claimed.parent.adapter_path
        with Heartbeat(context.settings, Batch, {batch_id: claimed.row.fence}):
            try:
                trained = self.group.run(
                    Update(
                        policy_id=claimed.policy.id,
                        config=self._trainer_config(claimed.policy),
                        parent=Path(parent_path) if parent_path else None,
                        parent_sha256=claimed.parent.manifest_sha256,
                        batch=claimed.batch,
                        directory=claimed.directory(context.settings),
                        lineage=lineage,
                        kl_target_factor=0.5**claimed.policy.kl_alarms,  # smaller after each rejection in a row
                    )
                )
            except DamagedAdapter as error:
                context.run(batches.halt_on_damaged_parent(context.db, claimed, str(error)))
                log.error("batch %s: training of %s is halted: %s", batch_id, claimed.policy.name, error)
                UPDATES.labels("failed").inc()
                return
            except (NoVariance, NothingToCompare) as error:
                context.run(batches.refuse(context.db, claimed, f"{type(error).__name__}: {error}"))
                log.info("batch %s: %s", batch_id, error)
                UPDATES.labels("refused").inc()
                return
            except ForeignSamples as error:
                reason = f"{type(error).__name__}: {error}"
                if error.turns:  # without them nothing is left to compare
                    context.run(batches.refuse(context.db, claimed, reason, error.turns))
                else:
                    context.run(batches.quarantine(context.db, claimed, reason))
                UPDATES.labels("refused" if error.turns else "quarantined").inc()
                log.warning("batch %s: %s", batch_id, error)
                return
            except AlignmentError as error:
                context.run(batches.quarantine(context.db, claimed, f"{type(error).__name__}: {error}"))
                UPDATES.labels("quarantined").inc()
                log.warning("batch %s: %s", batch_id, error)
                return
            except RankGroupFailed as error:
                with suppress(SQLAlchemyError):  # not needed for a retry: the lease expires without it
                    context.run(batches.record_failed_attempt(context.db, claimed, str(error)))
                raise
        is_committed = context.run(batches.commit(context.db, claimed, trained))
        log.info("%s %s", name, "trained" if is_committed else "is void: the head moved")
        UPDATES.labels("trained" if is_committed else "void").inc()
        for phase, seconds in asdict(trained.timings).items():
            UPDATE_SECONDS.labels(phase).observe(seconds)
        if is_committed:
            metrics = batches.update_metrics(claimed, trained)
            self.trackers.log(claimed.policy.name, name, claimed.number, batch_id, metrics)

    def run_reward_model_jobs(self) -> bool:
        """Run at most one scoring job and one fit, so that neither delays the other. Return False if there was none."""
        arguments = self.context.db, self.context.owner, self.context.settings
        scoring_job = self.context.run(reward_model_source.claim_scoring_job(*arguments))
        if scoring_job is not None:
            self.score_replies(scoring_job)
        claimed_fit = self.context.run(reward_model_fits.claim(*arguments))
        if claimed_fit is not None:
            self.fit_reward_model(claimed_fit)
        return scoring_job is not None or claimed_fit is not None

    def score_replies(self, job: ScoringJob) -> None:
        """Score all replies of the job in one command. A reward model with damaged files is disabled."""
        context, model = self.context, job.reward_model
        scores: dict[str, float] = {}
        reason, started = "", time.perf_counter()
        if job.replies:
            assert model is not None and model.path is not None and model.manifest_sha256 is not None
            command = ScoreReplies(Path(model.path), model.manifest_sha256, job.replies)
            fences = {judgement.id: judgement.fence for judgement in job.judgements}
            with Heartbeat(context.settings, Judgement, fences):
                try:
                    values = self.group.run(command)
                    scores = {reply.turn_id: value for reply, value in zip(job.replies, values, strict=True)}
                except DamagedAdapter as error:
                    reason = str(error)
                    context.run(reward_model_fits.disable(context.db, job.policy_id, model.id, reason))
                    log.warning("reward model %s: %s", model.id, error)
        seconds = time.perf_counter() - started
        context.run(
            reward_model_source.record_scores(context.db, context.settings, job, scores, seconds, reason=reason)
        )

    def fit_reward_model(self, claimed: ClaimedFit) -> None:
        """Fit a reward model and record the result."""
        context, dataset = self.context, claimed.dataset
        log.info("%s: %d labels of %d replies", claimed.name, len(dataset), len(dataset.replies))
        lineage = {"reward_model": claimed.row.id, "name": claimed.name, "base_model": context.settings.model}
        fitted: FittedRewardModel | None = None
        refusal: str | None = None
        try:
            with Heartbeat(context.settings, RewardModel, {claimed.row.id: claimed.row.fence}):
                try:
                    fitted = self._fit(claimed, lineage)
                    refusal = fitted.refusal
                except AlignmentError as error:
                    refusal = f"{type(error).__name__}: {error}"
                except RankGroupFailed as error:
                    with suppress(SQLAlchemyError):  # not needed for a retry: the lease expires without it
                        context.run(reward_model_fits.record_failed_attempt(context.db, claimed, str(error)))
                    raise
            if refusal is not None:
                context.run(reward_model_fits.refuse(context.db, claimed, refusal, fitted))
                log.warning("%s: %s", claimed.name, refusal)
            elif fitted is not None:
                state = context.run(reward_model_fits.commit(context.db, claimed, fitted))
                log.info("%s %s", claimed.name, state)
        except LeaseLost as error:
            log.warning("%s; %s is discarded", error, claimed.name)

    def _fit(self, claimed: ClaimedFit, lineage: dict[str, str]) -> FittedRewardModel:
        config = self._trainer_config(claimed.policy).reward_model
        self.group.run(BeginFit(claimed.dataset, config, claimed.previous))
        self._run_fit_steps()
        directory = claimed.directory(self.context.settings)
        return self.group.run(FinishFit(directory, claimed.min_agreement, lineage))

    def _trainer_config(self, policy: Policy) -> TrainerConfig:
        return trainer_config(effective_settings(policy, self.context.settings))

    def _run_fit_steps(self) -> None:
        """Run all steps of the fit, about SLICE_SECONDS at a time."""
        steps, is_done = 1, False
        while not is_done:
            started = time.perf_counter()
            is_done = self.group.run(AdvanceFit(steps))
            elapsed = max(1e-6, time.perf_counter() - started)
            steps = max(1, min(2 * steps, int(steps * SLICE_SECONDS / elapsed)))
            self.train_open_batches()
