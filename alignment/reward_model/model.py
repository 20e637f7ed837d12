"""The reward model: fitted from what people said, kept like a version, asked for a number a reply.

Every rank calls every method. It wears the trunk's reward hat: actor, critic and reference do not notice.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from alignment.artifacts import AdapterSpec
from alignment.config.trainer import OptimConfig, RewardModelConfig
from alignment.errors import NothingToCompare
from alignment.models import parallel
from alignment.reward_model import artifacts
from alignment.reward_model.artifacts import Content
from alignment.reward_model.dataset import PreferenceDataset, Reply, held_out, split
from alignment.reward_model.evaluate import calibrated, measured, values
from alignment.reward_model.fit import Fitting, scores_of
from alignment.trainer.export import Export, published
from alignment.trainer.optimizer import Optimizer
from alignment.trainer.trainer import Trainer


@dataclass
class Begun:
    """A fit under way: what it learns from, what it is to be measured on."""

    words: PreferenceDataset
    out: PreferenceDataset
    fitting: Fitting
    optimizer: Optimizer
    seconds: float = 0.0


@dataclass(frozen=True)
class Fit:
    """What a fit has measured, on words that were held out; all ranks alike.

    Example: Fit(metrics={"agreement": 0.81, "thumb_auc": 0.88, "calibration_error": 0.04, "num_thumbs": 812, …})
    """

    metrics: dict[str, float]


class RewardModel:
    """On the learner's trunk, which must have room for it (`TrainerConfig.reward_model`)."""

    def __init__(self, learner: Trainer) -> None:
        self.learner = learner
        self.config: RewardModelConfig | None = learner.config.reward_model
        self._content: Content | None = None
        self._begun: Begun | None = None

    def fit(self, words: PreferenceDataset) -> Fit:
        """Begin anew and learn from all words but those that are held out, then calibrate on these.

        The same words, seed and number of ranks give the same bits. Raises NothingToCompare where too little is said,
        NonFiniteUpdate where the numbers run away; what was worn before is gone then.
        """
        steps = self.begin(words)
        while not self.advance(steps):
            pass
        return self.finish()

    def begin(self, words: PreferenceDataset) -> int:
        """The first part of a fit that leaves room for other work, which may be an update of the policy but nothing
        that wears the reward hat. Returns how many steps it will take, or a few less."""
        learner, config = self.learner, self._config
        self._content = self._begun = None
        began = time.perf_counter()
        taught, out = split(words, held_out(words, config.held_out, learner.config.seed))
        _enough(taught, out, config)
        learner.policy.wear(learner.policy.fresh("reward", learner.config.seed), "reward")
        fitting = Fitting(learner, taught, config)
        optimizer = Optimizer(
            learner.policy.tensors("reward"),
            OptimConfig(
                lr=config.lr,
                weight_decay=config.weight_decay,
                schedule="linear",
                warmup_steps=max(1, fitting.steps // 10),
                total_steps=fitting.steps,
            ),
        )
        optimizer.reset()
        self._begun = Begun(words, out, fitting, optimizer, time.perf_counter() - began)
        return fitting.steps

    def advance(self, steps: int) -> bool:
        """So many steps of the fit; True when all are made."""
        begun, began = self._under_way, time.perf_counter()
        over = begun.fitting.advance(begun.optimizer, steps)
        begun.seconds += time.perf_counter() - began
        return over

    def finish(self) -> Fit:
        """Measure and calibrate on what was held out. It is worn from now on."""
        learner, begun, began = self.learner, self._under_way, time.perf_counter()
        self._begun = None
        words, out = begun.words, begun.out
        scores = scores_of(learner, words.replies, {place for word in out.words for place in word.about})
        metrics: dict[str, float] = {
            **measured(out, scores, learner.config.seed),
            "loss": begun.fitting.loss,
            "steps": begun.fitting.steps,
            "num_held_out": len(out),
            "num_pairs": len(words.pairs),
            "num_thumbs": len(words.thumbs),
            "num_raters": len(words.raters),
            "seconds": begun.seconds + time.perf_counter() - began,
        }
        metrics = {name: figure for name, figure in metrics.items() if math.isfinite(figure)}
        tensors = {name: parallel.whole(tensor).detach() for name, tensor in learner.policy.tensors("reward").items()}
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items() if learner.rank == 0}
        self._content = Content(kept, calibrated(out, scores), metrics)
        return Fit(metrics)

    def export(self, directory: Path, lineage: Mapping[str, Any]) -> Export:
        """Rank 0 writes what `fit` left, all ranks learn the hash."""
        content, lora, base_model = self._content, self.learner.config.lora, self.learner.base_model
        assert content is not None, "there is nothing to export before a fit"
        done = Export(directory, "", 0.0)
        if self.learner.rank == 0:
            done = published(directory, lambda folder: artifacts.write(folder, content, lora, base_model), lineage)
        return replace(done, manifest_sha256=parallel.from_rank_zero(done.manifest_sha256))

    def restore(self, directory: Path, sha256: str) -> None:
        """Become the reward model in `directory`. Raises DamagedAdapter for anything but what was sealed."""
        self._content = self._begun = None
        lora = self.learner.config.lora
        content = artifacts.read(
            directory, sha256, None if lora is None else AdapterSpec.of(self.learner.base_model, lora)
        )
        self.learner.policy.wear(content.tensors, "reward")
        self._content = replace(content, tensors={})

    def score(self, replies: Sequence[Reply]) -> list[float]:
        """What each reply is worth, in [-1, 1]."""
        assert self._content is not None, "no reward model is worn"
        found: Tensor = values(scores_of(self.learner, replies).double(), self._content.platt)
        return [float(value) for value in found]

    @property
    def _under_way(self) -> Begun:
        if self._begun is None:
            raise ValueError("No fit is under way.")
        return self._begun

    @property
    def _config(self) -> RewardModelConfig:
        if self.config is None:
            raise ValueError("This trainer was built without room for a reward model.")
        return self.config


def _enough(taught: PreferenceDataset, out: PreferenceDataset, config: RewardModelConfig) -> None:
    if len(out) < config.min_held_out or len(taught) < config.min_held_out:
        raise NothingToCompare(
            f"{len(taught)} words to fit and {len(out)} to hold out: at least {config.min_held_out} of each are "
            "needed, about prompts and by people that are not the same."
        )
    for part, what in ((taught, "All thumbs"), (out, "All thumbs that are held out")):
        signs = {thumb.value > 0 for thumb in part.thumbs if thumb.value}
        if not part.pairs and len(signs) < 2:
            raise NothingToCompare(f"{what} point one way, and nothing is compared: there is nothing to prefer.")
