"""A reward model is judged by votes that it, or the model of an earlier fit, predicted before it learned from them."""

from pathlib import Path

import pytest

from alignment.config.trainer import TrainerConfig
from alignment.reward_model.dataset import PreferenceDataset
from alignment.reward_model.model import RewardModel
from alignment.reward_model.prequential import Prediction, PreviousFit, collect_evidence
from alignment.trainer.trainer import Trainer
from tests.alignment.reward_model.conftest import make_dataset
from tests.support.reward_model_fit import fit_reward_model


def first_labels(dataset: PreferenceDataset, count: int) -> PreferenceDataset:
    return PreferenceDataset(dataset.replies[:count], (), dataset.labels[:count])


def test_each_vote_counts_once_and_the_latest_prediction_of_it() -> None:
    dataset = make_dataset(6)
    predictions = [Prediction(reply.turn_id, "1", 0.0) for reply in dataset.replies[:4]]
    predictions += [Prediction(dataset.replies[label.reply].turn_id, "2", label.value) for label in dataset.labels[2:]]
    predictions += [Prediction("erased", "2", 5.0)]
    evidence = collect_evidence(dataset, predictions)
    assert [(one.ups + one.downs, one.auc) for one in evidence.strata] == [(2, 0.5), (4, 1.0)]


def test_votes_between_fits_are_predicted_by_the_model_before(
    base_model: Path, reward_config: TrainerConfig, tmp_path: Path
) -> None:
    model, dataset = RewardModel(Trainer(base_model, reward_config)), make_dataset(100)
    previous: PreviousFit | None = None
    num_predicted: list[float] = []
    for number, count in enumerate((60, 80, 100), 1):
        part = first_labels(dataset, count)
        steps = model.begin(part, None, previous)
        while not model.advance(steps):
            pass
        metrics = model.finish()
        num_predicted.append(metrics["num_predicted"])
        export = model.export(tmp_path / f"rm-{number}", {})
        seen = frozenset(reply.turn_id for reply in part.replies)
        previous = PreviousFit(str(number), export.path, export.manifest_sha256, seen)
    assert num_predicted[0] == pytest.approx(12, abs=6)
    assert num_predicted[0] + 10 <= num_predicted[1] <= num_predicted[0] + 26
    assert num_predicted[2] > num_predicted[1] and num_predicted[2] < 100
    assert metrics["auc"] > metrics["auc_low"] > 0.6


def test_a_fit_without_the_files_of_the_one_before_has_its_own_evidence(
    base_model: Path, reward_config: TrainerConfig, tmp_path: Path
) -> None:
    model, dataset = RewardModel(Trainer(base_model, reward_config)), make_dataset(60)
    alone = fit_reward_model(model, dataset)
    model.begin(dataset, None, PreviousFit("1", tmp_path / "gone", "0" * 64, frozenset()))
    while not model.advance(1000):
        pass
    assert model.finish()["num_predicted"] == alone["num_predicted"]
