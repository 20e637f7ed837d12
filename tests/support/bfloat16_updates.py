"""Updates of a model in bfloat16 on the CPU, and what an engine computes with the adapters that they export.

The trainer is Attune's, the engine's log-probs are those of transformers and peft, whose rounding is their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment.config.policy_gradient_algorithms import PPOConfig
from alignment.config.trainer import LoRAConfig, OptimConfig, TrainerConfig
from alignment.trainer.scoring import recompute_logprobs
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample
from app.models import Version

SAMPLES = 24
DTYPE = "bfloat16"
Scores = list[list[float]]


@dataclass(frozen=True)
class Update:
    """A version with the probe that the trainer recorded, and the log-probs of an engine that has loaded the right
    adapter, and of one that has its parent's."""

    version: Version
    delivered: Scores
    parent_delivered: Scores


class Engine:
    def __init__(self, model: Path) -> None:
        self._model = model

    @torch.no_grad()
    def score(self, adapter: Path | None, ids: tuple[tuple[int, ...], ...]) -> Scores:
        """Return the log-prob of each token but the first, under the adapter or the base model."""
        base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.bfloat16)
        loaded = base if adapter is None else PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False)
        return [self._score_text(loaded.eval(), torch.tensor(row)) for row in ids]

    @staticmethod
    def _score_text(model: PreTrainedModel | PeftModel, ids: torch.Tensor) -> list[float]:
        logprobs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        scores: list[float] = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
        return scores


def make_updates(model: Path, folder: Path, count: int, *, kl_target: float, seed: int = 0) -> Iterator[Update]:
    """Yield `count` updates, each from the one before it, on random replies with random votes."""
    config = TrainerConfig(
        algorithm=PPOConfig(),
        lora=LoRAConfig(),
        optim=OptimConfig(lr=1e-3),
        kl_target=kl_target,
        dtype=DTYPE,
        device="cpu",
        seed=seed,
    )
    trainer, engine = Trainer(model, config), Engine(model)
    parent: Path | None = None
    parent_probe, parent_delivered = trainer.probe(), engine.score(None, trainer.probe_ids)
    for number in range(1, count + 1):
        trainer.update(_draw_batch(model, parent, trainer.probe_ids, np.random.default_rng((seed, number))))
        probe, directory = trainer.probe(), folder / f"shop-v{number}"
        trainer.export(directory, {})
        version = Version(
            adapter_name=directory.name,
            probe={"ids": probe.ids, "logprobs": probe.logprobs, "parent_logprobs": parent_probe.logprobs},
        )
        delivered = engine.score(directory, probe.ids)
        yield Update(version, delivered, parent_delivered)
        parent, parent_probe, parent_delivered = directory, probe, delivered


def _draw_batch(
    model: Path, adapter: Path | None, texts: tuple[tuple[int, ...], ...], random: np.random.Generator
) -> Batch:
    """Return replies of random tokens, with their log-probs under the adapter. Half of them are liked."""
    tokens = [id for text in texts for id in text]
    drafts = []
    for index in range(SAMPLES):
        ids = tuple(int(id) for id in random.choice(tokens, size=24))
        drafts.append(
            Sample(
                turn_id=f"turn-{index}",
                prompt_ids=ids[:8],
                output_ids=ids[8:],
                logprobs=(0.0,) * 16,
                reward=1.0 if index % 2 else -1.0,
                version=0,
                temperature=1.0,
            )
        )
    scored = recompute_logprobs(model, adapter, drafts, dtype=DTYPE, device="cpu")
    samples = (
        replace(draft, logprobs=tuple(float(value) for value in logprobs))
        for draft, logprobs in zip(drafts, scored, strict=True)
    )
    return Batch(id="batch", policy="shop", samples=tuple(samples))
