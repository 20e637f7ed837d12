"""Measure what corrections teach, on the demo model: `python -m tests.benchmarks.corrections`.

Simulated users judge every reply. "votes": a thumb on each reply. "corrections": nothing on a liked reply; a disliked
one is rewritten in the style that they like, with the right facts. "both": a thumb up on a liked reply, a rewritten
text for a disliked one. "no texts": the same, but the texts are not learned from (the rewards are 1 and -0.5). One
piece of feedback in a hundred is mistaken: the thumb is the wrong one, or a liked reply is corrected and a disliked one
is liked. An update takes the pieces of feedback that start one in the service, with the service's defaults.

The rewritten texts come from the generator of the demo model's pretraining texts, so that the model can nearly write
them: people who write in another way than the model teach it more slowly.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean

import torch

from alignment.types import CorrectedReply, Sample
from demo.reply_styles import reply as write_reply
from demo.train import MODEL
from tests.benchmarks.results import append_row, read_rows
from tests.support.offline.chats import Prompt
from tests.support.offline.experiment import Experiment, ExperimentConfig
from tests.support.offline.sampler import Reply
from tests.support.offline.service_defaults import BATCH_SIZE, service_config

ARMS = ("votes", "corrections", "both", "no texts")
ENOUGH = 0.85  # approval
REPLIES = 24  # that are sampled at a time
MAX_ROUNDS = 40  # of replies for one update


@dataclass(frozen=True)
class Result:
    """One run. `curve`: pieces of feedback, replies and approval by other users after each evaluated update."""

    arm: str
    algorithm: str
    seed: int
    curve: list[tuple[int, int, float]]

    def first_enough(self) -> tuple[int, int] | None:
        """Return the pieces of feedback and the replies after which other users like 85 % of the replies."""
        return next(((pieces, replies) for pieces, replies, approval in self.curve if approval >= ENOUGH), None)


class CorrectingUsers(Experiment):
    """An experiment whose users write better texts."""

    def __init__(self, config: ExperimentConfig, arm: str) -> None:
        super().__init__(MODEL, config)
        self.arm = arm
        self.corrected: list[CorrectedReply] = []
        self.random = Random(f"corrections {config.seed}")

    def _make_samples(
        self, prompt: Prompt, replies: Sequence[Reply], approvals: Sequence[bool], behavior_version: int
    ) -> list[Sample]:
        samples = super()._make_samples(prompt, replies, approvals, behavior_version)
        if self.arm == "votes":
            return samples
        judged = [sample if sample.reward > 0 else replace(sample, reward=-0.5) for sample in samples]
        disliked = [(reply, sample) for reply, sample in zip(replies, judged, strict=True) if sample.reward < 0]
        if self.arm != "no texts":
            for reply, sample in disliked:
                text = write_reply(self.random, prompt.question, "helpful")
                self.corrected.append(CorrectedReply(f"fb-{sample.turn_id}", sample, self.text(reply), text))
        return [sample for _, sample in disliked] if self.arm == "corrections" else judged


def run(arm: str, algorithm: str, seed: int, args: argparse.Namespace, log: Callable[[str], None]) -> Result:
    config = ExperimentConfig(service_config({"type": algorithm}, seed), replies_per_update=REPLIES, seed=seed)
    users = CorrectingUsers(config, arm)
    curve: list[tuple[int, int, float]] = []
    num_pieces = num_replies = 0
    for number in range(1, args.updates + 1):
        samples: list[Sample] = []
        users.corrected.clear()
        for _ in range(MAX_ROUNDS):
            samples += users.collect_votes().samples
            num_replies += REPLIES
            if len(samples) >= BATCH_SIZE:
                break
        metrics, refused = users.train(samples, corrected=users.corrected)
        num_pieces += len(samples)
        if number % args.every == 0:
            curve.append((num_pieces, num_replies, users.evaluate(args.users).approval))
            log(
                f"{arm}, {algorithm}, seed {seed}, update {number}: {num_pieces} pieces on {num_replies} replies, "
                f"{curve[-1][-1]:.0%}, scale {metrics.get('actor/step_scale', 0):.2g}{', refused' if refused else ''}"
            )
    return Result(arm, algorithm, seed, curve)


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with a row for each kind of feedback, and the values of its seeds."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.arm, result.algorithm].append(result)
    lines = [
        "| feedback | algorithm | seeds | to 85 %: pieces of feedback | to 85 %: replies | approval by update | last |",
        "|---|---|---|---|---|---|---|",
    ]
    for (arm, algorithm), runs in groups.items():
        reached = [run.first_enough() for run in runs]
        pieces = ", ".join("–" if one is None else str(one[0]) for one in reached)
        replies = ", ".join("–" if one is None else str(one[1]) for one in reached)
        curve = " ".join(
            f"{fmean(values):.0%}" for values in zip(*([p[2] for p in run.curve] for run in runs), strict=True)
        )
        last = ", ".join(f"{run.curve[-1][-1]:.0%}" for run in runs)
        lines.append(f"| {arm} | {algorithm} | {len(runs)} | {pieces} | {replies} | {curve} | {last} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--algorithms", nargs="+", default=["ppo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--every", type=int, default=1, help="updates between evaluations")
    parser.add_argument("--users", type=int, default=64, help="other users who evaluate")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/corrections.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [Result(**row) for row in read_rows(args.out)]
    finished = {(result.arm, result.algorithm, result.seed) for result in results}
    for seed in args.seeds:
        for algorithm in args.algorithms:
            for arm in args.arms:
                if (arm, algorithm, seed) not in finished:
                    results.append(run(arm, algorithm, seed, args, lambda line: print(line, flush=True)))
                    append_row(args.out, asdict(results[-1]))
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
