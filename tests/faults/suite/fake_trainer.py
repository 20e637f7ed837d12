"""A fake Trainer: fast and seeded, it reads and writes real version directories.

Each version contains the turns that it and its ancestors learned from, which shows whether a turn was used twice.
"""

import os
import random
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from alignment.config.trainer import TrainerConfig
from alignment.json_values import as_list
from alignment.trainer import checkpoint
from alignment.trainer.checkpoint import Checkpoint, Export, Progress, RoleState, export
from alignment.trainer.optimizer import MOMENTS
from alignment.trainer.scoring import Probe
from alignment.types import Batch, UpdateReport
from tests.support.adapters import adapter_spec
from tests.support.scripted_engine import logprob

PROBE = ((5, 9, 2), (7, 7, 8, 3))
UPDATE_SECONDS = "FAULTS_UPDATE_SECONDS"  # the longest duration of an update


class FakeTrainer:
    """Has the methods of alignment's Trainer that RankGroup calls."""

    rank, num_ranks = 0, 1

    def __init__(self, base_model: Path, config: TrainerConfig, *, any_algorithm: bool = False) -> None:
        assert config.lora is not None
        self.base_model, self.config = base_model, config
        self.adapter_spec = adapter_spec(base_model, config.lora)
        self.restore(None)

    def configure(self, config: TrainerConfig) -> None:
        self.config = config

    def restore(self, directory: Path | None, manifest_sha256: str | None = None) -> None:
        if directory is None:
            generator = torch.Generator().manual_seed(0)
            self.tensors = {
                name: torch.empty(shape).uniform_(-0.1, 0.1, generator=generator)
                for name, shape in self.adapter_spec.shapes.items()
            }
            self.progress = Progress(algorithm={"turns": []})
        else:
            content = checkpoint.read(directory, self.adapter_spec, manifest_sha256)
            self.tensors, self.progress = content.actor.tensors, content.progress

    def update(self, batch: Batch, kl_target_factor: float = 1.0) -> Any:
        seed = zlib.crc32(batch.id.encode())
        max_seconds = float(os.environ.get(UPDATE_SECONDS, "0.3"))
        time.sleep(random.Random(seed).uniform(max_seconds / 3, max_seconds))
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: 0.9 * tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.tensors.items()
        }
        turns = [*as_list(self.progress.algorithm["turns"]), *(sample.turn_id for sample in batch.samples)]
        self.progress = replace(self.progress, updates=self.progress.updates + 1, algorithm={"turns": turns})
        return UpdateReport(batch.id, self.progress.updates, {"actor/loss": 0.5, "actor/ppo_kl": 0.001})

    def probe(self) -> Probe:
        """Return scores that are a function of the adapter's bytes, as FakeEngine does."""
        salt = zlib.crc32(save(self.tensors))
        rows = (tuple(logprob(str(salt), ids[:at], ids[at]) for at in range(1, len(ids))) for ids in PROBE)
        return Probe(PROBE, tuple(rows))

    def export(self, directory: Path, lineage: Mapping[str, Any]) -> Export:
        moments = {f"{moment}.{name}": tensor * 0.5 for moment in MOMENTS for name, tensor in self.tensors.items()}
        content = Checkpoint(RoleState(self.tensors, moments), None, self.progress)
        return export(directory, content, self.adapter_spec, self.base_model, lineage)
