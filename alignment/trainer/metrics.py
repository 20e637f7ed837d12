"""Metrics of an update, under the names that verl's dashboards use."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from alignment.data.episodes import count_episodes
from alignment.models import parallel
from alignment.trainer.loss_reduction import ReducedLoss
from alignment.types import Sample, TrainData

T = TypeVar("T", Tensor, Tensor | float)
MAX_AGENTS = 16  # that a batch has metrics of


class MetricAccumulator:
    """Adds up the metrics of one optimizer step over its micro-batches and ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor | float] = {}  # of the metrics that are means

    def add(self, loss: ReducedLoss, weight: float, prefix: str = "") -> None:
        """Add the terms of a micro-batch's loss, whose sums are reported, and its metrics, whose means are.

        `weight` is 1 or 0; `prefix` goes before the names.
        """
        for name, value in loss.terms.items():
            self._add(self.sums, prefix + name, value * weight)
        for name, metric in loss.metrics.items():
            self._add(self.sums, prefix + name, metric.sum.detach() * weight)
            self._add(self.counts, prefix + name, metric.count * weight)

    def totals(self) -> dict[str, float]:
        """Return the sums and the means over all ranks, without means over nothing.

        All ranks must call it, with the same metric names.
        """
        names, means = sorted(self.sums), sorted(self.counts)
        counts = [torch.as_tensor(self.counts[name]).to(self.sums[name]) for name in means]
        values = torch.stack([value.float() for value in (*(self.sums[name] for name in names), *counts)])
        totals = parallel.sum_over_ranks(values).tolist()
        denominators = dict(zip(means, totals[len(names) :], strict=True))
        return {
            name: total / denominators.get(name, 1.0)
            for name, total in zip(names, totals[: len(names)], strict=True)
            if denominators.get(name, 1.0)
        }

    def _add(self, totals: dict[str, T], name: str, value: T) -> None:
        totals[name] = totals[name] + value if name in totals else value


def average_steps(steps: Sequence[dict[str, float]], steps_per_epoch: int) -> dict[str, float]:
    """Return the means over all steps; `reference_kl` over the last epoch, which is closest to the new policy."""
    names = dict.fromkeys(chain.from_iterable(steps))
    metrics = {name: fmean(step[name] for step in steps if name in step) for name in names}
    if "reference_kl" in metrics:
        metrics["reference_kl"] = fmean(step["reference_kl"] for step in steps[-steps_per_epoch:])
    return metrics


class Stopwatch:
    """Measures the seconds of each phase of an update, as `timing_s/*`."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the duration of a `with` block as `timing_s/<name>`."""
        started = time.perf_counter()
        yield
        self.metrics[f"timing_s/{name}"] = time.perf_counter() - started


def batch_metrics(samples: Sequence[Sample], data: TrainData) -> dict[str, float]:
    """Return statistics of the batch: rewards, lengths in tokens, staleness in versions, entropy and advantages.

    `samples` is the whole batch, `data` the part that the algorithm selected.
    """
    is_output = data.response_mask_BT.bool()
    logprobs_BT = data.old_logprobs_BT if data.old_logprobs_BT is not None else data.rollout_logprobs_BT
    metrics = {
        **_summarize("critic/score", torch.tensor([sample.reward for sample in samples])),
        **_summarize("response_length", torch.tensor([float(len(sample.output_ids)) for sample in samples])),
        **_summarize("prompt_length", torch.tensor([float(len(sample.prompt_ids)) for sample in samples])),
        "perf/total_num_tokens": float(sum(sample.num_tokens for sample in samples)),
        "training/samples": float(len(samples)),
        "training/episodes": float(count_episodes(samples)),
        "training/effective_samples": _effective_size([sample.weight for sample in samples]),
        "training/off_policy/trajectory_staleness": fmean(sample.lag for sample in samples),
        "training/off_policy/trajectory_staleness_worst": float(max(sample.lag for sample in samples)),
        # An estimate: the policy drew the samples itself. The exact mean replaces it where the entropy is computed.
        "actor/entropy": -float(logprobs_BT[is_output].mean()),
    }
    for agent in sorted({sample.agent for sample in samples if sample.agent is not None})[:MAX_AGENTS]:
        rewards = [sample.reward for sample in samples if sample.agent == agent]
        metrics |= {f"agents/{agent}/turns": float(len(rewards)), f"agents/{agent}/score": fmean(rewards)}
    if data.advantages_BT is not None:
        metrics |= _summarize("critic/advantages", data.advantages_BT[is_output])
    return metrics


def _effective_size(weights: Sequence[float]) -> float:
    """Return the number of equally weighted samples whose mean varies as much: (Σw)² / Σw²  (Kish, 1965)."""
    return sum(weights) ** 2 / sum(weight**2 for weight in weights)


def _summarize(name: str, values: Tensor) -> dict[str, float]:
    statistics = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{statistic}": float(value) for statistic, value in statistics.items()}
