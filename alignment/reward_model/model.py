"""The reward model: fitted on people's feedback, exported like a version, and used to score replies.

adapter_model.safetensors   adapter_config.json    the adapter; not with full weights
head.safetensors                                   the head's weight and bias
reward_model.json                                  the calibration from score to reward, the metrics, the predictions

Every rank calls every method. It uses the model role "reward" of the trainer's policy and leaves the other roles alone.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from alignment.artifacts.manifest import verify
from alignment.artifacts.specs import ADAPTER, AdapterSpec, check_adapter
from alignment.config.trainer import OptimConfig, RewardModelConfig
from alignment.errors import DamagedAdapter, NothingToCompare
from alignment.functional import PlattScaling
from alignment.models import lora, parallel
from alignment.models.policy_model import REWARD_HEAD
from alignment.reward_model.dataset import PreferenceDataset, Reply, select_held_out, split
from alignment.reward_model.evaluate import calibrate, evaluate, scores_to_rewards
from alignment.reward_model.fit import FitLoop, score_replies
from alignment.reward_model.prequential import Prediction, PreviousFit, collect_evidence
from alignment.tolerance import sign
from alignment.trainer.checkpoint import Export, export_directory
from alignment.trainer.optimizer import Optimizer
from alignment.trainer.trainer import Trainer

HEAD = "head.safetensors"
METADATA = "reward_model.json"
THIS_FIT = ""  # of predictions, in place of the name that others have


@dataclass
class FitState:
    """A fit in progress."""

    dataset: PreferenceDataset
    held_out: PreferenceDataset
    loop: FitLoop
    optimizer: Optimizer
    predictions: list[Prediction]  # by the models of earlier fits, of votes that they had not learned from
    seconds: float = 0.0


@dataclass(frozen=True)
class RewardModelState:
    """Full tensors on the CPU by name, the calibration from score to probability, and the metrics of the fit."""

    tensors: dict[str, Tensor]
    platt: PlattScaling
    metrics: dict[str, float]
    predictions: tuple[Prediction, ...] = ()


class RewardModel:
    """A reward model on the trainer's base model; the trainer needs `TrainerConfig.reward_model`."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.config: RewardModelConfig | None = trainer.config.reward_model
        self._state: RewardModelState | None = None
        self._fit: FitState | None = None

    def begin(
        self,
        dataset: PreferenceDataset,
        config: RewardModelConfig | None = None,
        previous: PreviousFit | None = None,
    ) -> int:
        """Start a fit on the dataset except its held-out part. Return its number of steps, which is an upper bound.

        `config` is the trainer's if it is None. The model of the `previous` fit first predicts the votes that it has
        not learned from; without its files these votes are no evidence.

        Equal datasets, seeds and numbers of ranks give equal bits. Raises NothingToCompare if there are too few
        examples. After an error here or in `advance` the previous reward model is no longer loaded.
        Between `begin`, `advance` and `finish` the policy may be updated, but the reward role must not be used.
        """
        trainer, config = self.trainer, config or self._config
        self._state = self._fit = None
        started = time.perf_counter()
        train, held_out = split(dataset, select_held_out(dataset, config.held_out, trainer.config.seed))
        _check_size(train, held_out, config)
        predictions = self._predict(dataset, previous) if previous is not None else []
        trainer.policy.load_adapter(trainer.policy.initial_tensors("reward", trainer.config.seed), "reward")
        loop = FitLoop(trainer, train, config)
        optimizer = Optimizer(
            trainer.policy.role_parameters("reward"),
            OptimConfig(
                lr=config.lr,
                weight_decay=config.weight_decay,
                schedule="linear",
                warmup_steps=max(1, loop.steps // 10),
                total_steps=loop.steps,
            ),
        )
        optimizer.load()
        self._fit = FitState(dataset, held_out, loop, optimizer, predictions, time.perf_counter() - started)
        return loop.steps

    def advance(self, steps: int) -> bool:
        """Make up to `steps` steps of the fit; return True if no step was left. Raises NonFiniteUpdate."""
        fit, started = self._current_fit, time.perf_counter()
        is_done = fit.loop.advance(fit.optimizer, steps)
        fit.seconds += time.perf_counter() - started
        return is_done

    def finish(self) -> dict[str, float]:
        """Evaluate and calibrate on the held-out part, and keep the result as the loaded reward model.

        Return the metrics, the same on every rank.
        Example: {"agreement": 0.81, "thumb_auc": 0.88, "calibration_error": 0.04, "num_thumbs": 812, …}
        """
        trainer, fit, started = self.trainer, self._current_fit, time.perf_counter()
        self._fit = None
        dataset, held_out = fit.dataset, fit.held_out
        indices = {index for example in held_out.examples for index in example.reply_indices}
        scores = score_replies(trainer, dataset.replies, indices)
        own = [Prediction(dataset.replies[index].turn_id, THIS_FIT, float(scores[index])) for index in sorted(indices)]
        evidence = collect_evidence(dataset, [*fit.predictions, *own])
        metrics: dict[str, float] = {
            **evaluate(held_out, scores, trainer.config.seed),
            **({} if evidence.auc is None else {"auc": evidence.auc}),
            "auc_low": evidence.bounds().low,
            "num_predicted": evidence.num_votes,
            "loss": fit.loop.loss,
            "steps": fit.loop.steps,
            "num_held_out": len(held_out),
            "num_pairs": len(dataset.pairs),
            "num_thumbs": len(dataset.labels),
            "num_raters": len(dataset.raters),
            "seconds": fit.seconds + time.perf_counter() - started,
        }
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        tensors = parallel.gather_to_cpu(trainer.policy.role_parameters("reward"))
        self._state = RewardModelState(tensors, calibrate(held_out, scores), metrics, tuple(fit.predictions))
        return metrics

    def _predict(self, dataset: PreferenceDataset, previous: PreviousFit) -> list[Prediction]:
        """Return the predictions of earlier fits, and those of the previous one for the votes since."""
        try:
            self.restore(previous.directory, previous.manifest_sha256)
            assert self._state is not None
            earlier = self._state.predictions
        except (DamagedAdapter, OSError):
            return []
        finally:
            self._state = None
        unseen = previous.unseen(dataset)
        scores = score_replies(self.trainer, dataset.replies, unseen)
        turn_ids = {reply.turn_id for reply in dataset.replies}
        known = [one for one in earlier if one.turn_id in turn_ids]
        return known + [
            Prediction(dataset.replies[index].turn_id, previous.name, float(scores[index])) for index in unseen
        ]

    def export(self, directory: Path, lineage: Mapping[str, object]) -> Export:
        """Write the result of the last fit. Rank 0 writes; all ranks return the hash of the manifest."""
        state, spec, base_model = self._state, self.trainer.adapter_spec, self.trainer.base_model
        assert state is not None, "there is nothing to export before a fit"
        return export_directory(directory, lambda folder: write(folder, state, spec, base_model), lineage)

    def restore(self, directory: Path, sha256: str) -> None:
        """Load the reward model in a directory.

        Raises DamagedAdapter if it does not match the manifest with this hash or does not fit the base model.
        """
        self._state = self._fit = None
        state = read(directory, sha256, self.trainer.adapter_spec)
        self.trainer.policy.load_adapter(state.tensors, "reward")
        self._state = replace(state, tensors={})

    def score(self, replies: Sequence[Reply]) -> list[float]:
        """Return the reward of each reply, in [-1, 1]."""
        assert self._state is not None, "no reward model is loaded"
        rewards: Tensor = scores_to_rewards(score_replies(self.trainer, replies).double(), self._state.platt)
        return [float(reward) for reward in rewards]

    @property
    def _current_fit(self) -> FitState:
        if self._fit is None:
            raise ValueError("No fit is under way; call begin first.")
        return self._fit

    @property
    def _config(self) -> RewardModelConfig:
        if self.config is None:
            raise ValueError("This trainer was built without room for a reward model; set TrainerConfig.reward_model.")
        return self.config


def _check_size(train: PreferenceDataset, held_out: PreferenceDataset, config: RewardModelConfig) -> None:
    if len(held_out) < config.min_held_out or len(train) < config.min_held_out:
        raise NothingToCompare(
            f"The feedback gives {len(train)} examples to train on and {len(held_out)} to hold out: at least "
            f"{config.min_held_out} of each are needed, about different prompts and by different raters."
        )
    for part, name in ((train, "training"), (held_out, "held-out")):
        signs = {sign(label.value) for label in part.labels if sign(label.value)}
        if not part.pairs and len(signs) < 2:
            raise NothingToCompare(
                f"All {name} labels point one way, and there are no pairs: there is no preference to learn."
            )


def write(directory: Path, state: RewardModelState, spec: AdapterSpec | None, base_model: Path) -> None:
    """Write a reward model into an empty directory. `spec` is None for full weights."""
    head = {name: tensor for name, tensor in state.tensors.items() if name.startswith(REWARD_HEAD)}
    save_file(head, directory / HEAD)
    if spec is not None:
        save_file({name: tensor for name, tensor in state.tensors.items() if name not in head}, directory / ADAPTER)
        lora.write_config(directory, spec, base_model)
    metadata = {"platt": state.platt._asdict(), "metrics": state.metrics, "predictions": state.predictions}
    (directory / METADATA).write_text(json.dumps(metadata, indent=1, sort_keys=True, allow_nan=False))


def read(directory: Path, sha256: str, spec: AdapterSpec | None) -> RewardModelState:
    """Return the reward model in a directory. `spec` is None for full weights.

    Raises DamagedAdapter if the directory does not match the manifest with this hash or does not fit the base model.
    """
    verify(directory, sha256)
    tensors: dict[str, Tensor] = load_file(directory / HEAD)
    if spec is not None:
        check_adapter(directory, spec)
        tensors |= load_file(directory / ADAPTER)
    elif (directory / ADAPTER).exists():
        raise DamagedAdapter(f"{directory} holds an adapter, and full weights take none.")
    metadata = json.loads((directory / METADATA).read_text())
    predictions = tuple(Prediction(*row) for row in metadata.get("predictions", ()))  # files of before have none
    return RewardModelState(tensors, PlattScaling(**metadata["platt"]), metadata["metrics"], predictions)
