"""Updates from corrections: alone, beside votes, and beside votes without contrast."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from alignment.config.preference_algorithms import DPOConfig, KTOConfig
from alignment.config.trainer import TrainerConfig
from alignment.corrected_text import TextRule
from alignment.data.corrections import CorrectionPair, make_pair
from alignment.errors import ForeignSamples, NoVariance
from alignment.trainer.scoring import recompute_logprobs
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, CorrectedReply, ReturnReason, Sample

Draw = Callable[..., Batch]
ALGORITHMS: list[AlgorithmConfig] = [PPOConfig(), PPOConfig(estimator="gae"), GRPOConfig(), DPOConfig(), KTOConfig()]


@pytest.fixture
def write(base_model: Path) -> Callable[..., list[CorrectedReply]]:
    """Return a factory of replies "order NUMBER is late", each corrected to "… sent", of which the engine knows all."""
    tokenizer = AutoTokenizer.from_pretrained(base_model, local_files_only=True)

    def write_replies(count: int, **fields: object) -> list[CorrectedReply]:
        drafts = []
        for number in range(count):
            ids = tuple(tokenizer.encode(f"order {number} is late", add_special_tokens=False))
            drafts.append(Sample(f"corrected-{number}", (1, 2, 3 + number), ids, (0.0,) * len(ids), -0.5, 0))
        logprobs = recompute_logprobs(base_model, None, drafts, device="cpu")
        samples = [
            replace(draft, logprobs=tuple(map(float, row)), **fields)  # type: ignore[arg-type]
            for draft, row in zip(drafts, logprobs, strict=True)
        ]
        texts = [f"order {number} is late" for number in range(count)]
        return [
            CorrectedReply(f"fb-{number}", sample, text, text.replace("late", "sent"))
            for number, (sample, text) in enumerate(zip(samples, texts, strict=True))
        ]

    return write_replies


Write = Callable[..., list[CorrectedReply]]


def update(trainer: Trainer, samples: tuple[Sample, ...] = (), corrected: list[CorrectedReply] | None = None):  # type: ignore[no-untyped-def]
    """Update from these samples and the corrected replies, which are samples, too."""
    known = {sample.turn_id for sample in samples}
    others = tuple(one.sample for one in corrected or () if one.sample.turn_id not in known)
    return trainer.update(Batch("b", "shop", samples + others, corrected=tuple(corrected or ())))


def margins(trainer: Trainer, base_model: Path, directory: Path, corrected: list[CorrectedReply]) -> list[float]:
    """Return how much more likely, than under the base model, each text has become against its reply, in nats."""
    trainer.export(directory, {})
    pairs = [make_pair(one, trainer.tokenizer, trainer.policy.num_token_ids) for one in corrected]
    sides = []
    for pair in pairs:
        assert isinstance(pair, CorrectionPair)
        ids = pair.chosen_ids
        sides += [
            replace(pair.correction.sample, output_ids=ids, logprobs=(0.0,) * len(ids)),
            pair.correction.sample,
        ]
    new, old = (recompute_logprobs(base_model, version, sides, device="cpu") for version in (directory, None))
    gains = [float(a.sum() - b.sum()) for a, b in zip(new, old, strict=True)]
    return [chosen - rejected for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda config: config.type)
def test_corrections_alone_make_their_texts_likelier(
    base_model: Path, config: TrainerConfig, write: Write, tmp_path: Path, algorithm: AlgorithmConfig
) -> None:
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm, "kl_target": 0.01}))
    report = update(trainer, (), write(6))
    assert report.metrics["training/corrections"] == 6
    assert report.metrics["actor/fitted_kl"] <= 0.01  # of the parent's own replies, as for votes
    assert (report.unused_turn_ids, report.returned_turns, report.unused_texts) == ((), {}, {})
    assert min(margins(trainer, base_model, tmp_path / "v1", write(6))) > 0


@pytest.mark.parametrize("algorithm", [PPOConfig(), KTOConfig()], ids=lambda config: config.type)
def test_votes_and_corrections_are_learned_from_together(
    base_model: Path, config: TrainerConfig, write: Write, draw: Draw, tmp_path: Path, algorithm: AlgorithmConfig
) -> None:
    trainer = Trainer(base_model, config.model_copy(update={"algorithm": algorithm, "kl_target": 0.01}))
    report = update(trainer, draw(6).samples, write(2))
    assert (report.metrics["training/samples"], report.metrics["training/corrections"]) == (8, 2)
    assert report.returned_turns == {}
    assert min(margins(trainer, base_model, tmp_path / "v1", write(2))) > 0
    assert "correction/rewards/margins" in report.metrics


def test_votes_without_contrast_wait_while_corrections_are_learned_from(
    base_model: Path, config: TrainerConfig, write: Write, draw: Draw
) -> None:
    votes = tuple(replace(sample, reward=-0.5) for sample in draw(4).samples)
    report = update(Trainer(base_model, config), votes, write(4))
    assert report.returned_turns == {sample.turn_id: ReturnReason.NO_CONTRAST for sample in votes}
    assert report.unused_turn_ids == ()
    with pytest.raises(NoVariance):
        update(Trainer(base_model, config), votes)


def test_approved_replies_are_compared_with_corrected_ones(
    base_model: Path, config: TrainerConfig, write: Write, draw: Draw, tmp_path: Path
) -> None:
    approved = tuple(replace(sample, reward=1.0) for sample in draw(4).samples)
    trainer = Trainer(base_model, config.model_copy(update={"kl_target": 0.01}))
    report = update(trainer, approved, write(4))
    assert report.returned_turns == {} and report.metrics["critic/advantages/max"] > 0
    assert min(margins(trainer, base_model, tmp_path / "v1", write(4))) > 0


def test_a_reply_whose_text_is_unusable_is_learned_from_by_its_reward(
    base_model: Path, config: TrainerConfig, write: Write, draw: Draw
) -> None:
    corrected = write(2)
    unusable = replace(corrected[0], reply="another reply")
    report = update(Trainer(base_model, config), draw(4).samples, [unusable, corrected[1]])
    assert report.unused_texts == {"fb-0": TextRule.OTHER_TOKENS}
    assert (report.metrics["training/samples"], report.metrics["training/corrections"]) == (6, 1)
    assert report.unused_turn_ids == ()


def test_a_batch_of_unusable_texts_is_trained_as_without_them(
    base_model: Path, config: TrainerConfig, write: Write, draw: Draw
) -> None:
    first, second = Trainer(base_model, config), Trainer(base_model, config)
    same = replace(write(1)[0], text="order 0  is late")
    update(first, draw(6).samples, [same])
    update(second, (*draw(6).samples, same.sample))
    assert first.probe() == second.probe()


def test_foreign_corrected_replies_are_left_out(base_model: Path, config: TrainerConfig, write: Write) -> None:
    corrected = write(4)
    sample = corrected[0].sample
    foreign = replace(sample, logprobs=tuple(logprob - 9.0 for logprob in sample.logprobs))
    corrected[0] = replace(corrected[0], sample=foreign)
    report = update(Trainer(base_model, config), (), corrected)
    assert report.foreign_turns.keys() == {sample.turn_id} and report.metrics["training/corrections"] == 3
    with pytest.raises(ForeignSamples):
        update(Trainer(base_model, config), (), corrected[:1])


def test_corrections_of_older_replies_are_learned_from(
    base_model: Path, config: TrainerConfig, write: Write, draw: Draw, tmp_path: Path
) -> None:
    trainer = Trainer(base_model, config.model_copy(update={"kl_target": 0.01}))
    update(trainer, draw(4).samples, write(2, lag=5))
    assert min(margins(trainer, base_model, tmp_path / "v1", write(2))) > 0
