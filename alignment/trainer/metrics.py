"""What an update did, in the metric names that dashboards for verl already know."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alignment.models import parallel
from alignment.types import Sample

if TYPE_CHECKING:
    from alignment.algorithms import TrainData


@dataclass(frozen=True)
class UpdateReport:
    """One update. `actor/*` are means over its steps; `reference_kl` is of the last epoch, so of nearly
    the policy that came out. An algorithm without a reference tells none.

    Example: UpdateReport(batch_id="b-1", updates=4, metrics={"actor/pg_loss": -0.01, "reference_kl": 0.02})
    """

    batch_id: str
    updates: int
    metrics: dict[str, float]
    left_out: tuple[str, ...] = ()  # turns that the algorithm could not use

    @property
    def reference_kl(self) -> float:
        return self.metrics.get("reference_kl", 0.0)


class MetricAccumulator:
    """Metrics of one step, which come in parts that add up, from micro-batches and ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def totals(self, num_ranks: int) -> dict[str, float]:
        """All ranks call, with the same names."""
        names = sorted(self.sums)
        values = torch.stack([self.sums[name].float() for name in names])
        if num_ranks > 1:
            values = parallel.sum_over_ranks(values)
        return dict(zip(names, values.tolist(), strict=True))


def mean_of_steps(steps: Sequence[dict[str, float]], an_epoch: int) -> dict[str, float]:
    """Means over all steps; of `reference_kl` over the last epoch's, which are nearest to what came out."""
    metrics = {name: fmean(step[name] for step in steps) for name in steps[0]}
    if "reference_kl" in metrics:
        metrics["reference_kl"] = fmean(step["reference_kl"] for step in steps[-an_epoch:])
    return metrics


class Stopwatch:
    """Seconds by what they were spent on, as `timing_s/*`."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.metrics[f"timing_s/{name}"] = time.perf_counter() - began


def describe(samples: Sequence[Sample], data: "TrainData") -> dict[str, float]:
    """What the batch was like, and what credit was given in it."""
    present = data.mask_BT.bool()
    told = data.parent_BT if data.parent_BT is not None else data.rollout_BT
    metrics = {
        **_spread("critic/score", torch.tensor([sample.reward for sample in samples])),
        **_spread("response_length", torch.tensor([float(len(sample.output_ids)) for sample in samples])),
        **_spread("prompt_length", torch.tensor([float(len(sample.prompt_ids)) for sample in samples])),
        "perf/total_num_tokens": float(sum(sample.num_tokens for sample in samples)),
        "training/samples": float(len(samples)),
        "training/samples_left_out": float(len(samples) - len(data.samples)),
        "training/off_policy/trajectory_staleness": fmean(sample.lag for sample in samples),
        "training/off_policy/trajectory_staleness_worst": float(max(sample.lag for sample in samples)),
        "actor/entropy": -float(told[present].mean()),  # of the samples, which are the policy's own
    }
    if data.advantages_BT is not None:
        metrics |= _spread("critic/advantages", data.advantages_BT[present])
    return metrics


def _spread(name: str, values: Tensor) -> dict[str, float]:
    figures = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{figure}": float(value) for figure, value in figures.items()}
