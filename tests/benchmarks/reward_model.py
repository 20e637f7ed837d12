"""Measure the accuracy of a reward model by the amount of feedback: `python -m tests.benchmarks.reward_model`.

The demo model samples two replies to each prompt. Simulated users with hidden preferences vote on the first reply, or
compare the two replies if they approve of exactly one. One vote in a hundred is a mistake. Each row of the table is one
fit, evaluated on replies to other users, without mistakes. Replies and finished fits are saved in `--out`, so the
benchmark can be stopped and resumed.
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
from demo.train import MODEL
from tests.benchmarks.results import append_row, read_rows
from tests.support.offline.chats import ChatPool, Judge
from tests.support.offline.sampler import Sampler
from tests.support.reward_model_fit import fit_reward_model

TRAIN_PROMPTS, EVALUATION_PROMPTS = 4000, 600
NUM_CHATS = 48  # conversations at a time
LR = 1.5e-3  # for an adapter of a model with 2 M parameters, as in the demo
SIZES = {"votes": (200, 1000, 4000), "pairs": (200, 1000)}
TIMED_REPLIES = 256  # replies that are scored to measure the time


@dataclass(frozen=True)
class PromptReplies:
    """A prompt, two replies, and whether the user approves of each. `mistakes`: whether a vote is wrong."""

    conversation: str
    prompt_ids: list[int]
    output_ids: list[list[int]]
    approved: list[bool]
    mistakes: list[bool]


@dataclass(frozen=True)
class Result:
    """One fit. `held_out`: the metrics of the fit; `evaluation`: metrics on other users. Times are CPU time."""

    kind: str
    num_labels: int
    seed: int
    held_out: dict[str, float]
    evaluation: dict[str, float]
    ms_per_reply: float
    seconds: float


def sample_replies(count: int, seed: int, label: str) -> list[PromptReplies]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    sampler, chats, judge = Sampler(MODEL), ChatPool(tokenizer, NUM_CHATS, seed), Judge(tokenizer, seed)
    generator = torch.Generator().manual_seed(seed)
    rows: list[PromptReplies] = []
    while len(rows) < count:
        prompts = chats.prompts()
        samples = sampler.sample([prompt.prompt_ids for prompt in prompts], generator, count=2)
        chats.add_replies([replies[0] for replies in samples])
        for prompt, replies in zip(prompts, samples, strict=True):
            approved = [judge.approves(prompt, reply) for reply in replies]
            output_ids = [list(reply.ids) for reply in replies]
            mistakes = [judge.makes_mistake() for _ in replies]
            rows.append(PromptReplies(prompt.conversation, list(prompt.prompt_ids), output_ids, approved, mistakes))
        print(f"{label}: {len(rows)} of {count} prompts", flush=True)
    return rows[:count]


def load_or_sample(file: Path, count: int, seed: int) -> list[PromptReplies]:
    if not file.exists():
        rows = sample_replies(count, seed, file.stem)
        file.write_text(json.dumps([asdict(row) for row in rows]))
    return [PromptReplies(**row) for row in json.loads(file.read_text())]


def make_dataset(
    rows: Sequence[PromptReplies], kind: str, count: int, *, with_mistakes: bool = True
) -> PreferenceDataset:
    """Return `count` labels of the kind, "votes" or "pairs"; with a negative count, all of them."""
    replies: list[Reply] = []
    pairs: list[PreferencePair] = []
    votes: list[BinaryLabel] = []
    for number, row in enumerate(rows):
        if len(pairs) + len(votes) == count:
            break
        if kind == "pairs" and len(set(row.approved)) == 1:
            continue
        index, turn = len(replies), f"{row.conversation}-{number}"
        for candidate in range(1 + (kind == "pairs")):
            ids = tuple(row.prompt_ids), tuple(row.output_ids[candidate])
            replies.append(Reply(f"{turn}-{candidate}", *ids, row.conversation))
        up = row.approved[0] != (with_mistakes and row.mistakes[0])
        if kind == "pairs":
            pairs.append(PreferencePair(index + (not up), index + up, rater=row.conversation, ranking=number))
        else:
            votes.append(BinaryLabel(index, 1.0 if up else -1.0, rater=row.conversation))
    return PreferenceDataset(tuple(replies), tuple(pairs), tuple(votes))


def evaluate(model: RewardModel, rows: Sequence[PromptReplies]) -> dict[str, float]:
    """Compare the model with the preferences of the users, without mistakes."""
    votes = make_dataset(rows, "votes", -1, with_mistakes=False)
    pairs = make_dataset(rows, "pairs", -1, with_mistakes=False)
    scores, labels = model.score(votes.replies), [vote.value for vote in votes.labels]
    pair_scores = model.score(pairs.replies)
    margins = [pair_scores[pair.chosen] - pair_scores[pair.rejected] for pair in pairs.pairs]
    agreement = Agreement.count(zip(labels, scores, strict=True), margins)
    score_tensor, label_tensor = torch.tensor(scores), torch.tensor(labels)
    return {
        "thumb_accuracy": (agreement.ups_right + agreement.downs_right) / (agreement.ups + agreement.downs),
        "thumb_auc": auc(score_tensor, label_tensor > 0) or 0.0,
        "pair_accuracy": agreement.pairs_right / agreement.pairs,
        "calibration_error": calibration_error((1 + score_tensor) / 2, label_tensor),
        "approved": agreement.ups / (agreement.ups + agreement.downs),
    }


def run(
    trainer: Trainer,
    train_data: list[PromptReplies],
    evaluation_data: list[PromptReplies],
    kind: str,
    count: int,
    seed: int,
) -> Result:
    model, start = RewardModel(trainer), time.process_time()
    dataset = make_dataset(train_data, kind, count)
    fit = fit_reward_model(model, dataset)
    fit_seconds = time.process_time() - start
    evaluation = evaluate(model, evaluation_data)
    replies = make_dataset(evaluation_data, "votes", TIMED_REPLIES).replies
    start = time.process_time()
    model.score(replies)
    ms_per_reply = 1000 * (time.process_time() - start) / len(replies)
    return Result(kind, len(dataset), seed, fit, evaluation, ms_per_reply, fit_seconds)


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table of the means over the seeds."""
    lines = [
        "| feedback | held out: accuracy | AUC | calibration error before → after | other users: votes correct "
        "| AUC | pairs correct | calibration error | s to fit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, count in sorted(
        {(row.kind, row.num_labels) for row in results}, key=lambda row: (row[0] == "pairs", row)
    ):
        rows = [row for row in results if (row.kind, row.num_labels) == (kind, count)]

        def mean(part: str, name: str, rows: list[Result] = rows, form: str = ".2f") -> str:
            values: list[Any] = [getattr(row, part).get(name) for row in rows]
            return "–" if None in values else format(fmean(values), form)

        accuracy = mean("held_out", "pair_accuracy" if kind == "pairs" else "thumb_accuracy")
        before, after = (mean("held_out", f"calibration_error{when}") for when in ("_before", ""))
        error = "–" if before == "–" else f"{before} → {after}"
        lines.append(
            f"| {count:,} {kind} | {accuracy} | {mean('held_out', 'thumb_auc')} | {error} "
            f"| {mean('evaluation', 'thumb_accuracy')} | {mean('evaluation', 'thumb_auc')} "
            f"| {mean('evaluation', 'pair_accuracy')} "
            f"| {mean('evaluation', 'calibration_error')} | {fmean(row.seconds for row in rows):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path(".attune/reward-model"))
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--labels", nargs="+", type=int, help="numbers of labels instead of the table's")
    parser.add_argument("--train-prompts", type=int, default=TRAIN_PROMPTS)
    parser.add_argument("--evaluation-prompts", type=int, default=EVALUATION_PROMPTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    evaluation_data = load_or_sample(args.out / "evaluation.json", args.evaluation_prompts, seed=1000)
    train_data = load_or_sample(args.out / "training.json", args.train_prompts, seed=0)
    results_file = args.out / "results.jsonl"
    results = [Result(**row) for row in read_rows(results_file)]
    for seed in args.seeds:
        config = TrainerConfig(reward_model=RewardModelConfig(lr=args.lr), seed=seed)
        trainer = Trainer(MODEL, config)
        for kind, sizes in SIZES.items():
            for count in args.labels or sizes:
                if (kind, count, seed) not in {(row.kind, row.num_labels, row.seed) for row in results}:
                    results.append(run(trainer, train_data, evaluation_data, kind, count, seed))
                    append_row(results_file, asdict(results[-1]))
                    print(json.dumps(asdict(results[-1])), flush=True)
    approved = fmean(row.evaluation["approved"] for row in results)
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, one thread; ", end="")
    ms_per_reply = fmean(row.ms_per_reply for row in results)
    print(f"{approved:.0%} of the replies are approved; {ms_per_reply:.1f} ms to score one\n\n{table(results)}")


if __name__ == "__main__":
    main()
