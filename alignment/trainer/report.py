"""What an update did, in the metric names that dashboards for verl already know."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.model import shard
from alignment.samples import Sample


@dataclass(frozen=True)
class UpdateReport:
    """One update. `actor/*` are means over its steps; `reference_kl` is of the last epoch, so of nearly
    the policy that came out.

    Example: UpdateReport(batch_id="b-1", updates=4, metrics={"actor/pg_loss": -0.01, "reference_kl": 0.02})
    """

    batch_id: str
    updates: int
    metrics: dict[str, float]

    @property
    def reference_kl(self) -> float:
        return self.metrics["reference_kl"]


class Tally:
    """Metrics that come in parts, from micro-batches and ranks, and are means in the end."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def means(self, num_steps: int, num_ranks: int) -> dict[str, float]:
        """All ranks call."""
        values = torch.stack(list(self.sums.values()))
        if num_ranks > 1:
            values = shard.sum_over_ranks(values)
        return dict(zip(self.sums, (values / num_steps).tolist(), strict=True))


class Stopwatch:
    """Seconds by what they were spent on, as `timing_s/*`."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.metrics[f"timing_s/{name}"] = time.perf_counter() - began


def describe(samples: Sequence[Sample], advantages_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """What the batch was like before anything was learned from it."""
    advantages_N = advantages_BT[mask_BT.bool()]
    return {
        **_spread("critic/score", torch.tensor([sample.reward for sample in samples])),
        **_spread("critic/advantages", advantages_N),
        **_spread("response_length", torch.tensor([float(len(sample.output_ids)) for sample in samples])),
        **_spread("prompt_length", torch.tensor([float(len(sample.prompt_ids)) for sample in samples])),
        "perf/total_num_tokens": float(sum(sample.num_tokens for sample in samples)),
    }


def _spread(name: str, values: Tensor) -> dict[str, float]:
    figures = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{figure}": float(value) for figure, value in figures.items()}
