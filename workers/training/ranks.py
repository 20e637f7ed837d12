"""The ranks that learn together: who says what comes next, and how long one may keep the others waiting."""

import logging
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from alignment.config.algorithm import AlgorithmConfig
from alignment.config.trainer import LoRAConfig, OptimConfig, RewardModelConfig, TrainerConfig
from alignment.errors import AlignmentError
from alignment.models.loading import pick_device
from alignment.reward_model.dataset import PreferenceDataset
from alignment.reward_model.model import RewardModel
from alignment.trainer.trainer import Trainer
from alignment.types import Batch
from app.core.settings import Settings
from workers import base_model

log = logging.getLogger("attune.trainer")
PATIENCE_SECONDS = 300.0


class Broken(Exception):
    """An update ended in a way that the ranks did not agree on: they stand at different places, and must start anew."""


def trainer_config(settings: Settings) -> TrainerConfig:
    """The deployment's recipe: its general settings hold where the algorithm's own name none."""
    algorithm = settings.algorithm
    general: dict[str, Any] = {} if settings.kl_coef is None else {"kl_coef": settings.kl_coef}
    if settings.length_range:
        general |= dict(zip(("shortest", "longest"), settings.length_range, strict=True))
    fields = type(algorithm).model_fields.keys() - algorithm.model_fields_set
    algorithm = algorithm.model_copy(update={name: value for name, value in general.items() if name in fields})
    algorithm = _guarded(algorithm, settings.kl_guard)
    return TrainerConfig(
        algorithm=algorithm,
        lora=LoRAConfig() if settings.adaptation == "lora" else None,
        optim=OptimConfig(lr=_rate(settings)),
        reward_model=RewardModelConfig(lr=settings.learning_rate),
        seed=settings.seed,
        dtype=settings.dtype,
    )


def _rate(settings: Settings) -> float:
    """Full weights take a tenth of an adapter's, unless a rate was set."""
    asked = settings.adaptation == "lora" or "learning_rate" in settings.model_fields_set
    return settings.learning_rate if asked else settings.learning_rate / 10


def _guarded(algorithm: AlgorithmConfig, guard: float) -> AlgorithmConfig:
    """An update makes no step from beyond the guard, and what steers the KL aims below it. Raises ValueError."""
    told = getattr(algorithm, "max_kl", None)
    control = getattr(algorithm, "kl_control", None)
    if control is not None and control.target >= guard:
        raise ValueError(f"kl_control aims at {control.target:g}, which is not below ATTUNE_KL_GUARD ({guard:g})")
    if "max_kl" not in type(algorithm).model_fields or (told is not None and told <= guard):
        return algorithm
    return algorithm.model_copy(update={"max_kl": guard})


def join(device: torch.device, patience: float) -> None:
    """Join torchrun's group before the learner does, whose collectives would wait for torch's half an hour."""
    if not dist.is_torchelastic_launched():
        return
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=patience))


class Group:
    """The ranks that live on together. Rank 0 says what to do next; the others wait for it.

    Policies of one base model take turns: the trunk stays, an adapter with its optimizer and its baseline comes from
    the parent's directory and goes to the next version's.
    """

    def __init__(self, settings: Settings, patience: float = PATIENCE_SECONDS) -> None:
        self.settings = settings
        config = trainer_config(settings)
        join(pick_device(config.device), patience)
        self.learner = Trainer(base_model.folder(settings.model), config)
        self._bell = self._orders = None
        if self.learner.num_ranks > 1:
            # Ranks other than 0 wait at the bell for as long as no batch comes. Nowhere else does one wait for ever:
            # an order may be too large for the buffers of a rank that has stopped reading.
            self._bell = dist.new_group(backend="gloo", timeout=timedelta(days=365))
            self._orders = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        self.at: Path | str | None = "nowhere"  # the version directory the learner stands on; None is version 0
        self.reward_model = RewardModel(self.learner)
        self.judging: Path | None = None  # the directory of the reward model that is worn

    @property
    def leads(self) -> bool:
        return self.learner.rank == 0

    def tell(self, order: dict[str, Any] | None) -> dict[str, Any] | None:
        """From rank 0 to all. None means: stop."""
        box = [order]
        if self._orders is not None:
            dist.broadcast(torch.zeros(1), src=0, group=self._bell)
            dist.broadcast_object_list(box, src=0, group=self._orders)
        return box[0]

    def follow(self) -> None:
        """Ranks other than 0: do as told until told to stop."""
        while (order := self.tell(None)) is not None:
            with suppress(AlignmentError):  # every rank refuses alike; rank 0 puts it on record
                self.obey(order)

    def lead(self, order: dict[str, Any]) -> dict[str, Any]:
        """Rank 0: one order, on every rank. Raises AlignmentError, on which all agree, or Broken."""
        try:
            self.tell(order)
            return self.obey(order)
        except AlignmentError:
            raise
        except Exception as error:  # out of memory, a rank that has gone, one that did not answer in time
            raise Broken(f"{type(error).__name__}: {error}") from error

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """An order is an update unless it says what else to `do`."""
        orders = {"update": self.update, "begin": self.begin, "advance": self.advance, "finish": self.finish}
        return (orders | {"score": self.score})[order.get("do", "update")](order)

    def begin(self, order: dict[str, Any]) -> dict[str, Any]:
        """A new reward model, in parts: between them there may be updates, which leave its hat alone."""
        self.judging = None
        return {"steps": self.reward_model.begin(PreferenceDataset.from_bytes(order["words"]))}

    def advance(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"over": self.reward_model.advance(order["steps"])}

    def finish(self, order: dict[str, Any]) -> dict[str, Any]:
        """Written only if it agrees with people. The learner stays where it is."""
        metrics = self.reward_model.finish().metrics
        agreement, least = metrics.get("agreement", 0.0), order["min_agreement"]
        if agreement < least:
            reason = f"it agrees with people in {agreement:.0%} of the words that were held out; {least:.0%} is needed"
            return {"refused": reason, "metrics": metrics}
        export = self.reward_model.export(Path(order["directory"]), order["lineage"])
        self.judging = export.path
        told = {"path": str(export.path), "manifest_sha256": export.manifest_sha256}
        return {"refused": None, "metrics": metrics, **told}

    def score(self, order: dict[str, Any]) -> dict[str, Any]:
        """What the reward model in a directory says of replies."""
        model = Path(order["model"])
        if self.judging != model:
            self.judging = None
            self.reward_model.restore(model, order["manifest_sha256"])
            self.judging = model
        return {"values": self.reward_model.score(PreferenceDataset.from_bytes(order["replies"]).replies)}

    def update(self, order: dict[str, Any]) -> dict[str, Any]:
        """One update on every rank, from the parent's state to a new version's directory."""
        parent = Path(order["parent"]) if order["parent"] else None
        started = time.perf_counter()
        if self.at != parent:
            self.at = "nowhere"
            self.learner.restore(parent)
            self.at = parent
        restored = time.perf_counter()
        self.at = "nowhere"  # until the new version is written, what stands in memory has no name
        batch = Batch.from_bytes(order["batch"])
        report = self.learner.update(batch)
        updated = time.perf_counter()
        probe = self.learner.probe()
        exporting = time.perf_counter()
        export = self.learner.export(Path(order["directory"]), order["lineage"])
        self.at = Path(order["directory"])
        return {
            "path": export.path,
            "full": self.learner.config.lora is None,
            "manifest_sha256": export.manifest_sha256,
            "probe": {"ids": probe.ids, "logprobs": probe.logprobs},
            "metrics": report.metrics,
            "left_out": report.left_out,
            "timings": {
                "restore": restored - started,
                "update": updated - restored,
                "export": time.perf_counter() - exporting,
            },
        }


def part() -> NoReturn:
    """End this rank at once, without a word to the others: torchrun ends them too, and starts the group anew."""
    log.exception("this rank ends, and with it the group")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
