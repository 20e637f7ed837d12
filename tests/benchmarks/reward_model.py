"""What a reward model knows of the shoppers' taste, by what it was told: `python -m tests.benchmarks.reward_model`.

Two replies of the demo model to each of many prompts; shoppers with the hidden taste press a thumb for the first, or
say which of the two they prefer (where one is approved and the other is not). One press in a hundred is a slip. Each
line of the table is one fit, then asked about replies to other shoppers whom it has never met, without slips. Replies
and finished fits are kept in `--out`, so this can be stopped and taken up.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoTokenizer

from alignment.config.trainer import RewardModelConfig, TrainerConfig
from alignment.functional import auc, calibration_error
from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, PreferencePair, Reply
from alignment.reward_model.model import RewardModel
from alignment.signals.agreement import Agreement
from alignment.trainer.trainer import Trainer
from demo.offline.chats import ChatPool, Judge
from demo.offline.sampler import Sampler
from demo.train import MODEL

TRAIN_PROMPTS, ASKED = 4000, 600  # prompts
AT_ONCE = 48
LR = 1.5e-3  # of an adapter on 2 M parameters, as the demo has it
SIZES = {"thumbs": (200, 1000, 4000), "pairs": (200, 1000)}
TIMED = 256  # replies that are scored for the clock


@dataclass(frozen=True)
class Drawn:
    """A prompt, two replies, and whether the shopper approves of each."""

    conversation: str
    prompt_ids: list[int]
    output_ids: list[list[int]]
    approved: list[bool]
    slips: list[bool]


@dataclass(frozen=True)
class Result:
    """One fit. `held_out`: as the fit itself tells; `asked`: of shoppers whom it never met; time of the processor."""

    kind: str
    words: int
    seed: int
    held_out: dict[str, float]
    asked: dict[str, float]
    ms_a_turn: float
    seconds: float


def draw(count: int, seed: int, tell: str) -> list[Drawn]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    sampler, crowd, judge = Sampler(MODEL), ChatPool(tokenizer, AT_ONCE, seed), Judge(tokenizer, seed)
    order = torch.Generator().manual_seed(seed)
    found: list[Drawn] = []
    while len(found) < count:
        asked = crowd.prompts()
        drawn = sampler.sample([each.prompt_ids for each in asked], order, count=2)
        crowd.add_replies([replies[0] for replies in drawn])
        for each, replies in zip(asked, drawn, strict=True):
            liked = [judge.approves(each, reply) for reply in replies]
            said = [list(reply.ids) for reply in replies]
            slips = [judge.makes_mistake() for _ in replies]
            found.append(Drawn(each.conversation, list(each.prompt_ids), said, liked, slips))
        print(f"{tell}: {len(found)} of {count} prompts", flush=True)
    return found[:count]


def kept(file: Path, count: int, seed: int) -> list[Drawn]:
    if not file.exists():
        found = draw(count, seed, file.stem)
        file.write_text(json.dumps([asdict(one) for one in found]))
    return [Drawn(**one) for one in json.loads(file.read_text())]


def words(drawn: Sequence[Drawn], kind: str, count: int, *, slips: bool = True) -> PreferenceDataset:
    replies, pairs, thumbs = [], [], []
    for number, one in enumerate(drawn):
        if len(pairs) + len(thumbs) == count:
            break
        if kind == "pairs" and len(set(one.approved)) == 1:
            continue
        at, turn = len(replies), f"{one.conversation}-{number}"
        for candidate in range(1 + (kind == "pairs")):
            ids = tuple(one.prompt_ids), tuple(one.output_ids[candidate])
            replies.append(Reply(f"{turn}-{candidate}", *ids, one.conversation))
        up = one.approved[0] != (slips and one.slips[0])
        if kind == "pairs":
            pairs.append(PreferencePair(at + (not up), at + up, rater=one.conversation, ranking=number))
        else:
            thumbs.append(BinaryLabel(at, 1.0 if up else -1.0, rater=one.conversation))
    return PreferenceDataset(tuple(replies), tuple(pairs), tuple(thumbs))


def examined(model: RewardModel, drawn: Sequence[Drawn]) -> dict[str, float]:
    """Against the taste itself."""
    replies, pairs = words(drawn, "thumbs", -1, slips=False), words(drawn, "pairs", -1, slips=False)
    told, said = model.score(replies.replies), [thumb.value for thumb in replies.labels]
    scored = model.score(pairs.replies)
    margins = [scored[pair.chosen] - scored[pair.rejected] for pair in pairs.pairs]
    agreement = Agreement.count(zip(said, told, strict=True), margins)
    values, liked = torch.tensor(told), torch.tensor(said)
    return {
        "thumb_accuracy": (agreement.ups_right + agreement.downs_right) / (agreement.ups + agreement.downs),
        "thumb_auc": auc(values, liked > 0) or 0.0,
        "pair_accuracy": agreement.pairs_right / agreement.pairs,
        "calibration_error": calibration_error((1 + values) / 2, liked),
        "approved": agreement.ups / (agreement.ups + agreement.downs),
    }


def run(learner: Trainer, train_data: list[Drawn], asked: list[Drawn], kind: str, count: int, seed: int) -> Result:
    model, began = RewardModel(learner), time.process_time()
    fit = model.fit(words(train_data, kind, count))
    fitting = time.process_time() - began
    figures = examined(model, asked)
    some = words(asked, "thumbs", TIMED).replies
    began = time.process_time()
    model.score(some)
    seconds = time.process_time() - began
    return Result(
        kind, len(words(train_data, kind, count)), seed, fit.metrics, figures, 1000 * seconds / len(some), fitting
    )


def table(results: Sequence[Result]) -> str:
    """Markdown: means over seeds."""
    lines = [
        "| told | held out: accuracy | AUC | error of calibration before → after | other shoppers: thumbs right "
        "| AUC | pairs right | error of calibration | s to fit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, count in sorted({(one.kind, one.words) for one in results}, key=lambda one: (one[0] == "pairs", one)):
        mine = [one for one in results if (one.kind, one.words) == (kind, count)]

        def mean(part: str, name: str, mine: list[Result] = mine, form: str = ".2f") -> str:
            told: list[Any] = [getattr(one, part).get(name) for one in mine]
            return "–" if None in told else format(fmean(told), form)

        accuracy = mean("held_out", "pair_accuracy" if kind == "pairs" else "thumb_accuracy")
        before, after = (mean("held_out", f"calibration_error{when}") for when in ("_before", ""))
        error = "–" if before == "–" else f"{before} → {after}"
        lines.append(
            f"| {count:,} {kind} | {accuracy} | {mean('held_out', 'thumb_auc')} | {error} "
            f"| {mean('asked', 'thumb_accuracy')} | {mean('asked', 'thumb_auc')} | {mean('asked', 'pair_accuracy')} "
            f"| {mean('asked', 'calibration_error')} | {fmean(one.seconds for one in mine):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--seeds", nargs="+", type=int, default=[0])
    given.add_argument("--out", type=Path, default=Path(".attune/reward-model"))
    given.add_argument("--lr", type=float, default=LR)
    told = given.parse_args()
    torch.set_num_threads(1)
    told.out.mkdir(parents=True, exist_ok=True)
    asked = kept(told.out / "asked.json", ASKED, seed=1000)
    train_data = kept(told.out / "taught.json", TRAIN_PROMPTS, seed=0)
    finished = told.out / "results.jsonl"
    lines = finished.read_text().splitlines() if finished.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    for seed in told.seeds:
        config = TrainerConfig(reward_model=RewardModelConfig(lr=told.lr), seed=seed)
        learner = Trainer(MODEL, config)
        for kind, sizes in SIZES.items():
            for count in sizes:
                if (kind, count, seed) not in {(one.kind, one.words, one.seed) for one in results}:
                    results.append(run(learner, train_data, asked, kind, count, seed))
                    with finished.open("a") as file:
                        file.write(json.dumps(asdict(results[-1])) + "\n")
                    print(json.dumps(asdict(results[-1])), flush=True)
    approved = fmean(one.asked["approved"] for one in results)
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, one thread; ", end="")
    took = fmean(one.ms_a_turn for one in results)
    print(f"{approved:.0%} of the replies are approved; {took:.1f} ms to score one\n\n{table(results)}")


if __name__ == "__main__":
    main()
