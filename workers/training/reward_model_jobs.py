"""The reward model jobs that rank 0 runs between batches: score replies that wait for a reward, and fit models."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from alignment.errors import AlignmentError, DamagedAdapter
from alignment.reward_model.dataset import replies_to_bytes
from app.core import leases
from app.models import Judgement, RewardModel
from app.training.reward_models.service import TRAINER
from workers.context import WorkerContext
from workers.judging.sources import reward_model
from workers.queue.heartbeat import Heartbeat
from workers.training import reward_models
from workers.training.ranks import RankGroup, RankGroupFailed

log = logging.getLogger("attune.trainer")
SLICE_SECONDS = 1.0  # of a fit; the batches that wait are trained between slices


def run_next_jobs(group: RankGroup, context: WorkerContext, train_open_batches: Callable[[], Any]) -> bool:
    """Run at most one scoring job and one fit, so that neither delays the other. Return False if there was none.

    Raises:
        RankGroupFailed: a rank failed.
    """
    scoring_job = context.run(reward_model.claim_scoring_job(context.db, context.owner, context.settings))
    if scoring_job is not None:
        score_replies(group, context, scoring_job)
    claimed_fit = context.run(reward_models.claim(context.db, context.owner, context.settings))
    if claimed_fit is not None:
        fit_reward_model(group, context, claimed_fit, train_open_batches)
    return scoring_job is not None or claimed_fit is not None


def score_replies(group: RankGroup, context: WorkerContext, job: reward_model.ScoringJob) -> None:
    """Score all replies of the job in one command. A reward model with damaged files is disabled."""
    scores: dict[str, float] = {}
    reason, started = "", time.perf_counter()
    if job.replies:
        model = job.model
        assert model is not None
        command = {
            "action": "score",
            "model": model.path,
            "manifest_sha256": model.manifest_sha256,
            "replies": replies_to_bytes(job.replies),
        }
        with Heartbeat(context.settings, Judgement, job.fences):
            try:
                values = group.run(command)["scores"]
                scores = {reply.turn_id: value for reply, value in zip(job.replies, values, strict=True)}
            except DamagedAdapter as error:
                reason = str(error)
                context.run(reward_models.disable(context.db, job.policy_id, model.id, TRAINER, reason))
                log.warning("reward model %s: %s", model.id, error)
    seconds = time.perf_counter() - started
    context.run(reward_model.record_scores(context.db, context.settings, job, scores, seconds, reason=reason))


def fit_reward_model(
    group: RankGroup,
    context: WorkerContext,
    claimed: reward_models.ClaimedFit,
    train_open_batches: Callable[[], Any],
) -> None:
    """Fit a reward model and record the result. Raise RankGroupFailed if a rank failed."""
    log.info("%s: %d labels of %d replies", claimed.name, len(claimed.dataset), len(claimed.dataset.replies))
    finish_command = {
        "action": "finish_fit",
        "directory": str(claimed.directory(context.settings)),
        "min_agreement": claimed.min_agreement,
        "lineage": {"reward_model": claimed.id, "name": claimed.name, "base_model": context.settings.model},
    }
    try:
        with Heartbeat(context.settings, RewardModel, {claimed.id: claimed.fence}):
            try:
                group.run({"action": "begin_fit", "dataset": claimed.dataset.to_bytes()})
                run_fit_steps(group, train_open_batches)
                result = group.run(finish_command)
            except AlignmentError as error:
                result = {"refusal": f"{type(error).__name__}: {error}", "metrics": {}}
            except RankGroupFailed as error:
                with suppress(SQLAlchemyError):  # not needed for a retry: the lease expires without it
                    context.run(reward_models.record_failed_attempt(context.db, claimed, str(error)))
                raise
        if (refusal := result.pop("refusal")) is not None:
            context.run(reward_models.refuse(context.db, claimed, refusal, result["metrics"]))
            log.warning("%s: %s", claimed.name, refusal)
        else:
            state = context.run(reward_models.commit(context.db, claimed, **result))
            log.info("%s %s", claimed.name, state)
    except leases.LeaseLost as error:
        log.warning("%s; %s is thrown away", error, claimed.name)


def run_fit_steps(group: RankGroup, train_open_batches: Callable[[], Any]) -> None:
    """Run all steps of the fit, about SLICE_SECONDS at a time."""
    steps, is_done = 1, False
    while not is_done:
        started = time.perf_counter()
        is_done = group.run({"action": "advance_fit", "steps": steps})["is_done"]
        elapsed = max(1e-6, time.perf_counter() - started)
        steps = max(1, min(2 * steps, int(steps * SLICE_SECONDS / elapsed)))
        train_open_batches()
