"""The reward model learns a synthetic preference, is calibrated, and can be exported and restored."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alignment.artifacts.manifest import MANIFEST
from alignment.artifacts.specs import ADAPTER
from alignment.config.trainer import TrainerConfig
from alignment.errors import DamagedAdapter, NothingToCompare
from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, Reply
from alignment.reward_model.fit import score_replies
from alignment.reward_model.model import HEAD, METADATA, RewardModel
from alignment.trainer.trainer import Trainer
from alignment.types import Batch
from tests.alignment.reward_model.conftest import PREFERRED_TOKEN, REJECTED_TOKEN, make_dataset
from tests.support.reward_model_fit import fit_reward_model


@pytest.fixture
def trainer(base_model: Path, reward_config: TrainerConfig) -> Trainer:
    return Trainer(base_model, reward_config)


def unseen_dataset(count: int = 40) -> PreferenceDataset:
    return make_dataset(count, seed=99)


@pytest.mark.parametrize(
    "dataset", [make_dataset(160), make_dataset(0, 120), make_dataset(80, 60)], ids=["labels", "pairs", "both"]
)
def test_model_learns_the_preference_and_generalizes(trainer: Trainer, dataset: PreferenceDataset) -> None:
    model = RewardModel(trainer)
    metrics = fit_reward_model(model, dataset)
    assert metrics["agreement"] > 0.9
    scores = model.score(unseen_dataset().replies)
    assert all(-1 <= value <= 1 for value in scores)
    is_correct = [value * label.value > 0 for value, label in zip(scores, unseen_dataset().labels, strict=True)]
    assert sum(is_correct) / len(is_correct) > 0.9
    assert (metrics["num_pairs"], metrics["num_thumbs"]) == (len(dataset.pairs), len(dataset.labels))
    assert metrics["num_raters"] == len(dataset)


def test_score_depends_on_the_whole_reply_only(trainer: Trainer) -> None:
    """A reply has the same score in a batch of one and in a larger batch. Its last token changes the score."""
    fit_reward_model(RewardModel(trainer), make_dataset(80))
    one = Reply("a", (11, 12, 13), (14, PREFERRED_TOKEN))
    longer = Reply("b", (11, 12, 13), (14, PREFERRED_TOKEN, 15, 16))
    other = Reply("c", (11, 12, 13), (14, REJECTED_TOKEN))
    separate = [float(score_replies(trainer, [reply])[0]) for reply in (one, longer, other)]
    batched = score_replies(trainer, [longer, other, one]).tolist()
    assert batched == pytest.approx([separate[1], separate[2], separate[0]], abs=1e-5)
    assert len({round(score, 3) for score in separate}) == 3


def test_calibration_reduces_the_calibration_error(trainer: Trainer) -> None:
    """A fifth of the labels is flipped at random, so an overconfident model has a large calibration error."""
    dataset = make_dataset(300)
    generator = torch.Generator().manual_seed(0)
    flips = torch.rand(300, generator=generator) < 0.2
    labels = tuple(
        replace(label, value=-label.value if flip else label.value)
        for label, flip in zip(dataset.labels, flips.tolist(), strict=True)
    )
    config = trainer.config.reward_model
    assert config is not None
    model = RewardModel(trainer)
    model.config = config.model_copy(update={"held_out": 0.4, "max_epochs": 30, "min_steps": 400})
    metrics = fit_reward_model(model, PreferenceDataset(dataset.replies, (), labels))
    assert metrics["calibration_error"] < metrics["calibration_error_before"]


def test_low_weight_labels_have_little_influence(trainer: Trainer) -> None:
    """Every label is contradicted by one of low weight."""
    dataset = make_dataset(120)
    contradictions = tuple(
        BinaryLabel(label.reply, -label.value, 0.05, "HUMAN/contradicts") for label in dataset.labels
    )
    model = RewardModel(trainer)
    fit_reward_model(model, PreferenceDataset(dataset.replies, (), dataset.labels + contradictions))
    values = model.score(unseen_dataset().replies)
    is_correct = [value * label.value > 0 for value, label in zip(values, unseen_dataset().labels, strict=True)]
    assert sum(is_correct) / len(is_correct) > 0.9


def test_same_dataset_and_seed_give_identical_bits(trainer: Trainer, base_model: Path, tmp_path: Path) -> None:
    exports = []
    for number, each in enumerate((trainer, Trainer(base_model, trainer.config))):
        model = RewardModel(each)
        fit_reward_model(model, make_dataset(60))
        exports.append(model.export(tmp_path / f"rm-{number}", {}).path)
    for name in (ADAPTER, HEAD):
        assert (exports[0] / name).read_bytes() == (exports[1] / name).read_bytes()


def test_fit_does_not_depend_on_previous_fits(trainer: Trainer) -> None:
    model = RewardModel(trainer)
    fit_reward_model(model, make_dataset(60))
    first = model.score(unseen_dataset().replies)
    fit_reward_model(model, make_dataset(60, seed=5))
    fit_reward_model(model, make_dataset(60))
    assert model.score(unseen_dataset().replies) == first


def test_fit_does_not_change_the_policy(trainer: Trainer, draw: Callable[..., Batch]) -> None:
    before = trainer.probe()
    model = RewardModel(trainer)
    fit_reward_model(model, make_dataset(60))
    assert trainer.probe() == before
    scores = model.score(unseen_dataset().replies)
    trainer.update(draw(8))
    assert model.score(unseen_dataset().replies) == scores, "the update does not change the scores"


def test_fit_and_updates_can_interleave_without_effect_on_each_other(
    base_model: Path, trainer: Trainer, draw: Callable[..., Batch]
) -> None:
    uninterrupted, without_fit = RewardModel(Trainer(base_model, trainer.config)), Trainer(base_model, trainer.config)
    fit_reward_model(uninterrupted, make_dataset(60))
    batches = [draw(8), draw(8, seed=1)]
    for batch in batches:
        without_fit.update(batch)
    model = RewardModel(trainer)
    assert model.begin(make_dataset(60)) > 21
    parts = 0
    while not model.advance(7):
        parts += 1
        if batches:
            trainer.update(batches.pop(0))
    model.finish()
    assert parts > 2 and not batches
    assert model.score(unseen_dataset().replies) == uninterrupted.score(unseen_dataset().replies)
    assert trainer.probe() == without_fit.probe()
    with pytest.raises(ValueError, match="No fit is under way"):
        model.advance(1)


def test_export_and_restore_round_trip(trainer: Trainer, base_model: Path, tmp_path: Path) -> None:
    model = RewardModel(trainer)
    fit_reward_model(model, make_dataset(60))
    scores = model.score(unseen_dataset().replies)
    export = model.export(tmp_path / "rm-1", {"reward_model": "rm-1"})
    other = RewardModel(Trainer(base_model, trainer.config))
    other.restore(export.path, export.manifest_sha256)
    assert other.score(unseen_dataset().replies) == scores


@pytest.mark.parametrize("damage", [ADAPTER, HEAD, METADATA, MANIFEST, "missing", "extra", "wrong hash"])
def test_modified_files_are_rejected(trainer: Trainer, tmp_path: Path, damage: str) -> None:
    model = RewardModel(trainer)
    fit_reward_model(model, make_dataset(60))
    export = model.export(tmp_path / "rm-1", {})
    sha256 = export.manifest_sha256
    if damage == "missing":
        (export.path / HEAD).unlink()
    elif damage == "extra":
        (export.path / "more").write_text("")
    elif damage == "wrong hash":
        sha256 = "0" * 64
    else:
        raw = bytearray((export.path / damage).read_bytes())
        raw[len(raw) // 2] ^= 1
        (export.path / damage).write_bytes(raw)
    with pytest.raises(DamagedAdapter):
        model.restore(export.path, sha256)
    shutil.rmtree(export.path)


def test_too_small_and_one_sided_datasets_are_rejected(trainer: Trainer) -> None:
    model = RewardModel(trainer)
    with pytest.raises(NothingToCompare, match="at least 10 of each"):
        fit_reward_model(model, make_dataset(20))
    dataset = make_dataset(100)
    all_positive = tuple(replace(label, value=1.0) for label in dataset.labels)
    with pytest.raises(NothingToCompare, match="one way"):
        fit_reward_model(model, PreferenceDataset(dataset.replies, (), all_positive))


def test_with_full_weights_the_head_reads_the_frozen_reference(
    base_model: Path, reward_config: TrainerConfig, draw: Callable[..., Batch], tmp_path: Path
) -> None:
    trainer = Trainer(base_model, reward_config.model_copy(update={"lora": None}))
    model = RewardModel(trainer)
    fit_reward_model(model, make_dataset(120))
    scores = model.score(unseen_dataset().replies)
    trainer.update(draw(8))
    assert model.score(unseen_dataset().replies) == scores
    export = model.export(tmp_path / "rm-1", {})
    assert not (export.path / ADAPTER).exists()
    model.restore(export.path, export.manifest_sha256)
    assert model.score(unseen_dataset().replies) == scores


def test_trainer_without_reward_model_config_is_rejected(base_model: Path, config: TrainerConfig) -> None:
    with pytest.raises(ValueError, match="without room"):
        fit_reward_model(RewardModel(Trainer(base_model, config)), make_dataset(60))
