"""Measure the parts of the recipe for sparse feedback on the demo model: `make bench-sparse-votes`.

Between two updates the newest version answers `--replies` prompts, and users vote on a share of the replies
(`--judged`). With a reward model the other replies are scored by it, and an update learns from both. Without one, an
update waits until the votes fill a batch. All other settings are the service's defaults.

The figure is the number of votes that had been given when, for the first time, 85 % of the latest `WINDOW` replies were
good by the users' preferences. A finished run is a line in `--out` and is not repeated.
"""

import argparse
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

import torch

from alignment.config.rewards import SPARSE_REWARD_MODEL
from alignment.config.trainer import RewardModelConfig, TrainerConfig
from alignment.errors import NothingToCompare
from alignment.reward_model.dataset import BinaryLabel, PreferenceDataset, Reply
from alignment.reward_model.model import RewardModel
from alignment.signals.agreement import weight_from_agreement
from alignment.types import Sample
from app.core.settings.root import DEFAULT_EPOCHS
from demo.train import MODEL
from tests.benchmarks.results import append_row, read_rows
from tests.benchmarks.votes_figures import interval
from tests.support.offline.experiment import Experiment, ExperimentConfig
from tests.support.offline.service_defaults import BATCH_SIZE, service_config
from tests.support.reward_model_fit import fit_reward_model
from workers.training.reward_model_fits import REFIT_GROWTH

AIM, WINDOW = 0.85, 384
EVALUATION_USERS = 64


@dataclass(frozen=True)
class Recipe:
    """What an update learns from.

    `min_feedback`: votes for the first fit of a reward model, None without one; `weighted`: scores have a weight from
    the model's agreement with held-out votes; `group`: replies to each prompt, of which the first may get a vote;
    `replayed`: votes of earlier updates that each update learns from again; `epochs`: passes.
    """

    min_feedback: int | None = SPARSE_REWARD_MODEL.min_feedback
    weighted: bool = True
    group: int = 1
    replayed: int = 0
    epochs: int = DEFAULT_EPOCHS


RECIPES = {
    "votes": Recipe(min_feedback=None),
    "model": Recipe(),
    "model-unweighted": Recipe(weighted=False),
    "model-at-200": Recipe(min_feedback=200),
    "model-groups": Recipe(group=4),
    "model-replay": Recipe(replayed=24),
    "model-one-pass": Recipe(epochs=1),
    "votes-replay": Recipe(min_feedback=None, replayed=24),
}


@dataclass(frozen=True)
class Result:
    """One run. `votes`: until the aim is reached, None if it is not; `approval`: of the last version on other users.

    `curve`: (votes, approval of the replies) for each update; `fits`: (votes, agreement on held-out votes).
    """

    recipe: str
    judged: float
    seed: int
    votes: int | None
    all_votes: int
    updates: int
    approval: float
    kl: float
    curve: list[tuple[int, float]]
    fits: list[tuple[int, float]]


def make_config(recipe: Recipe, seed: int) -> TrainerConfig:
    config = service_config({"type": "ppo", "epochs": recipe.epochs}, seed)
    return config.model_copy(update={"reward_model": RewardModelConfig(lr=config.optim.lr)})


class SparseVotes:
    """A policy whose users vote on a share of its replies."""

    def __init__(self, recipe: Recipe, judged: float, seed: int, replies: int) -> None:
        self.recipe, self.judged, self.batch_size = recipe, judged, BATCH_SIZE
        config = make_config(recipe, seed)
        run_config = ExperimentConfig(config, replies_per_prompt=recipe.group, replies_per_update=replies, seed=seed)
        self.experiment = Experiment(MODEL, run_config)
        self.model = RewardModel(self.experiment.trainer)
        self.weight: float | None = None  # of the reward model's scores, None before it serves
        self.next_fit = recipe.min_feedback
        self.votes: list[Sample] = []
        self.fits: list[tuple[int, float]] = []
        self.updates = 0
        self._rng = Random(f"sparse votes {seed}")
        self._waiting: list[Sample] = []

    def step(self) -> tuple[float, int]:
        """Answer prompts, and update the policy if there is enough to learn from. Return approval and replies."""
        rated = self.experiment.collect_votes()
        is_first = [sample.turn_id.endswith("-0") for sample in rated.samples]  # of a group, which a person sees
        has_vote = [first and self._rng.random() < self.judged for first in is_first]
        new_votes = [sample for sample, voted in zip(rated.samples, has_vote, strict=True) if voted]
        others = [sample for sample, voted in zip(rated.samples, has_vote, strict=True) if not voted]
        replayed = self.votes[-self.recipe.replayed :] if self.recipe.replayed else []
        self.votes += new_votes
        self._waiting += new_votes
        self._fit_if_due()
        if self.weight is not None:
            batch = [*self._waiting, *self._score(others, self.weight), *replayed]
        else:
            batch = [*self._waiting, *replayed] if len(self._waiting) >= self.batch_size else []
        if len({sample.reward for sample in batch}) > 1:
            self.experiment.train(batch)
            self.updates += 1
            self._waiting = []
        return rated.approval, len(rated.samples)

    def _score(self, samples: Sequence[Sample], weight: float) -> list[Sample]:
        scores = self.model.score([_reply(sample) for sample in samples])
        return [replace(sample, reward=score, weight=weight) for sample, score in zip(samples, scores, strict=True)]

    def _fit_if_due(self) -> None:
        if self.next_fit is None or len(self.votes) < self.next_fit:
            return
        dataset = PreferenceDataset(
            tuple(map(_reply, self.votes)),
            labels=tuple(
                BinaryLabel(index, vote.reward, rater=vote.conversation) for index, vote in enumerate(self.votes)
            ),
        )
        refit_after = max(SPARSE_REWARD_MODEL.refit_after, len(self.votes) // REFIT_GROWTH)
        self.next_fit = len(self.votes) + refit_after
        try:
            metrics = fit_reward_model(self.model, dataset)
            agreement, low = metrics.get("agreement", 0.0), metrics["auc_low"]
        except NothingToCompare:
            return
        self.fits.append((len(self.votes), agreement))
        serves = low > SPARSE_REWARD_MODEL.min_agreement
        self.weight = (weight_from_agreement(low) if self.recipe.weighted else 1.0) if serves else None


def _reply(sample: Sample) -> Reply:
    return Reply(sample.turn_id, sample.prompt_ids, sample.output_ids, sample.conversation)


def run(name: str, judged: float, seed: int, replies: int, max_votes: int, log: Callable[[str], None]) -> Result:
    """Run until the aim is reached, or until `max_votes` votes were given."""
    learner = SparseVotes(RECIPES[name], judged, seed, replies)
    recent: deque[tuple[float, int]] = deque(maxlen=-(-WINDOW // replies))
    curve: list[tuple[int, float]] = []
    reached = None
    while len(learner.votes) < max_votes and reached is None:
        updates = learner.updates
        approval, count = learner.step()
        recent.append((approval, count))
        if learner.updates > updates:
            curve.append((len(learner.votes), approval))
            log(f"{name}, seed {seed}: update {learner.updates}, {len(learner.votes)} votes, {approval:.0%}")
        total = sum(number for _, number in recent)
        if total >= WINDOW and sum(share * number for share, number in recent) >= AIM * total:
            reached = len(learner.votes)
    end = learner.experiment.evaluate(EVALUATION_USERS)
    log(f"{name}, seed {seed}: aim at {reached} votes; {end.approval:.1%} on other users, fits {learner.fits}")
    return Result(
        recipe=name,
        judged=judged,
        seed=seed,
        votes=reached,
        all_votes=len(learner.votes),
        updates=learner.updates,
        approval=end.approval,
        kl=end.kl,
        curve=curve,
        fits=learner.fits,
    )


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per recipe: means over its seeds, votes with their 95 % interval."""
    groups: dict[tuple[str, float], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.recipe, result.judged].append(result)
    lines = [
        "| recipe | judged | runs that reached 85 % | votes until then | updates | approval by other users | KL to the "
        "base | agreement of the first fit, of the last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, judged), runs in groups.items():
        reached = [one.votes for one in runs if one.votes is not None]
        fitted = [one.fits for one in runs if one.fits]
        agreement = f"{fmean(f[0][1] for f in fitted):.0%}, {fmean(f[-1][1] for f in fitted):.0%}" if fitted else "–"
        lines.append(
            f"| {name} | {judged:.0%} | {len(reached)} of {len(runs)} | {interval(reached)} "
            f"| {fmean(one.updates for one in runs):.0f} | {fmean(one.approval for one in runs):.0%} "
            f"| {fmean(one.kl for one in runs):.3f} | {agreement} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--judged", type=float, default=0.02)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--replies", type=int, default=96)
    parser.add_argument("--max-votes", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path(".attune/sparse_votes.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [Result(**row) for row in read_rows(args.out)]
    finished = {(result.recipe, result.judged, result.seed) for result in results}
    log = partial(print, flush=True)
    for seed in args.seeds:
        for name in args.recipes:
            if (name, args.judged, seed) not in finished:
                result = run(name, args.judged, seed, args.replies, args.max_votes, log)
                results.append(result)
                append_row(args.out, asdict(result))
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
