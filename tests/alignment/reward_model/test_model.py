"""A reward model learns what is planted, knows how sure it is, and comes back as it went."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alignment.artifacts import ADAPTER, MANIFEST
from alignment.config.trainer import TrainerConfig
from alignment.errors import DamagedAdapter, NothingToCompare
from alignment.reward_model.artifacts import FACTS, HEAD
from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, Reply
from alignment.reward_model.fit import scores_of
from alignment.reward_model.model import RewardModel
from alignment.trainer.trainer import Trainer
from alignment.types import Batch
from tests.alignment.reward_model.conftest import DISPLEASES, PLEASES, heard


@pytest.fixture
def learner(base_model: Path, reward_config: TrainerConfig) -> Trainer:
    return Trainer(base_model, reward_config)


def strangers(count: int = 40) -> PreferenceDataset:
    return heard(count, seed=99)


@pytest.mark.parametrize("words", [heard(160), heard(0, 120), heard(80, 60)], ids=["thumbs", "pairs", "both"])
def test_what_is_planted_is_learned_and_holds_for_strangers(learner: Trainer, words: PreferenceDataset) -> None:
    model = RewardModel(learner)
    metrics = model.fit(words).metrics
    assert metrics["agreement"] > 0.9
    told = model.score(strangers().replies)
    assert all(-1 <= value <= 1 for value in told)
    right = [value * thumb.value > 0 for value, thumb in zip(told, strangers().thumbs, strict=True)]
    assert sum(right) / len(right) > 0.9
    assert (metrics["num_pairs"], metrics["num_thumbs"]) == (len(words.pairs), len(words.thumbs))
    assert metrics["num_raters"] == len(words)


def test_a_score_is_of_the_whole_reply_and_of_nothing_else(learner: Trainer) -> None:
    """By itself, in company and beside a longer one that begins with it; another last token is another score."""
    RewardModel(learner).fit(heard(80))
    one = Reply("a", (11, 12, 13), (14, PLEASES))
    longer = Reply("b", (11, 12, 13), (14, PLEASES, 15, 16))
    other = Reply("c", (11, 12, 13), (14, DISPLEASES))
    alone = [float(scores_of(learner, [reply])[0]) for reply in (one, longer, other)]
    together = scores_of(learner, [longer, other, one]).tolist()
    assert together == pytest.approx([alone[1], alone[2], alone[0]], abs=1e-5)
    assert len({round(score, 3) for score in alone}) == 3


def test_calibration_makes_the_error_smaller(learner: Trainer) -> None:
    """A fifth of the thumbs is pressed by mistake, at random: whoever is sure of all of them is wrong about some."""
    words = heard(300)
    generator = torch.Generator().manual_seed(0)
    slips = torch.rand(300, generator=generator) < 0.2
    thumbs = tuple(
        replace(thumb, value=-thumb.value if slip else thumb.value)
        for thumb, slip in zip(words.thumbs, slips.tolist(), strict=True)
    )
    config = learner.config.reward_model
    assert config is not None
    model = RewardModel(learner)
    model.config = config.model_copy(update={"held_out": 0.4, "max_epochs": 30, "min_steps": 400})
    metrics = model.fit(PreferenceDataset(words.replies, (), thumbs)).metrics
    assert metrics["calibration_error"] < metrics["calibration_error_before"]


def test_whom_nobody_believes_is_not_learned_from(learner: Trainer) -> None:
    """Everybody is contradicted by one of no weight: what is believed wins."""
    words = heard(120)
    liars = tuple(BinaryLabel(thumb.reply, -thumb.value, 0.05, "HUMAN/liar") for thumb in words.thumbs)
    told = RewardModel(learner)
    told.fit(PreferenceDataset(words.replies, (), words.thumbs + liars))
    values = told.score(strangers().replies)
    right = [value * thumb.value > 0 for value, thumb in zip(values, strangers().thumbs, strict=True)]
    assert sum(right) / len(right) > 0.9


def test_the_same_words_and_seed_give_the_same_bits(learner: Trainer, base_model: Path, tmp_path: Path) -> None:
    exports = []
    for number, one in enumerate((learner, Trainer(base_model, learner.config))):
        model = RewardModel(one)
        model.fit(heard(60))
        exports.append(model.export(tmp_path / f"rm-{number}", {}).path)
    for name in (ADAPTER, HEAD):
        assert (exports[0] / name).read_bytes() == (exports[1] / name).read_bytes()


def test_a_fit_begins_anew_whatever_was_fitted_before(learner: Trainer) -> None:
    model = RewardModel(learner)
    model.fit(heard(60))
    first = model.score(strangers().replies)
    model.fit(heard(60, seed=5))
    model.fit(heard(60))
    assert model.score(strangers().replies) == first


def test_the_policy_does_not_notice(learner: Trainer, draw: Callable[..., Batch]) -> None:
    before = learner.probe()
    model = RewardModel(learner)
    model.fit(heard(60))
    assert learner.probe() == before
    told = model.score(strangers().replies)
    learner.update(draw(8))
    assert model.score(strangers().replies) == told, "nor does it notice the policy"


def test_a_fit_leaves_room_for_updates_and_neither_notices_the_other(
    base_model: Path, learner: Trainer, draw: Callable[..., Batch]
) -> None:
    alone, undisturbed = RewardModel(Trainer(base_model, learner.config)), Trainer(base_model, learner.config)
    alone.fit(heard(60))
    batches = [draw(8), draw(8, seed=1)]
    for batch in batches:
        undisturbed.update(batch)
    model = RewardModel(learner)
    assert model.begin(heard(60)) > 21
    parts = 0
    while not model.advance(7):
        parts += 1
        if batches:
            learner.update(batches.pop(0))
    model.finish()
    assert parts > 2 and not batches
    assert model.score(strangers().replies) == alone.score(strangers().replies)
    assert learner.probe() == undisturbed.probe()
    with pytest.raises(ValueError, match="No fit is under way"):
        model.advance(1)


def test_what_is_written_is_what_is_read(learner: Trainer, base_model: Path, tmp_path: Path) -> None:
    model = RewardModel(learner)
    model.fit(heard(60))
    told = model.score(strangers().replies)
    export = model.export(tmp_path / "rm-1", {"reward_model": "rm-1"})
    other = RewardModel(Trainer(base_model, learner.config))
    other.restore(export.path, export.manifest_sha256)
    assert other.score(strangers().replies) == told


@pytest.mark.parametrize("damage", [ADAPTER, HEAD, FACTS, MANIFEST, "missing", "extra", "another"])
def test_what_is_not_byte_for_byte_what_was_sealed_is_refused(learner: Trainer, tmp_path: Path, damage: str) -> None:
    model = RewardModel(learner)
    model.fit(heard(60))
    export = model.export(tmp_path / "rm-1", {})
    sha256 = export.manifest_sha256
    if damage == "missing":
        (export.path / HEAD).unlink()
    elif damage == "extra":
        (export.path / "more").write_text("")
    elif damage == "another":
        sha256 = "0" * 64
    else:
        raw = bytearray((export.path / damage).read_bytes())
        raw[len(raw) // 2] ^= 1
        (export.path / damage).write_bytes(raw)
    with pytest.raises(DamagedAdapter):
        model.restore(export.path, sha256)
    shutil.rmtree(export.path)


def test_too_little_and_nothing_to_prefer_are_refused(learner: Trainer) -> None:
    model = RewardModel(learner)
    with pytest.raises(NothingToCompare, match="at least 10 of each"):
        model.fit(heard(20))
    words = heard(100)
    glad = tuple(replace(thumb, value=1.0) for thumb in words.thumbs)
    with pytest.raises(NothingToCompare, match="one way"):
        model.fit(PreferenceDataset(words.replies, (), glad))


def test_with_full_weights_the_head_reads_the_trunk_as_it_was(
    base_model: Path, reward_config: TrainerConfig, draw: Callable[..., Batch], tmp_path: Path
) -> None:
    learner = Trainer(base_model, reward_config.model_copy(update={"lora": None}))
    model = RewardModel(learner)
    model.fit(heard(120))
    told = model.score(strangers().replies)
    learner.update(draw(8))
    assert model.score(strangers().replies) == told
    export = model.export(tmp_path / "rm-1", {})
    assert not (export.path / ADAPTER).exists()
    model.restore(export.path, export.manifest_sha256)
    assert model.score(strangers().replies) == told


def test_a_trainer_without_room_says_so(base_model: Path, config: TrainerConfig) -> None:
    with pytest.raises(ValueError, match="without room"):
        RewardModel(Trainer(base_model, config)).fit(heard(60))
