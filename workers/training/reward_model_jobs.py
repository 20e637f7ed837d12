"""What rank 0 has the group do between batches: score what reward models are asked, and fit them."""

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
from workers.training.ranks import Broken, Group

log = logging.getLogger("attune.trainer")


SLICE_SECONDS = 1.0  # of a fit, between which batches are trained: they come first


def teach(group: Group, house: WorkerContext, batches: Callable[[], Any]) -> bool:
    """One piece of each, if there is any: replies that come all the time must not keep a fit waiting. False when there
    is none. `batches` trains those that wait. Raises Broken."""
    asked = house.run(reward_model.claim(house.db, house.owner, house.settings))
    if asked is not None:
        score(group, house, asked)
    claimed = house.run(reward_models.claim(house.db, house.owner, house.settings))
    if claimed is not None:
        fit(group, house, claimed, batches)
    return asked is not None or claimed is not None


def score(group: Group, house: WorkerContext, claimed: reward_model.Claimed) -> None:
    """One forward for all of it. A model whose files are not what was sealed is silenced."""
    values: dict[str, float] = {}
    why, began = "", time.perf_counter()
    if claimed.replies:
        model = claimed.model
        assert model is not None
        order = {
            "do": "score",
            "model": model.path,
            "manifest_sha256": model.manifest_sha256,
            "replies": replies_to_bytes(claimed.replies),
        }
        with Heartbeat(house.settings, Judgement, claimed.fences):
            try:
                told = group.lead(order)["values"]
                values = {reply.turn_id: value for reply, value in zip(claimed.replies, told, strict=True)}
            except DamagedAdapter as damage:
                why = str(damage)
                house.run(reward_models.disable(house.db, claimed.policy_id, model.id, TRAINER, why))
                log.warning("reward model %s: %s", model.id, damage)
    seconds = time.perf_counter() - began
    house.run(reward_model.settle(house.db, house.settings, claimed, values, seconds, why=why))


def fit(group: Group, house: WorkerContext, claimed: reward_models.Claimed, batches: Callable[[], Any]) -> None:
    log.info("%s: %d words about %d replies", claimed.name, len(claimed.words), len(claimed.words.replies))
    order = {
        "do": "finish",
        "directory": str(claimed.directory(house.settings)),
        "min_agreement": claimed.min_agreement,
        "lineage": {"reward_model": claimed.id, "name": claimed.name, "base_model": house.settings.model},
    }
    try:
        with Heartbeat(house.settings, RewardModel, {claimed.id: claimed.fence}):
            try:
                group.lead({"do": "begin", "words": claimed.words.to_bytes()})
                advance(group, batches)
                result = group.lead(order)
            except AlignmentError as refusal:
                result = {"refused": f"{type(refusal).__name__}: {refusal}", "metrics": {}}
            except Broken as reason:
                with suppress(SQLAlchemyError):  # the lease runs out just as well without it
                    house.run(reward_models.note_failure(house.db, claimed, str(reason)))
                raise
        if (refused := result.pop("refused")) is not None:
            house.run(reward_models.refuse(house.db, claimed, refused, result["metrics"]))
            log.warning("%s: %s", claimed.name, refused)
        else:
            log.info("%s %s", claimed.name, house.run(reward_models.commit(house.db, claimed, **result)))
    except leases.LeaseLost as late:
        log.warning("%s; %s is thrown away", late, claimed.name)


def advance(group: Group, batches: Callable[[], Any]) -> None:
    """All steps of the fit, a slice at a time."""
    steps, over = 1, False
    while not over:
        began = time.perf_counter()
        over = group.lead({"do": "advance", "steps": steps})["over"]
        steps = max(1, min(2 * steps, int(steps * SLICE_SECONDS / max(1e-6, time.perf_counter() - began))))
        batches()
